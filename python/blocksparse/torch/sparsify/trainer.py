"""A callback that makes a model sparse in transformers' Trainer. Importing this module imports transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .dense_to_sparse.pruner import Pruner
from .sparse_to_sparse.rewiring import Rewiring

FILE = "sparsifier.pt"  # in a checkpoint's folder


class SparsifyCallback(TrainerCallback):
    """Prepares the model when the Trainer is made, attaches to its optimizer, and saves what resuming needs. ::

        from blocksparse.torch.sparsify.trainer import SparsifyCallback

        pruner = bss.MagnitudePruner(bss.PolynomialDecay(0.9, 200, 2000), block_size=32, ignore="lm_head")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[SparsifyCallback(pruner)])
        trainer.train()
        print(pruner.report())

    Steps are those of the optimizer, however many batches are accumulated. `trainer.train(resume_from_checkpoint=True)`
    goes on bit for bit.

    Args:
        pruner: one (or a `SET` or `RigL`) that was not prepared, or was for this model.
        checkpoint: the folder that training is resumed from. It has to be given here, too, where it is not one of
            `output_dir`, and for a pruner with `compact_at`: layers that have moved need their shapes before the
            Trainer loads weights, which is when it says nothing.

    Source of the pruner's state: the file `sparsifier.pt` in each checkpoint's folder.
    """

    def __init__(self, pruner: Pruner | Rewiring, checkpoint: str | os.PathLike[str] | None = None) -> None:
        self.pruner = pruner
        self.checkpoint = None if checkpoint is None else Path(checkpoint)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Before weights are loaded, so that a checkpoint's gates find their places."""
        if not self.pruner.layers and model is not None:
            self.pruner.prepare(model)
            if self.checkpoint is not None and getattr(self.pruner, "compact_at", None):
                self.pruner.load_state_dict(_read(self.checkpoint / FILE))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **more: Any
    ) -> None:
        """Goes on from a checkpoint, if the Trainer does.

        Raises:
            FileNotFoundError: the checkpoint has no file of this callback, as one whose saving was cut off.
            ValueError: that file is damaged, or of another model or pruner.
        """
        if not self.pruner.layers:  # another model was made meanwhile
            self.pruner.prepare(model)
        if state.global_step > 0:
            folder = self.checkpoint or Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.pruner.load_state_dict(_read(folder / FILE))
        self.pruner.detach()
        self.pruner.attach(optimizer)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Beside the model's files."""
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.pruner.state_dict(), path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leaves the optimizer alone again. Gates stay: `pruner.squash_mask()` or `pruner.convert(model)` ends them."""
        self.pruner.detach()


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(
            f"[SparsifyCallback] there is no {path}. It is the last file of a checkpoint: if saving was cut off, go on "
            "from an earlier one. If the folder is elsewhere, give it as checkpoint="
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, for a damaged file
        raise ValueError(f"[SparsifyCallback] {path} cannot be read, or is damaged: {error}") from error
    return state
