"""Training to the end, with checkpoints, a log, evaluations, and an end when one is asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import AnyPath
from .folder import locked
from .log import Log
from .stopping import Stopped
from .trainer import Trainer


class Diverged(ValueError):  # noqa: N818
    """Loss or weights are no numbers any more."""


# Asked whether to stop; what it found, for the log. Raises Stopped.
Evaluate = Callable[[Callable[[], bool]], dict[str, float]]


def train(
    trainer: Trainer,
    folder: AnyPath,
    evaluate: Evaluate | None,
    *,
    save_every: int = 200,
    evaluate_every: int | None = None,
    until: int | None = None,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Trains to the end, or `until` an update; writes folder/last.safetensors and folder/log.jsonl.

    Returns:
        Whether it got there: not where `stop` said so before.

    Raises:
        OSError: one of them cannot be written.
        ValueError: a number of updates is not positive, or another process trains into the folder.
        Diverged: loss or weights are no numbers any more; the last checkpoint is kept.

    `report` gets a line for each update; those at checkpoints, or `evaluate_every` so many, have what `evaluate`
    says, and are logged. Their seconds are of updates alone.

    `stop` is asked before each update and during evaluations. Where it says so in one of the processes, all write what
    they have and return. Whoever goes on makes the log what it would be without that: see `Log`.
    """
    op, place = trainer.kind.op, Path(folder)
    check_updates(op, save_every=save_every, evaluate_every=evaluate_every, until=until)
    last = min(trainer.config.updates, until or trainer.config.updates)
    with locked(place, op) if trainer.world.first else nullcontext():
        log = Log(place / "log.jsonl", trainer.update, op) if trainer.world.first else None
        return _Loop(trainer, place, log, evaluate, save_every, evaluate_every or save_every, last, report, stop).run()


@dataclass
class _Loop:
    """What `train` does inside of its lock."""

    trainer: Trainer
    folder: Path
    log: Log | None  # of the first process
    evaluate: Evaluate | None
    save_every: int
    evaluate_every: int
    last: int
    report: Callable[[dict[str, Any]], None]
    stop: Callable[[], bool]
    spent: float = 0.0  # seconds of updates

    def run(self) -> bool:
        trainer, world = self.trainer, self.trainer.world
        line = (self.log.unfinished if self.log else None) or {}
        self.spent = self.log.seconds if self.log else 0.0
        saved, finished = trainer.update, True
        if world.any(bool(line) and self.is_due(), trainer.device):
            finished = self.evaluated(line)
            if self.log and finished:
                self.log.add(line)
                self.report(line)
        while finished and trainer.update < self.last and not world.any(self.stop(), trainer.device):
            line = self.step()
            if self.is_due():
                finished = self.evaluated(line)
                if self.log:  # before the checkpoint: a line too many is cut when training goes on
                    self.log.add(line, finished=finished)
                if finished and self.saves():
                    self.save()
                    saved = trainer.update
            if self.log:
                self.report(line)
        if trainer.update > saved:  # an end was asked for
            if not trainer.is_finite():
                raise self.failure(line["lr"])
            if self.log and not self.is_due():
                self.log.add(line, finished=False)
            self.save()
        return finished and trainer.update >= self.last

    def saves(self) -> bool:
        return self.trainer.update % self.save_every == 0 or self.trainer.update == self.last

    def is_due(self) -> bool:
        """Whether there is a line in the log."""
        return self.saves() or self.trainer.update % self.evaluate_every == 0

    def save(self) -> None:
        self.trainer.save(self.folder / "last.safetensors")

    def step(self) -> dict[str, Any]:
        """The line of an update, without an evaluation."""
        trainer = self.trainer
        rate, begin = trainer.rate(), time.perf_counter()
        bits = trainer.step()
        self.spent += time.perf_counter() - begin
        if not math.isfinite(bits) or (self.saves() and not trainer.is_finite()):
            raise self.failure(rate)
        return {
            "update": trainer.update,
            **trainer.seen(),
            "seconds": round(self.spent, 3),
            "train": round(sum(trainer.recent) / len(trainer.recent), 4),
            "lr": rate,
        }

    def evaluated(self, line: dict[str, Any]) -> bool:
        """Puts it into the line; False: stopped."""
        if self.evaluate is not None:
            try:
                line |= self.evaluate(self.stop)
            except Stopped:
                return False
        return True

    def failure(self, rate: float) -> Diverged:
        op, update = self.trainer.kind.op, self.trainer.update
        return Diverged(f"[{op}] training has failed by update {update}: lr {rate:g} may be too high")


def check_updates(op: str, **numbers: int | None) -> None:
    """Raises ValueError where a number of updates is given, and not positive."""
    for name, updates in numbers.items():
        if updates is not None and updates < 1:
            raise ValueError(f"[{op}] {name} is {updates}, needs 1 or more")
