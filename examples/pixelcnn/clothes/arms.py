"""What is trained: a dense PixelCNN++, and a block-sparse one twice as deep of as many connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from blocksparse.models.images import FASHION, read_images, shrink
from blocksparse.models.loop import train
from blocksparse.models.pixelcnn.config import ModelConfig, TrainConfig
from blocksparse.models.pixelcnn.data import tensor_of
from blocksparse.models.pixelcnn.training import Trainer

SHRINK = 2  # 28 x 28 -> 14 x 14
CURVE, TESTS, CURVE_POINTS = 200, 1000, 8
BATCH, RATE = 16, 3e-3
TIMED = 4  # updates that are timed; one more warms up
ARMS = {
    "dense": ModelConfig(1, 32, 1, 1, dropout=0.0),
    "sparse": ModelConfig(1, 32, 1, 2, "diagonal", 2, 16, dropout=0.0),
}
TITLES = {"dense": "dense", "sparse": "block-sparse, 2 x as deep"}


@dataclass(frozen=True)
class Job:
    """One arm's training, as its process takes it."""

    name: str
    updates: int
    folder: Path
    quick: bool

    @property
    def training(self) -> TrainConfig:
        """Rates fall to a tenth."""
        decay = 0.1 ** (1 / self.updates)
        return TrainConfig(self.updates, BATCH, lr=RATE, lr_decay=decay, warmup=min(20, self.updates // 4), ema=0.99)

    @property
    def last(self) -> Path:
        """Its checkpoint."""
        return self.folder / self.name / "last.safetensors"

    @property
    def log(self) -> Path:
        """Its log."""
        return self.last.with_name("log.jsonl")


def images(quick: bool = False) -> tuple[Tensor, Tensor]:
    """Bytes [n, 1, 14, 14] to be trained on and to be tested with."""
    found = read_images(FASHION, 1)
    train_images, test = (tensor_of(shrink(part, SHRINK)) for part in (found.train, found.test))
    return (train_images[:256], test[:32]) if quick else (train_images, test)


def seconds_of_an_update(name: str, train_images: Tensor) -> float:
    """The median of some."""
    trainer = Trainer(ARMS[name], TrainConfig(batch=BATCH), train_images[:256], "cpu")
    trainer.step()
    times = []
    for _ in range(TIMED):
        begin = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - begin)
    return sorted(times)[TIMED // 2]


def work(job: Job, told: Any, stops: Callable[[], bool]) -> None:
    """Trains an arm to the end, or until `stops` says so; in a process of its own, with one thread."""
    train_images, test = images(job.quick)
    trainer = Trainer(ARMS[job.name], job.training, train_images, "cpu")
    if job.last.exists():
        trainer.resume(job.last)

    def evaluate(stop: Any) -> dict[str, float]:
        """Of the same images at each point of the curve; at the end of more, too."""
        found = trainer.evaluate(test[:CURVE], stop)
        found["curve"] = found["valid"]
        return found | (trainer.evaluate(test[:TESTS], stop) if trainer.update >= job.updates else {})

    def report(line: dict[str, Any]) -> None:
        told.put((job.name, line["update"], line["train"]))

    told.put((job.name, trainer.update, 0.0))
    every = max(1, job.updates // CURVE_POINTS)
    train(trainer, job.last.parent, evaluate, save_every=every, report=report, stop=stops)
