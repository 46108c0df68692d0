"""The convolution: which product it is, as `products` asks."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import numpy as np

from ..._core import library, structs
from ..._core.geometry import fields_of, to_core
from ..tables import Sizes
from .products import Form, Shape


@dataclasses.dataclass(frozen=True)
class Conv(Form):
    """x [n, size..., channels] and y, or channels first [n, channels, size...].

    `geometry` is the row of numbers of `_core.geometry`, `size` that of x: it cannot be told from y.
    """

    sizes: Sizes
    geometry: tuple[int, ...]
    size: tuple[int, ...]
    channels_last: bool = True
    ordered: bool = False  # whether an order of channels is an operand behind the tables
    tf32: bool = False

    @property
    def handlers(self) -> str:
        """See `Form`."""
        return "conv"

    @property
    def token_axis(self) -> int:
        """See `Form`."""
        return 0

    @property
    def integers(self) -> int:
        """See `Form`."""
        return 2 if self.ordered else 1

    @property
    def feature_axis(self) -> int:
        """See `Form`."""
        return -1 if self.channels_last else 1

    def values_shape(self) -> Shape:
        """See `Form`."""
        b = self.sizes.block_size
        return self.sizes.blocks, math.prod(fields_of(self.geometry)[0]), b, b

    def output_size(self) -> Shape:
        """Of y.

        Raises:
            ValueError: the geometry makes no sense, or does not fit the size of x.
        """
        return to_core(self.geometry, self.size)[1]

    def images(self, n: int, size: Shape, channels: int) -> Shape:
        """The shape of so many images."""
        return (n, *size, channels) if self.channels_last else (n, channels, *size)

    def y_shape(self, x: Shape) -> Shape:
        """See `Form`."""
        return self.images(x[0], self.output_size(), self.sizes.outputs)

    def x_shape(self, y: Shape) -> Shape:
        """See `Form`."""
        return self.images(y[0], self.size, self.sizes.inputs)

    def numbers(self, bits: int, activation: int) -> tuple[int, ...]:
        """See `Form`."""
        common = (int(self.tf32), bits, *self.sizes.numbers())
        return *common, int(self.channels_last), activation, *self.geometry

    def workspace(self, which: str, x: Shape, dtype: np.dtype) -> int:
        """See `Form`."""
        view, core = self.sizes.card_view(), to_core(self.geometry, self.size)[0]
        images, strides = (x[0], self.sizes.inputs, *self.size), [1] * len(x)
        step = 1
        for axis in (1, *range(len(x) - 1, 1, -1)) if self.channels_last else range(len(x) - 1, 0, -1):
            strides[axis], step = step, step * images[axis]
        strides[0] = step
        somewhere = 1 << 20
        tensor = library.tensor(somewhere, library.DTYPES[dtype.name], images, strides, (library.CUDA, 0))
        order = somewhere if self.ordered else None
        ask = f"bs_conv_{which}_workspace_size"
        given: tuple[structs.ConvGeometry, structs.Tensor] = (core, tensor)
        return int(library.ask(ask, ctypes.byref(view), *map(ctypes.byref, given), order))
