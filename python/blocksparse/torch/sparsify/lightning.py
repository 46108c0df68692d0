"""A callback that makes a model sparse in Lightning. Importing this module imports lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from .pruner import Pruner


class SparsifyCallback(Callback):
    """Prepares the module at setup, attaches to its optimizers, and saves its state in Lightning's checkpoints. ::

        from blocksparse.torch.sparsify.lightning import SparsifyCallback

        pruner = bss.MagnitudePruner(bss.PolynomialDecay(0.9, 200, 2000), block_size=32, targets="encoder")
        trainer = lightning.Trainer(callbacks=[SparsifyCallback(pruner)])
        trainer.fit(module, data)
        print(pruner.report())

    Steps are those of the optimizer, however many batches are accumulated. `trainer.fit(..., ckpt_path=...)` goes on
    bit for bit.

    Args:
        pruner: one that was not prepared, or was for this module.
    """

    def __init__(self, pruner: Pruner) -> None:
        self.pruner = pruner

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before weights are loaded, so that a checkpoint's gates find their places."""
        if not self.pruner.layers:
            self.pruner.prepare(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers are there."""
        self.pruner.detach()
        self.pruner.attach(*trainer.optimizers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leaves the optimizers alone again. Gates stay: `pruner.squash_mask()` ends them."""
        self.pruner.detach()

    def state_dict(self) -> dict[str, Any]:
        """The pruner's, in Lightning's checkpoint."""
        return self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of a checkpoint. Raises ValueError if it is another model's or pruner's."""
        self.pruner.load_state_dict(state_dict)
