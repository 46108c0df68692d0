"""Training an arm, a slice of time at once, so that it can stop and go on anywhere."""

from __future__ import annotations

import math
import os
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import arms, data
from .arms import Arm, Settings
from .model import Model

CLIP = 1.0  # norm of the gradient
WARM_UP, LAST_RATE = 0.1, 0.05  # shares of the steps, and of the highest rate
SAMPLE_START, SAMPLE_BYTES, SAMPLE_TEMPERATURE = b"def ", 320, 0.7


@dataclass(frozen=True)
class Job:
    """One arm's training. `identity` tells apart what must not be continued by one another."""

    kind: str
    settings: Settings
    split: data.Split
    steps: int
    folder: Path
    identity: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.kind}.pt"

    @property
    def text(self) -> Path:
        return self.folder / "text.bin"


@dataclass
class Run:
    """A network on its way: everything that the next step depends on, and what is known of the steps so far."""

    arm: Arm
    settings: Settings
    steps: int
    model: Model = field(init=False)
    optimizer: torch.optim.Adam = field(init=False)
    state: tuple[Tensor, Tensor] = field(init=False)
    bits: list[float] = field(default_factory=list)  # a byte costs, of each step
    seconds: list[float] = field(default_factory=list)  # that each step took
    test: float | None = None  # bits per byte, once it is done
    sample: str = ""

    def __post_init__(self) -> None:
        self.model = self.arm.model(self.settings.seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.arm.kind.rate)
        self.state = self.model.start(self.settings.rows)

    @property
    def done(self) -> bool:
        return self.test is not None

    def step(self, batches: data.Batches) -> None:
        """The next batch: forward, backward, update. The state is carried on, its gradient is not."""
        start, number = time.perf_counter(), len(self.bits)
        if batches.starts_over(number):
            self.state = self.model.start(self.settings.rows)
        text = batches[number]
        logits, (h, c) = self.model(text[:-1], self.state)
        loss = functional.cross_entropy(logits.flatten(0, 1), text[1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.arm.kind.rate * rate_at(number, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = h.detach(), c.detach()
        self.bits.append(loss.item() / math.log(2))
        self.seconds.append(time.perf_counter() - start)

    def save(self, job: Job) -> None:
        """Writes the checkpoint: all of it, or, if that fails, the old one stays."""
        checkpoint: dict[str, Any] = {"identity": job.identity, "model": self.model.state_dict()}
        checkpoint |= {"optimizer": self.optimizer.state_dict(), "state": self.state, "test": self.test}
        checkpoint |= {"bits": self.bits, "seconds": self.seconds, "sample": self.sample}
        temporary = job.checkpoint.with_suffix(".tmp")
        torch.save(checkpoint, temporary)
        os.replace(temporary, job.checkpoint)

    @classmethod
    def load(cls, job: Job) -> Run:
        """The run as far as it came; a new one if there is no checkpoint of this very job."""
        run = cls(arms.make(arms.KINDS[job.kind], job.settings), job.settings, job.steps)
        if not job.checkpoint.exists():
            return run
        try:
            checkpoint = torch.load(job.checkpoint, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            print(f"{job.checkpoint} is damaged, so this network starts anew: {error}", file=sys.stderr)
            return run
        if checkpoint["identity"] != job.identity:
            return run
        run.model.load_state_dict(checkpoint["model"])
        run.optimizer.load_state_dict(checkpoint["optimizer"])
        run.state, run.test, run.sample = checkpoint["state"], checkpoint["test"], checkpoint["sample"]
        run.bits, run.seconds = checkpoint["bits"], checkpoint["seconds"]
        return run


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    kind: str
    steps: int
    bits: float  # per byte, mean of the last steps
    bytes_per_second: float
    done: bool


def train(job: Job, seconds: float) -> Progress:
    """Goes on with a job for about so many seconds, saves it, and says how far it is; tests it at the end."""
    run = Run.load(job)
    train_text, test_text = data.load(job.text, job.split)
    batches = data.Batches(train_text, job.settings.rows, job.settings.time)
    deadline = time.perf_counter() + seconds
    while len(run.bits) < job.steps:
        run.step(batches)
        if time.perf_counter() > deadline:
            break
    if len(run.bits) == job.steps and not run.done:
        run.test = evaluate(run.model, data.Batches(test_text, job.settings.rows, job.settings.time))
        run.sample = write(run.model, job.settings.seed)
    run.save(job)
    return progress(run)


def progress(run: Run) -> Progress:
    """Where a run stands."""
    recent = smooth(run.bits)[-1] if run.bits else math.log2(256)
    size = run.settings.rows * run.settings.time
    rate = size * len(run.seconds) / sum(run.seconds) if run.seconds else 0.0
    return Progress(run.arm.kind.name, len(run.bits), recent, rate, run.done)


def rate_at(step: int, steps: int) -> float:
    """Share of the highest learning rate: a linear warm-up, then half a cosine."""
    warm = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
    return warm * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)


def smooth(values: Sequence[float], window: int = 20) -> list[float]:
    """The mean of the last `window` values, at each of them."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


@torch.no_grad()
def evaluate(model: Model, batches: data.Batches) -> float:
    """Bits per byte of a text that the model has not seen, read in as many runs as there are rows."""
    state, bits = model.start(batches.columns.size(0)), 0.0
    for number in range(batches.count):
        text = batches[number]
        logits, state = model(text[:-1], state)
        bits += functional.cross_entropy(logits.flatten(0, 1), text[1:].flatten()).item() / math.log(2)
    return bits / batches.count


@torch.no_grad()
def write(model: Model, seed: int) -> str:
    """What the model writes by itself, a byte at a time."""
    generator, state = torch.Generator().manual_seed(seed), model.start(1)
    written = bytearray(SAMPLE_START)
    logits, state = model(torch.tensor(list(SAMPLE_START)).unsqueeze(1), state)
    while len(written) < SAMPLE_BYTES:
        chances = (logits[-1, 0] / SAMPLE_TEMPERATURE).softmax(0)
        byte = torch.multinomial(chances, 1, generator=generator)
        written.append(int(byte))
        logits, state = model(byte.unsqueeze(0), state)
    return written.decode("utf-8", "replace")
