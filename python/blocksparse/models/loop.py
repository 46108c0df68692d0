"""Training to the end, with checkpoints, a log, evaluations, and an end when one is asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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
    folder: Path,
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
    op = trainer.kind.op
    check_updates(op, save_every=save_every, evaluate_every=evaluate_every, until=until)
    world = trainer.world
    last = min(trainer.config.updates, until or trainer.config.updates)

    def saves() -> bool:
        return trainer.update % save_every == 0 or trainer.update == last

    def is_due() -> bool:  # a line of the log
        return saves() or trainer.update % (evaluate_every or save_every) == 0

    def evaluated(line: dict[str, Any]) -> bool:  # into the line; False: stopped
        if evaluate is not None:
            try:
                line |= evaluate(stop)
            except Stopped:
                return False
        return True

    with locked(folder, op) if world.first else nullcontext():
        log = Log(folder / "log.jsonl", trainer.update, op) if world.first else None
        line = (log.unfinished if log else None) or {}
        spent = log.seconds if log else 0.0
        saved = trainer.update
        finished = True
        if world.any(bool(line) and is_due(), trainer.device):
            finished = evaluated(line)
            if log and finished:
                log.add(line)
                report(line)
        while finished and trainer.update < last and not world.any(stop(), trainer.device):
            rate, begin = trainer.rate(), time.perf_counter()
            bits = trainer.step()
            spent += time.perf_counter() - begin
            line = {
                "update": trainer.update,
                **trainer.seen(),
                "seconds": round(spent, 3),
                "train": round(sum(trainer.recent) / len(trainer.recent), 4),
                "lr": rate,
            }
            if not math.isfinite(bits) or (saves() and not trainer.is_finite()):
                raise _failure(trainer, rate)
            if is_due():
                finished = evaluated(line)
                if log:  # before the checkpoint: a line too many is cut when training goes on
                    log.add(line, finished=finished)
                if finished and saves():
                    trainer.save(folder / "last.safetensors")
                    saved = trainer.update
            if log:
                report(line)
        if trainer.update > saved:  # an end was asked for
            if not trainer.is_finite():
                raise _failure(trainer, rate)
            if log and not is_due():
                log.add(line, finished=False)
            trainer.save(folder / "last.safetensors")
        return finished and trainer.update >= last


def check_updates(op: str, **numbers: int | None) -> None:
    """Raises ValueError where a number of updates is given, and not positive."""
    for name, updates in numbers.items():
        if updates is not None and updates < 1:
            raise ValueError(f"[{op}] {name} is {updates}, needs 1 or more")


def _failure(trainer: Trainer, rate: float) -> Diverged:
    return Diverged(f"[{trainer.kind.op}] training has failed by update {trainer.update}: lr {rate:g} may be too high")
