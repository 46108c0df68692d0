"""A callback that makes a model sparse in Lightning. Importing this module imports lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from .dense_to_sparse.pruner import Pruner
from .sparse_to_sparse.rewiring import Rewiring


class SparsifyCallback(Callback):
    """Prepares the module at setup, attaches to its optimizers, and saves its state in Lightning's checkpoints. ::

        from blocksparse.torch.sparsify.lightning import SparsifyCallback

        pruner = bss.MagnitudePruner(bss.PolynomialDecay(0.9, 200, 2000), block_size=32, targets="encoder")
        trainer = lightning.Trainer(callbacks=[SparsifyCallback(pruner)])
        trainer.fit(module, data)
        print(pruner.report())

    Steps are those of the optimizer, however many batches are accumulated. `trainer.fit(..., ckpt_path=...)` goes on
    bit for bit from the end of an epoch; in the middle of one, Lightning itself begins with the first batch again.

    Args:
        pruner: one (or a `SET` or `RigL`) that was not prepared, or was for this module.
    """

    def __init__(self, pruner: Pruner | Rewiring) -> None:
        self.pruner = pruner

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before weights are loaded, so that a checkpoint's gates find their places."""
        if not self.pruner.layers:
            self.pruner.prepare(pl_module)
            if getattr(self.pruner, "compact_at", None):
                self._load_before(pl_module)

    def _load_before(self, pl_module: Any) -> None:
        """Layers that have moved need their shapes before weights are loaded; Lightning asks callbacks afterwards."""
        theirs = pl_module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            if (state := checkpoint.get("callbacks", {}).get(self.state_key)) is not None:
                self.load_state_dict(state)
            theirs(checkpoint)

        pl_module.on_load_checkpoint = on_load_checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers are there."""
        if getattr(self.pruner, "compact_at", None):
            vars(pl_module).pop("on_load_checkpoint", None)  # what is loaded is loaded; pickling knows no such function
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
