"""Convolutions of Keras, dense in space and block-sparse over channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from .._core.arguments import to_int
from .._core.geometry import fields_of, make_geometry, output_size, per_size
from ..layout import Layout
from . import backend
from .layer import BlockSparseLayer

_PADDINGS = ("valid", "same", "causal")
_FORMATS = ("channels_last", "channels_first")


class BlockSparseConv(BlockSparseLayer):
    """The base of the convolutions; see `BlockSparseConv2D`."""

    rank = 0

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        layout: Layout | str | None = None,
        *,
        strides: int | Sequence[int] = 1,
        padding: str = "valid",
        dilation_rate: int | Sequence[int] = 1,
        data_format: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(layout, **more)
        name = type(self).__name__
        self.filters, self.padding = to_int("filters", filters, op=name), padding.lower()
        self.kernel_size = per_size("kernel_size", kernel_size, self.rank)
        self.strides = per_size("strides", strides, self.rank)
        self.dilation_rate = per_size("dilation_rate", dilation_rate, self.rank)
        self.data_format = data_format or keras.config.image_data_format()
        if self.padding not in _PADDINGS or (self.padding == "causal" and self.rank != 1):
            raise ValueError(f"[{name}] padding is {padding!r}, needs 'valid' or 'same' (or, in 1-D, 'causal')")
        if self.data_format not in _FORMATS:
            raise ValueError(f"[{name}] data_format is {data_format!r}, needs one of {', '.join(_FORMATS)}")

    def build(self, input_shape: Any) -> None:
        """Makes the variables."""
        channels = self.features_of(input_shape, -1 if self.data_format == "channels_last" else 1, self.rank + 2)
        self.make_variables(self.filters, channels, self.kernel_size)
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Images to images, in the layer's data format."""
        layout, kernel, bias, gates = self.tensors()
        last = self.data_format == "channels_last"
        to_last, to_first = (0, *range(2, self.rank + 2), 1), (0, self.rank + 1, *range(1, self.rank + 1))
        x = inputs if last else keras.ops.transpose(inputs, to_last)
        how = {"kernel_size": self.kernel_size, "stride": self.strides, "dilation": self.dilation_rate}
        pads = self._pads(x.shape[1:-1])
        y = self.activation(backend.conv(self.rank, x, kernel, layout, bias, gates=gates, padding=pads, **how))
        return y if last else keras.ops.transpose(y, to_first)

    def _pads(self, size: Sequence[int | None]) -> list[tuple[int, int]]:
        """(before, after) for images of these sizes: "same" pads by what they need, as TensorFlow has it."""
        pads = []
        for pixels, kernel, stride, dilation in zip(
            size, self.kernel_size, self.strides, self.dilation_rate, strict=True
        ):
            extent = dilation * (kernel - 1)
            if self.padding == "valid":
                total = before = 0
            elif self.padding == "causal":
                total = before = extent
            elif stride == 1:
                total, before = extent, extent // 2
            elif pixels is None:
                raise ValueError(f"[{type(self).__name__}] padding is 'same' and strides are not 1: needs known sizes")
            else:
                total = max((-(-pixels // stride) - 1) * stride + extent + 1 - pixels, 0)
                before = total // 2
            pads.append((before, total - before))
        return pads

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """The sizes, where those of x are known, and the filters."""
        last = self.data_format == "channels_last"
        size = tuple(input_shape[1:-1] if last else input_shape[2:])
        out: list[int | None] = list(size)
        if self.padding == "valid" or any(stride != 1 for stride in self.strides):
            known = [1 if pixels is None else pixels for pixels in size]
            geometry = make_geometry(self.rank, self.kernel_size, self.strides, self._pads(known), self.dilation_rate)
            one = [[int(geometry[0]), *(field[i] for field in fields_of(geometry))] for i in range(self.rank)]
            out = [None if pixels is None else output_size(one[i], [pixels])[0] for i, pixels in enumerate(size)]
        return (input_shape[0], *out, self.filters) if last else (input_shape[0], self.filters, *out)

    def get_config(self) -> dict[str, Any]:
        """All arguments."""
        own = {
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
            "dilation_rate": self.dilation_rate,
            "data_format": self.data_format,
        }
        return {**own, **super().get_config()}


@keras.saving.register_keras_serializable(package="blocksparse")
class BlockSparseConv1D(BlockSparseConv):
    """`BlockSparseConv2D` of x [n, width, channels]; padding may be "causal", too."""

    rank = 1


@keras.saving.register_keras_serializable(package="blocksparse")
class BlockSparseConv2D(BlockSparseConv):
    """`keras.layers.Conv2D` with a filter that is zero outside of the blocks of a layout over (out, in) channels.

    `kernel` [blocks, taps, b, b]: each block has all taps, the last size fastest, each [out, in].

    Args:
        filters: channels of the result.
        kernel_size: one number, or one for each size.
        layout: which blocks of channels (out, in) there are; None: drawn, as in `BlockSparseDense`.
        strides: as kernel_size.
        padding: "valid" or "same". With strides, "same" needs known sizes.
        dilation_rate: as kernel_size.
        data_format: "channels_last" or "channels_first", which costs two transpositions; Keras's own by default.
        **more: as in `BlockSparseDense`.

    Raises:
        ValueError: an argument is wrong, or the layout has another size (when the layer is built).
    """

    rank = 2


@keras.saving.register_keras_serializable(package="blocksparse")
class BlockSparseConv3D(BlockSparseConv):
    """`BlockSparseConv2D` of x [n, depth, height, width, channels]."""

    rank = 3
