"""The distillation: the sparse model learns to say what the dense one says, and can be stopped and go on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss

from .model import Batches, build

RATE = 5e-4
WARM_UP = 8
CLIP = 1.0
TARGETS = r"bert\.encoder"
STUDENT, STATE = "student.safetensors", "optimizer.pt"


@dataclass(frozen=True)
class Progress:
    """Where a training is."""

    step: int
    loss: float


class Training:
    """The student beside its teacher.

    Args:
        teacher: the dense model.
        student: the sparse one.
        masks: of the student's layers: those that are still dense are kept at zero outside of them.
        batches: of the training text.
        steps: in all.
        folder: of the checkpoint.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        masks: Mapping[str, Tensor],
        batches: Batches,
        steps: int,
        folder: Path,
    ) -> None:
        self.student, self.batches, self.steps, self.folder = student, batches, steps, folder
        self.losses: list[float] = []
        self.seconds = 0.0
        student.requires_grad_(True)
        student.get_submodule("bert.embeddings").requires_grad_(False)  # is half of the model, and not pruned
        layers = [name for name, _ in student.named_modules() if _is_layer(name)]
        self.distiller = bss.Distiller(teacher, student, layers=[*layers, "pool"], temperature=None)
        self.parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
        dense = {t.name for t in bss.find_targets(student, targets=TARGETS) if t.layout is None}
        self.held = {name: mask for name, mask in masks.items() if name in dense}

    def step(self) -> float:
        """One batch; returns its loss."""
        start, i = time.perf_counter(), len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * rate_at(i, self.steps)
        batch = self.batches[i]
        loss = self.distiller(batch, mask=batch["attention_mask"]).loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        if self.held:
            found = bss.find_targets(self.student, targets=lambda name, _: name in self.held)
            bss.apply_masks(found, self.held)
        self.losses.append(float(loss.detach()))
        self.seconds += time.perf_counter() - start
        return self.losses[-1]

    def run(self, every_s: float, shown: Callable[[int, float], None]) -> None:
        """All steps that are left, with a checkpoint every so many seconds, and one if it is stopped."""
        saved = time.monotonic()
        try:
            while len(self.losses) < self.steps:
                loss = self.step()
                shown(len(self.losses), loss)
                if time.monotonic() - saved > every_s:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()

    def save(self) -> None:
        """Model, optimizer and losses: in the folder as one checkpoint, or as the one that was there."""
        bst.save_pretrained(self.student, self.folder / f"{len(self.losses)}-{STUDENT}")
        state = {"optimizer": self.optimizer.state_dict(), "losses": self.losses, "seconds": self.seconds}
        beside = self.folder / f".{STATE}.{os.getpid()}.part"
        torch.save(state, beside)
        os.replace(beside, self.folder / STATE)  # says which model is the one
        for path in self.folder.glob(f"*-{STUDENT}"):
            if path.name != f"{len(self.losses)}-{STUDENT}":
                path.unlink()

    def load(self, state: dict[str, Any]) -> None:
        """Takes back what `saved_state` found; the student is the one that `saved_student` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds = state["losses"], state["seconds"]


def saved_state(folder: Path) -> dict[str, Any] | None:
    """What an earlier run has left."""
    path = folder / STATE
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state if (folder / f"{len(state['losses'])}-{STUDENT}").is_file() else None


def saved_student(folder: Path, state: dict[str, Any]) -> nn.Module:
    """The model that belongs to it."""
    return bst.load_pretrained(build, folder / f"{len(state['losses'])}-{STUDENT}")


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: up for the first steps, then down a cosine to 5 %."""
    return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / max(steps, 1))) / 2)


def _is_layer(name: str) -> bool:
    return name.startswith("bert.encoder.layer.") and name.count(".") == 3
