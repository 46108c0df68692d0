"""Which convolutions a PixelCNN++ has, and what they cost: streams, stages, gated resnets. Needs no PyTorch.

    u   sees the rows above: kernels of 2 x 3 pixels, two rows, one column to either side
    ul  sees the rows above and the pixels to the left: kernels of 2 x 2; it reads u

Each stream passes three levels, of images of full, half and quarter size, down to the smallest and up again. A level
has R resnets on its way down, whose outputs are kept, and as many on its way up, which read what was kept, last
first; the two finer levels have one more there, which reads what came into the level. With a depth factor d each
resnet is d of them, and so is that one, whose d resnets read the same.

Source: Salimans et al., PixelCNN++, arXiv:1701.05517, section 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .config import ModelConfig

LEVELS = 3

Move = Literal["same", "down", "up"]


@dataclass(frozen=True)
class Kind:
    """Convolutions of one shape.

    Args:
        name: of its weights.
        kernel: (height, width).
        inputs: channels.
        outputs: channels.
        move: "down" halves an image, by strides of 2, and "up" doubles it, by a transposed convolution.
        sparse: whether the channels are connected by a layout.
        scale: deviation of the results at first.
    """

    name: str
    kernel: tuple[int, int]
    inputs: int
    outputs: int
    move: Move = "same"
    sparse: bool = True
    scale: float = 1.0

    @property
    def taps(self) -> int:
        """Of the kernel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """Zeros left, right, above and below: rows above alone; to the left alone where the kernel is 2 wide."""
        height, width = self.kernel
        return width // 2, width - 1 - width // 2, height - 1, 0


@dataclass(frozen=True)
class Layer:
    """One convolution: the `index`-th of its kind, at a level (of its finer side)."""

    kind: Kind
    index: int
    level: int


@dataclass(frozen=True)
class Resnet:
    """x + p * sigmoid(q) with [p, q] = second(elu(first(...) + aux(...))): see `network.gated_resnet`."""

    first: Layer
    second: Layer
    aux: Layer | None


@dataclass
class Stream:
    """One of both, by levels."""

    down: list[list[Resnet]] = field(default_factory=list)
    up: list[list[Resnet]] = field(default_factory=list)
    halve: list[Layer] = field(default_factory=list)
    double: list[Layer] = field(default_factory=list)


@dataclass
class Architecture:
    """All of it."""

    u: Stream
    ul: Stream
    u_first: Layer
    ul_row: Layer
    ul_column: Layer
    head: Layer
    kinds: dict[Kind, int]

    def layers(self) -> Iterator[Layer]:
        """Every convolution."""
        yield from (self.u_first, self.ul_row, self.ul_column, self.head)
        for stream in (self.u, self.ul):
            yield from stream.halve
            yield from stream.double
            for resnet in (r for side in (stream.down, stream.up) for level in side for r in level):
                yield from (layer for layer in (resnet.first, resnet.second, resnet.aux) if layer is not None)


class _Maker:
    def __init__(self, config: ModelConfig) -> None:
        self.config, self.made = config, Counter[Kind]()

    def layer(self, kind: Kind, level: int) -> Layer:
        self.made[kind] += 1
        return Layer(kind, self.made[kind] - 1, level)

    def resnets(self, name: str, kernel: tuple[int, int], count: int, level: int, aux: int) -> list[Resnet]:
        """So many, which read `aux` times F channels beside x."""
        f, nin = self.config.filters, not self.config.dense_nin
        first, second = (Kind(f"{name}_{i}", kernel, 2 * f, i * f, scale=s) for i, s in ((1, 1.0), (2, 0.1)))
        other = Kind(f"{name}_nin_{aux}", (1, 1), 2 * aux * f, f, sparse=nin) if aux else None
        return [
            Resnet(self.layer(first, level), self.layer(second, level), self.layer(other, level) if other else None)
            for _ in range(count)
        ]

    def stream(self, name: str, kernel: tuple[int, int], aux_down: int, aux_up: int) -> Stream:
        c, stream = self.config, Stream()
        halve = Kind(f"{name}_halve", kernel, c.filters, c.filters, "down")
        double = Kind(f"{name}_double", kernel, c.filters, c.filters, "up")
        for level in range(LEVELS):
            last = level == LEVELS - 1
            count = c.depth * (c.resnets + (0 if last else 1))
            stream.down.append(self.resnets(name, kernel, c.depth * c.resnets, level, aux_down))
            stream.up.append(self.resnets(name, kernel, count, level, aux_up))
            if not last:
                stream.halve.append(self.layer(halve, level))
                stream.double.append(self.layer(double, level))
        return stream


def architecture_of(config: ModelConfig) -> Architecture:
    """The convolutions of a model."""
    made, f, inputs = _Maker(config), config.filters, config.channels + 1
    u_first = made.layer(Kind("u_first", (2, 3), inputs, f, sparse=False), 0)
    ul_row = made.layer(Kind("ul_row", (1, 3), inputs, f, sparse=False), 0)
    ul_column = made.layer(Kind("ul_column", (2, 1), inputs, f, sparse=False), 0)
    u, ul = made.stream("u", (2, 3), 0, 1), made.stream("ul", (2, 2), 1, 2)
    head = made.layer(Kind("head", (1, 1), f, config.outputs, sparse=False), 0)
    return Architecture(u, ul, u_first, ul_row, ul_column, head, dict(made.made))


# ---- What it costs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Of a model: numbers that are trained, weights among them, and multiply-adds for an image."""

    parameters: int
    weights: int
    macs: int


def sizes_of(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Those of an image at each level."""
    sizes = [size]
    for _ in range(LEVELS - 1):
        height, width = sizes[-1]
        sizes.append((-(-height // 2), -(-width // 2)))
    return sizes


def count(config: ModelConfig, density: float, size: tuple[int, int] = (32, 32)) -> Counts:
    """What a model has, and does for an image of that size, if its layouts have so many of the blocks."""
    weights = others = macs = 0
    pixels = [height * width for height, width in sizes_of(size)]
    for layer in architecture_of(config).layers():
        kind = layer.kind
        each = round(kind.taps * kind.inputs * kind.outputs * (density if kind.sparse else 1))
        weights, others = weights + each, others + 2 * kind.outputs
        macs += (
            each * pixels[layer.level + (kind.move != "same")]
        )  # a tap is multiplied once a pixel of the coarser side
    return Counts(weights + others, weights, macs)


def table_weights(config: ModelConfig) -> int:
    """F^2 (d(384 R + 132) + 40) / g + 144 F: weights of a model for colours, by the formula."""
    f, d, r, g = config.filters, config.depth, config.resnets, config.groups
    return f * f * (d * (384 * r + 132) + 40) // g + (44 + config.outputs) * f


def table_macs(config: ModelConfig) -> int:
    """F^2 (d / g) (62 R 1344 + 66 (64 R + 1280 (R + 1))): multiply-adds of the resnets for an image of 32 x 32."""
    f, d, r, g = config.filters, config.depth, config.resnets, config.groups
    return f * f * d * (62 * r * 1344 + 66 * (64 * r + 1280 * (r + 1))) // g
