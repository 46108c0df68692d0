"""The command line of training: python -m blocksparse lm train."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint
from ..bars import bytes_bar, say
from ..distributed import World
from ..loop import check_updates
from ..running import MEASURED, Report, forecast, given, last_update, run_training, summary_writer, take_updates
from ..stopping import stop_on_signals
from .config import PRESETS, ModelConfig, TrainConfig
from .training import Trainer, evaluation, read_text

VALID_BYTES = 2_000_000


def run(arguments: argparse.Namespace, world: World, device: torch.device) -> int:
    """Trains; the exit status. Raises ValueError or OSError with what is wrong."""
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        writer = summary_writer(arguments.tensorboard) if arguments.tensorboard and world.first else None
        model = replace(PRESETS[arguments.preset], **given(arguments, ModelConfig))
        take_updates(arguments, checkpoint.LM)
        config = TrainConfig(**given(arguments, TrainConfig))
        check_updates("lm", save_every=arguments.save_every, until=arguments.until)  # before there is a folder
        text, valid = _texts(arguments, config.batch * config.steps + 1)
        trainer = Trainer(model, config, text, device, world)
        about = f"mix {', '.join(f'{m:.1%}' for m in trainer.model.mix()) or '(dense)'}"
        evaluate = None if valid is None else evaluation(trainer, valid)

        def reporter(shown: ExitStack) -> Report:
            return _reporter(arguments, trainer, valid, shown, writer)

        return run_training(arguments, trainer, about, evaluate, reporter, stop, stack)


def _texts(arguments: argparse.Namespace, least: int) -> tuple[Tensor, Tensor | None]:
    """What is trained on, `least` bytes or more, and what is evaluated."""
    text = read_text(arguments.text)
    if arguments.valid:
        valid = read_text(arguments.valid)
        if valid.numel() < 2:
            raise ValueError(f"[lm] the text to be evaluated has {valid.numel()} bytes, needs 2 or more")
        return text, valid
    cut = text.numel() - min(VALID_BYTES, text.numel() // 20)
    if cut < least <= text.numel():
        given = f"text has {text.numel()} bytes, of which the last {text.numel() - cut} are held out to be evaluated"
        raise ValueError(f"[lm] {given}; needs {least} before them, or --valid with another text")
    return text[:cut], text[cut:] if text.numel() - cut >= 2 else None


def _reporter(
    arguments: argparse.Namespace,
    trainer: Trainer,
    valid: Tensor | None,
    stack: ExitStack,
    writer: Callable[[], Any] | None,
) -> Report:
    """A bar or lines, how long it will take, and TensorBoard if asked for."""
    board = stack.enter_context(writer()) if writer else None
    last = last_update(arguments.until, trainer)
    per_update = trainer.config.batch * trainer.config.steps
    done = stack.enter_context(bytes_bar(last * per_update, trainer.bytes_seen))
    begin, seconds = trainer.update, {}

    def report(line: dict[str, Any]) -> None:
        text = f"train {line['train']:.3f} bits/byte" + (f", valid {line['valid']:.3f}" if "valid" in line else "")
        seconds[line["update"] - begin] = line["seconds"]
        if line["update"] - begin == MEASURED < last - begin:
            each = (seconds[MEASURED] - seconds[1]) / (MEASURED - 1)
            bytes_valid = 0 if valid is None else valid.numel()
            say(forecast(begin, last, arguments.save_every, each, bytes_valid / per_update))
        done(line["bytes"], text)
        if board is not None:
            for name in ("train", "valid", "lr"):
                if name in line:
                    board.add_scalar(name, line[name], line["bytes"])

    return report
