"""What the command line of any training does around it: takes the folder, says how long it takes and how to go on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from . import checkpoint
from .bars import duration, say
from .checkpoint import Kind
from .distributed import World
from .folder import locked
from .loop import Evaluate, train
from .stopping import Stop
from .trainer import Trainer, updates_of

LAST = "last.safetensors"
MEASURED = 3  # updates after which is said how long the others take; the first one is slower

Report = Callable[[dict[str, Any]], None]


def take_updates(arguments: argparse.Namespace, kind: Kind) -> None:
    """Whoever goes on and names no other number of updates goes on with that of the checkpoint."""
    last = arguments.out / LAST
    if arguments.resume and last.exists() and arguments.updates is None:
        arguments.updates = updates_of(checkpoint.load_header(last, kind))


def run_training(
    arguments: argparse.Namespace,
    trainer: Trainer,
    about: str,
    evaluate: Evaluate | None,
    reporter: Callable[[ExitStack], Report],
    stop: Stop,
    stack: ExitStack,
) -> int:
    """Resumes where that was asked for, trains, and says how it ended; the exit status.

    Raises:
        ValueError: there is a training in the folder already, or it is of something else; and what `loop.train` raises.
    """
    world, config, last, op = trainer.world, trainer.config, arguments.out / LAST, trainer.kind.op
    lock(arguments.out, world, trainer.device, stack, op)
    before = config.updates
    if arguments.resume and last.exists():
        before = trainer.resume(last, other_updates=True)
    elif last.exists():
        raise ValueError(f"[{op}] {last} is there already: --resume goes on from it, another --out begins anew")
    if world.first:
        print(f"{sum(p.numel() for p in trainer.model.parameters())} parameters; {about}")
        if before != config.updates:
            print(rescheduled(before, trainer))
        elif trainer.update == config.updates:
            print(f"all {config.updates} updates are done: --updates with a larger number goes on")
    begin, end = trainer.update, last_update(arguments.until, trainer)
    with ExitStack() as shown:
        report = reporter(shown) if world.first else silent
        how = {"save_every": arguments.save_every, "until": arguments.until, "report": report, "stop": stop}
        ended = train(trainer, arguments.out, evaluate, **how)
    if ended:
        if world.first:
            print(last)
        return 0
    if world.first:
        say(stopped(trainer, begin, end, last, arguments.resume))
    world.any(False, trainer.device)  # torchrun ends the others when the first of them has ended
    return stop.status


def rescheduled(before: int, trainer: Trainer) -> str:
    """What another number of updates means from here on."""
    now, at = trainer.config, trainer.update
    rates = [(at + 1, now.rate(at)), (now.updates, now.rate(now.updates - 1))]
    if at > 0:
        rates.insert(0, (at, replace(now, updates=before).rate(at - 1)))
    text = ", ".join(f"{rate:.3g} at {'update ' if i == 0 else ''}{u}" for i, (u, rate) in enumerate(rates))
    return f"the schedule is of {now.updates} updates now, of {before} until here: learning rate {text}"


def lock(folder: Path, world: World, device: torch.device, stack: ExitStack, op: str) -> None:
    """Takes the folder for all processes; raises ValueError in all of them if another training has it."""
    refusal: Exception | None = None
    if world.first:
        try:
            stack.enter_context(locked(folder, op))
        except (ValueError, OSError) as error:
            refusal = error
    if world.any(refusal is not None, device):
        raise refusal or ValueError(f"[{op}] {folder} was refused to the first process, which says why")


def last_update(until: int | None, trainer: Trainer) -> int:
    """The update to end with."""
    return min(until or trainer.config.updates, trainer.config.updates)


def stopped(trainer: Trainer, begin: int, end: int, last: Path, resumes: bool) -> str:
    """What there is after a signal, and how to go on."""
    state = (
        f"{last} {'is written' if trainer.update > begin else 'is as it was'}, after update {trainer.update} of {end}"
    )
    command = "the same command" if resumes else "the same command with --resume"
    there = f"{state}; {command} goes on" if trainer.update > 0 else "no update is done, there is no checkpoint yet"
    return f"blocksparse: {there}\nblocksparse: stopped"


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Fields of a configuration that were given on the command line."""
    values = {field.name: getattr(arguments, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def summary_writer(folder: Path) -> Callable[[], Any]:
    """What makes a writer for TensorBoard; its folder comes with it.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ModuleNotFoundError("--tensorboard needs TensorBoard: pip install 'blocksparse[tensorboard]'") from None
    return lambda: SummaryWriter(str(folder))


def silent(line: dict[str, Any]) -> None:
    """For processes that do not report."""


def forecast(begin: int, last: int, save_every: int, each: float, updates_to_read: float) -> str:
    """How long the updates take, and evaluations: of so many updates' bytes, forward alone, a third of the work."""
    evaluations = -(-last // save_every) - begin // save_every
    seconds = (last - begin) * each + evaluations * updates_to_read * each / 3
    return f"{last - begin} updates take about {duration(seconds)}, evaluations with them; an update {each:.2g} s"
