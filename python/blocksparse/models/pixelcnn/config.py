"""What a PixelCNN++ is made of, and how it is trained. Nothing here needs PyTorch, so that help comes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DROPOUT = 0.95
MAX_NUMBER = 2**31 - 1  # of whole numbers; memory is short long before


def check_numbers(**numbers: int) -> None:
    """Raises ValueError where one is not of 1 to 2^31 - 1."""
    for name, number in numbers.items():
        if not 1 <= number <= MAX_NUMBER:
            needed = "1 or more" if number < 1 else f"{MAX_NUMBER} or less"
            raise ValueError(f"[pixelcnn] {name} is {number}, needs {needed}")


def check_seed(seed: int) -> None:
    """Raises ValueError where PyTorch cannot take it."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"[pixelcnn] seed is {seed}, needs 64 bits or less")


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of.

    Args:
        channels: of an image: 3 (red, green, blue) or 1 (grey).
        filters: channels of both streams, F.
        resnets: gated resnets in each of six stages and both streams, R; two stages have one more.
        depth: every resnet becomes so many.
        layout: of the convolutions of F channels: "diagonal" (groups, with a shuffle), "balanced", or a graph of
            filters / block nodes such as "ba(16,2)"; "" for dense ones.
        groups: of "diagonal" and "balanced": an output sees one input of so many.
        block: edge of a block, in channels.
        dense_nin: 1 x 1 convolutions stay dense.
        mixture: logistics for each pixel.
        dropout: share of a resnet's inner activations that training leaves out.
        seed: another one, other graphs and other first weights.
    """

    channels: int = 3
    filters: int = 128
    resnets: int = 2
    depth: int = 1
    layout: str = ""
    groups: int = 1
    block: int = 32
    dense_nin: bool = False
    mixture: int = 10
    dropout: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what makes no model; graphs are refused where they are made."""
        check_numbers(**{name: getattr(self, name) for name in ("filters", "resnets", "depth", "groups", "mixture")})
        if self.channels not in (1, 3):
            raise ValueError(f"[pixelcnn] channels is {self.channels}, needs 3 or 1")
        if not 0 <= self.dropout <= MAX_DROPOUT:
            raise ValueError(f"[pixelcnn] dropout is {self.dropout}, needs 0 to {MAX_DROPOUT}")
        check_seed(self.seed)
        if not self.layout:
            if self.groups != 1:
                raise ValueError(f"[pixelcnn] groups is {self.groups}, needs 1 for a dense model, or a layout")
            return
        if self.block not in (8, 16, 32, 64, 128):
            raise ValueError(f"[pixelcnn] block is {self.block}, needs 8, 16, 32, 64 or 128")
        whole = self.block * (self.groups if self.layout == "diagonal" else 1)
        if self.filters % whole != 0:
            what = "groups * block" if self.layout == "diagonal" else "block"
            raise ValueError(f"[pixelcnn] filters is {self.filters}, needs a multiple of {what} = {whole}")
        if self.layout == "balanced" and self.nodes % self.groups != 0:
            raise ValueError(f"[pixelcnn] filters / block is {self.nodes}, needs a multiple of groups = {self.groups}")
        if self.layout not in ("diagonal", "balanced") and self.groups != 1:
            raise ValueError(f"[pixelcnn] groups is {self.groups}, needs 1: {self.layout} says what is connected")

    @property
    def nodes(self) -> int:
        """Blocks of channels in a stream."""
        return self.filters // self.block

    @property
    def outputs(self) -> int:
        """Numbers for each pixel: the mixture's weights, means, scales and, for colours, coefficients."""
        return self.mixture * (10 if self.channels == 3 else 3)


def _arms(filters: int, resnets: int, block: int) -> dict[str, ModelConfig]:
    """Dense, and twice and four times as deep at as many connections."""
    name = f"{filters}-{resnets}"
    dense = ModelConfig(filters=filters, resnets=resnets)

    def deep(times: int, dense_nin: bool = False) -> ModelConfig:
        return ModelConfig(3, filters, resnets, times, "diagonal", times, block, dense_nin)

    arms = {f"{name}-dense": dense, f"{name}-x2": deep(2), f"{name}-x4": deep(4)}
    return arms if filters < 96 else {**arms, f"{name}-x4-nin": deep(4, dense_nin=True)}


PRESETS = {
    **_arms(160, 5, 8),
    **_arms(128, 2, 32),
    **_arms(96, 3, 8),
    **_arms(64, 2, 16),
    **_arms(32, 1, 8),
    "128-2-x4-balanced": ModelConfig(3, 128, 2, 4, "balanced", 4, 32),
}


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained.

    Args:
        updates: how often the weights are changed.
        batch: images of an update.
        accumulate: parts of a batch that are computed one after the other, where memory is short.
        lr: the learning rate, which `lr_decay` makes smaller with every update.
        lr_decay: by how much.
        warmup: updates in which the learning rate rises.
        ema: decay of the average of the weights that evaluation uses; shorter at first.
        flip: half of the images are mirrored.
        bf16: convolutions in bfloat16, by autocast.
        seed: of all that is random.
    """

    updates: int = 1000
    batch: int = 64
    accumulate: int = 1
    lr: float = 1e-3
    lr_decay: float = 0.999995
    warmup: int = 0
    ema: float = 0.9995
    flip: bool = False
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what is no training."""
        check_numbers(updates=self.updates, batch=self.batch, accumulate=self.accumulate)
        if self.batch % self.accumulate != 0:
            raise ValueError(f"[pixelcnn] batch is {self.batch}, needs a multiple of accumulate = {self.accumulate}")
        rates = 0 < self.lr < math.inf and 0 < self.lr_decay <= 1
        if not (rates and 0 <= self.ema < 1 and self.warmup >= 0):
            given = f"lr is {self.lr}, lr_decay {self.lr_decay}, ema {self.ema}, warmup {self.warmup}"
            needs = "lr above 0, lr_decay above 0 and 1 at most, ema at least 0 and below 1, warmup 0 or more"
            raise ValueError(f"[pixelcnn] {given}; needs {needs}")
        check_seed(self.seed)

    def rate(self, update: int) -> float:
        """The learning rate with which so many updates are followed by the next one."""
        return self.lr * min(1.0, (update + 1) / (self.warmup + 1)) * self.lr_decay**update

    def average(self, update: int) -> float:
        """The decay of the averaged weights in that update: ramped, so that short trainings have an average, too."""
        return min(self.ema, (1 + update) / (10 + update))
