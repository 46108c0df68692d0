"""The command line of training: python -m blocksparse lm train."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .bars import bytes_bar, duration, say
from .config import PRESETS, ModelConfig, TrainConfig
from .distributed import World
from .folder import locked
from .loop import check_updates
from .stopping import stop_on_signals
from .trainer import updates_of
from .training import Trainer, read_text, train

VALID_BYTES = 2_000_000
MEASURED = 3  # updates after which is said how long the others take; the first one is slower

Report = Callable[[dict[str, Any]], None]


def run(arguments: argparse.Namespace, world: World, device: torch.device) -> int:
    """Trains; the exit status. Raises ValueError or OSError with what is wrong."""
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        writer = _summary_writer(arguments.tensorboard) if arguments.tensorboard and world.first else None
        model = replace(PRESETS[arguments.preset], **_given(arguments, ModelConfig))
        last = arguments.out / "last.safetensors"
        resumes = arguments.resume and last.exists()
        if resumes and arguments.updates is None:  # whoever does not name another number goes on with that
            arguments.updates = updates_of(checkpoint.load_header(last))
        config = TrainConfig(**_given(arguments, TrainConfig))
        check_updates("lm", save_every=arguments.save_every, until=arguments.until)  # before there is a folder
        text, valid = _texts(arguments)
        trainer = Trainer(model, config, text, device, world)
        _lock(arguments.out, world, device, stack)
        before = config.updates
        if arguments.resume and last.exists():
            before = trainer.resume(last, other_updates=True)
        elif last.exists():
            raise ValueError(f"[lm] {last} is there already: --resume goes on from it, another --out begins anew")
        parameters = sum(p.numel() for p in trainer.model.parameters())
        if world.first:
            print(f"{parameters} parameters; mix {', '.join(f'{m:.1%}' for m in trainer.model.mix()) or '(dense)'}")
            if before != config.updates:
                print(_rescheduled(before, trainer))
            elif trainer.update == config.updates:
                print(f"all {config.updates} updates are done: --updates with a larger number goes on")
        begin, end = trainer.update, _last(arguments, trainer)
        with ExitStack() as shown:
            report = _reporter(arguments, trainer, valid, shown, writer) if world.first else _silent
            how = {"save_every": arguments.save_every, "until": arguments.until, "report": report, "stop": stop}
            ended = train(trainer, arguments.out, valid, **how)
        if ended:
            if world.first:
                print(last)
            return 0
        if world.first:
            say(_stopped(trainer, begin, end, last, arguments.resume))
        world.any(False, device)  # torchrun ends the others when the first of them has ended
        return stop.status


def _rescheduled(before: int, trainer: Trainer) -> str:
    """What another number of updates means from here on."""
    now, at = trainer.config, trainer.update
    rates = [(at + 1, now.rate(at)), (now.updates, now.rate(now.updates - 1))]
    if at > 0:
        rates.insert(0, (at, replace(now, updates=before).rate(at - 1)))
    text = ", ".join(f"{rate:.3g} at {'update ' if i == 0 else ''}{u}" for i, (u, rate) in enumerate(rates))
    return f"the schedule is of {now.updates} updates now, of {before} until here: learning rate {text}"


def _lock(folder: Path, world: World, device: torch.device, stack: ExitStack) -> None:
    """Takes the folder for all processes; raises ValueError in all of them if another training has it."""
    refusal: Exception | None = None
    if world.first:
        try:
            stack.enter_context(locked(folder))
        except (ValueError, OSError) as error:
            refusal = error
    if world.any(refusal is not None, device):
        raise refusal or ValueError(f"[lm] {folder} was refused to the first process, which says why")


def _last(arguments: argparse.Namespace, trainer: Trainer) -> int:
    """The update to end with."""
    return min(arguments.until or trainer.config.updates, trainer.config.updates)


def _stopped(trainer: Trainer, begin: int, end: int, last: Path, resumes: bool) -> str:
    """What there is after a signal, and how to go on."""
    state = (
        f"{last} {'is written' if trainer.update > begin else 'is as it was'}, after update {trainer.update} of {end}"
    )
    command = "the same command" if resumes else "the same command with --resume"
    there = f"{state}; {command} goes on" if trainer.update > 0 else "no update is done, there is no checkpoint yet"
    return f"blocksparse: {there}\nblocksparse: stopped"


def _given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    values = {field.name: getattr(arguments, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def _texts(arguments: argparse.Namespace) -> tuple[Tensor, Tensor | None]:
    """What is trained on, and what is evaluated."""
    text = read_text(arguments.text)
    if arguments.valid:
        valid = read_text(arguments.valid)
        if valid.numel() < 2:
            raise ValueError(f"[lm] the text to be evaluated has {valid.numel()} bytes, needs 2 or more")
        return text, valid
    cut = text.numel() - min(VALID_BYTES, text.numel() // 20)
    return text[:cut], text[cut:] if text.numel() - cut >= 2 else None


def _summary_writer(folder: Path) -> Callable[[], Any]:
    """What makes a writer for TensorBoard; its folder comes with it.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ModuleNotFoundError("--tensorboard needs TensorBoard: pip install 'blocksparse[tensorboard]'") from None
    return lambda: SummaryWriter(str(folder))


def _silent(line: dict[str, Any]) -> None:
    pass


def _reporter(
    arguments: argparse.Namespace,
    trainer: Trainer,
    valid: Tensor | None,
    stack: ExitStack,
    writer: Callable[[], Any] | None,
) -> Report:
    """A bar or lines, how long it will take, and TensorBoard if asked for."""
    board = stack.enter_context(writer()) if writer else None
    last = _last(arguments, trainer)
    per_update = trainer.config.batch * trainer.config.steps
    done = stack.enter_context(bytes_bar(last * per_update, trainer.bytes_seen))
    begin, seconds = trainer.update, {}

    def report(line: dict[str, Any]) -> None:
        text = f"train {line['train']:.3f} bits/byte" + (f", valid {line['valid']:.3f}" if "valid" in line else "")
        seconds[line["update"] - begin] = line["seconds"]
        if line["update"] - begin == MEASURED < last - begin:
            each = (seconds[MEASURED] - seconds[1]) / (MEASURED - 1)
            bytes_valid = 0 if valid is None else valid.numel()
            say(_forecast(begin, last, arguments.save_every, each, bytes_valid / per_update))
        done(line["bytes"], text)
        if board is not None:
            for name in ("train", "valid", "lr"):
                if name in line:
                    board.add_scalar(name, line[name], line["bytes"])

    return report


def _forecast(begin: int, last: int, save_every: int, each: float, updates_to_read: float) -> str:
    """How long the updates take, and evaluations: of so many updates' bytes, forward alone, a third of the work."""
    evaluations = -(-last // save_every) - begin // save_every
    seconds = (last - begin) * each + evaluations * updates_to_read * each / 3
    return f"{last - begin} updates take about {duration(seconds)}, evaluations with them; an update {each:.2g} s"
