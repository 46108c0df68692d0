"""The command line of training: python -m blocksparse pixelcnn train."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..bars import counting_bar, say
from ..distributed import World
from ..images import grid
from ..loop import check_updates
from ..running import MEASURED, Report, forecast, given, last_update, run_training, summary_writer, take_updates
from ..stopping import Stop, stop_on_signals
from . import data, layouts
from .architecture import count
from .config import PRESETS, ModelConfig, TrainConfig
from .sampling import sample
from .training import KIND, Trainer


def run(arguments: argparse.Namespace, world: World, device: torch.device) -> int:
    """Trains; the exit status. Raises ValueError or OSError with what is wrong."""
    with ExitStack() as stack:
        begin = time.monotonic()
        stop = stack.enter_context(stop_on_signals())
        writer = summary_writer(arguments.tensorboard) if arguments.tensorboard and world.first else None
        model = replace(PRESETS[arguments.preset], **given(arguments, ModelConfig))
        take_updates(arguments, KIND)
        config = TrainConfig(**given(arguments, TrainConfig))
        _check(arguments)
        images, test = _images(arguments, model.channels)
        trainer = Trainer(model, config, images, device, world)

        def evaluate(stop: Callable[[], bool]) -> dict[str, float]:
            return trainer.evaluate(test, stop)

        def reporter(shown: ExitStack) -> Report:
            return _reporter(arguments, trainer, len(test), shown, writer)

        ends = stop if arguments.minutes is None else _Deadline(stop, begin + 60 * arguments.minutes)
        return run_training(arguments, trainer, _about(model, images), evaluate, reporter, ends, stack)


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError where a number is wrong, before images are read and there is a folder."""
    check_updates(KIND.op, save_every=arguments.save_every, until=arguments.until)
    if arguments.test_limit is not None and arguments.test_limit < 1:
        raise ValueError(f"[pixelcnn] test_limit is {arguments.test_limit}, needs 1 or more")
    if arguments.minutes is not None and not arguments.minutes > 0:
        raise ValueError(f"[pixelcnn] minutes is {arguments.minutes}, needs more than 0")
    if arguments.samples < 0:
        raise ValueError(f"[pixelcnn] samples is {arguments.samples}, needs 0 or more")


class _Deadline(Stop):
    """Whether an end was asked for, or the time is over, which is no failure."""

    def __init__(self, stop: Stop, end: float) -> None:
        super().__init__()
        self.stop, self.end = stop, end

    def __call__(self) -> bool:
        return self.stop() or time.monotonic() > self.end

    @property
    def status(self) -> int:
        return self.stop.status if self.stop() else 0


def _images(arguments: argparse.Namespace, channels: int) -> tuple[Tensor, Tensor]:
    """What is trained on, and what is evaluated."""
    how = (channels, arguments.shrink, arguments.broken)
    found = data.read(arguments.data, *how, holds_out=not arguments.test)
    train, test = found.train, found.test
    if arguments.test:
        test = data.read_part(arguments.test, *how, "all")
        if test.shape[1:] != train.shape[1:]:
            raise ValueError(
                f"[pixelcnn] images to be evaluated have {test.shape[1]} x {test.shape[2]} pixels, "
                f"those to be trained on {train.shape[1]} x {train.shape[2]}"
            )
    if len(train) == 0 or len(test) == 0:
        raise ValueError(f"[pixelcnn] there are {len(train)} images to be trained on and {len(test)} to be evaluated")
    return data.tensor_of(train), data.spread(data.tensor_of(test), arguments.test_limit or len(test))


def _about(model: ModelConfig, images: Tensor) -> str:
    counts = count(model, layouts.density_of(model), (images.size(2), images.size(3)))
    layout = f"{model.layout}, {layouts.density_of(model):.1%} of the connections" if model.layout else "dense"
    return f"{counts.macs / 1e6:.1f}M multiply-adds for an image; {layout}; {len(images)} images"


def _reporter(
    arguments: argparse.Namespace,
    trainer: Trainer,
    tests: int,
    stack: ExitStack,
    writer: Callable[[], Any] | None,
) -> Report:
    """A bar or lines, how long it will take, and TensorBoard if asked for."""
    board = stack.enter_context(writer()) if writer else None
    last, batch = last_update(arguments.until, trainer), trainer.config.batch
    done = stack.enter_context(counting_bar(last * batch, trainer.update * batch, " images", "images"))
    begin, seconds = trainer.update, {}

    def report(line: dict[str, Any]) -> None:
        if "valid" in line:
            bits = f"valid {line['valid']:.4f} bits/dim, {line['valid_raw']:.4f} by the last weights"
            say(f"update {line['update']}: {bits}")
        seconds[line["update"] - begin] = line["seconds"]
        if line["update"] - begin == MEASURED < last - begin:
            each = (seconds[MEASURED] - seconds[1]) / (MEASURED - 1)
            say(forecast(begin, last, arguments.save_every, each, 2 * tests / batch))
        done(line["images"], f"train {line['train']:.3f} bits/dim")
        if board is not None:
            for name in ("train", "valid", "valid_raw", "lr"):
                if name in line:
                    board.add_scalar(name, line[name], line["images"])
            if "valid" in line and arguments.samples > 0:
                board.add_image("samples", _samples(trainer, arguments.samples), line["images"], dataformats="HWC")

    return report


def _samples(trainer: Trainer, number: int) -> Any:
    """A picture of so many images of the averaged weights, always of the same random numbers."""
    height, width = trainer.images.shape[2:]
    with trainer.averaged():
        made = sample(trainer.model, number, (height, width), bf16=trainer.config.bf16)
    return grid(data.arrays_of(made))
