"""The distillation: the sparse model learns to say what the dense one says, and can be stopped and go on."""

from __future__ import annotations

import copy
import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse.models.stopping import stop_on_signals

from .model import Batch, Batches, build

RATE = 1e-3
SIMILAR = 20.0  # times a cosine: the logit of being the nearest
WARM_UP = 8
CLIP = 1.0
STAGES = (0.0, 0.1, 0.25, 0.45)  # where each begins, as shares of the training
TARGETS = r"bert\.encoder"
# What torch.load makes of ruins.
DAMAGE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError)
STUDENT, STATE = "student.safetensors", "optimizer.pt"


@dataclass(frozen=True)
class Plan:
    """How sparse when: the density falls by the same factor at each of `STAGES`.

    Attributes:
        sparsity: at last.
        block_size: edge of the blocks.
        steps: in all.
    """

    sparsity: float
    block_size: int
    steps: int

    def stages(self) -> list[tuple[int, float]]:
        """(first step, sparsity) of each stage."""
        count = len(STAGES)
        density = [(1 - self.sparsity) ** ((i + 1) / count) for i in range(count)]
        return [(int(begin * self.steps), 1 - d) for begin, d in zip(STAGES, density, strict=True)]


class Training:
    """The student beside its teacher, from the dense model to the sparse one.

    Args:
        teacher: the dense model.
        student: a copy of it, or what `saved` gave.
        plan: how sparse when.
        batches: of the training text.
        calibration: batches that blocks are chosen and refitted by.
        folder: of the checkpoint.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        plan: Plan,
        batches: Batches,
        calibration: list[Batch],
        folder: Path,
    ) -> None:
        self.student, self.plan, self.batches, self.folder = student, plan, batches, folder
        self.calibration = calibration
        self.stage = 0  # of those that have begun
        self.losses: list[float] = []
        self.seconds = 0.0
        student.requires_grad_(True)
        student.get_submodule("bert.embeddings").requires_grad_(False)  # is half of the model, and not pruned
        layers = [name for name, _ in student.named_modules() if _is_layer(name)]
        self.distiller = bss.Distiller(teacher, student, layers=[*layers, "pool"], temperature=1.0, logits=similarities)
        parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self) -> float:
        """One batch; returns its loss. Where a stage begins, blocks are dropped before it."""
        start, i = time.perf_counter(), len(self.losses)
        stages = self.plan.stages()
        while self.stage < len(stages) and i >= stages[self.stage][0]:
            self._drop(stages[self.stage][1])
            self.stage += 1
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * rate_at(i, self.plan.steps)
        batch = self.batches[i]
        loss = self.distiller(batch, mask=batch["attention_mask"]).loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], CLIP)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        self.seconds += time.perf_counter() - start
        return self.losses[-1]

    def _drop(self, sparsity: float) -> None:
        """One more stage: block OBS, then block-sparse storage, in which the optimizer goes on with its moments."""
        b = self.plan.block_size
        options: Any = {"block_size": b, "calibration": self.calibration, "targets": TARGETS, "progress": False}
        masks = bss.sparsify_(self.student, "obs", sparsity=sparsity, **options)
        bss.compact_(self.student, masks, self.optimizer, block_size=b)

    def run(self, every_s: float, shown: Callable[[int, float], None]) -> None:
        """All steps that are left, with a checkpoint every so many seconds, and one if it is stopped.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM came. The step of that moment was finished and is in the checkpoint.
        """
        saved = time.monotonic()
        with stop_on_signals() as stop:
            while len(self.losses) < self.plan.steps and not stop():
                loss = self.step()
                shown(len(self.losses), loss)
                if time.monotonic() - saved > every_s:
                    self.save()
                    saved = time.monotonic()
            self.save()
        if stop():
            raise KeyboardInterrupt

    def save(self) -> None:
        """Model, optimizer and losses: in the folder as one checkpoint, or as the one that was there."""
        bst.save_pretrained(self.student, self.folder / f"{len(self.losses)}-{STUDENT}")
        state = {"optimizer": self.optimizer.state_dict(), "losses": self.losses, "seconds": self.seconds}
        state["stage"] = self.stage
        beside = self.folder / f".{STATE}.{os.getpid()}.part"
        torch.save(state, beside)
        os.replace(beside, self.folder / STATE)  # says which model is the one
        for path in self.folder.glob(f"*-{STUDENT}"):
            if path.name != f"{len(self.losses)}-{STUDENT}":
                path.unlink()

    def load(self, state: dict[str, Any]) -> None:
        """Takes back the state that `saved` found; the student is the one that it gave, too."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds, self.stage = state["losses"], state["seconds"], state["stage"]


def saved(folder: Path) -> tuple[dict[str, Any], nn.Module] | None:
    """(state, student) of an earlier run; None if it has left none, or a damaged one, of which it says so."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        path = folder / f"{len(state['losses'])}-{STUDENT}"
    except DAMAGE:
        print(f"{path} is damaged: the training begins anew.")
        return None
    student = whole(path, "the training begins anew")
    return None if student is None else (state, student)


def whole(path: Path, then: str) -> nn.Module | None:
    """The network in a file; None if there is none, or a damaged one, of which it says so and what happens then."""
    try:
        return bst.load_pretrained(build, path)
    except FileNotFoundError:
        return None
    except ValueError:
        print(f"{path} is damaged: {then}.")
        return None


@torch.no_grad()
def densified(student: nn.Module, block_size: int) -> tuple[nn.Module, dict[str, Any]]:
    """(the same model with dense layers that hold zeros, its masks): what `convert` begins with."""
    dense = copy.deepcopy(student)
    masks = {target.name: target.present() for target in bss.find_targets(dense, block_size, TARGETS)}
    for name in masks:
        path, _, child = name.rpartition(".")
        layer: Any = dense.get_submodule(name)
        setattr(dense.get_submodule(path), child, layer.to_dense())
    return dense, masks


def similarities(embeddings: Tensor) -> Tensor:
    """Logits [1, n, n] of which other sentence of a batch is nearest to each; -1e3 for a sentence itself.

    Layers alone bring embeddings near to the dense ones, on the average over all sentences. Which is nearest to which,
    which is what embeddings are for, hangs on small differences, that a mean of squares hardly sees.
    """
    unit = embeddings.float()
    own = 1e3 * torch.eye(len(unit), device=unit.device)
    return (SIMILAR * unit @ unit.t() - own).unsqueeze(0)


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: up for the first steps, then down a cosine to 5 %."""
    return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / max(steps, 1))) / 2)


def _is_layer(name: str) -> bool:
    return name.startswith("bert.encoder.layer.") and name.count(".") == 3
