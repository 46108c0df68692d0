"""Convolutions on TensorFlow's tensors: dense in space, block-sparse over channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .._core.geometry import Padding, Sizes, fields_of, make_geometry, output_size
from ..layout import Layout
from . import gradients as gradients  # registers them
from . import ops
from .linear import activation_of
from .tables import index_of, refuse_gpu

FORMATS = ("channels_last", "channels_first")


@tf.autograph.experimental.do_not_convert
def conv(
    x: Any,
    values: Any,
    layout: Layout,
    bias: Any = None,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    transposed: bool = False,
    output_padding: Sizes = 0,
    channel_order: Any = None,
    gates: Any = None,
    residual: Any = None,
    activation: str | None = "none",
    data_format: str = "channels_last",
) -> Any:
    """activation(conv(x, W) + bias + residual), where the filter W [out, in, size...] has the blocks `values`.

    1-D to 3-D, by the rank of x. A CPU op, differentiable any number of times: see `linear`.

    Args:
        x: [n, size..., layout.in_features], or [n, layout.in_features, size...] with "channels_first".
        values: [layout.blocks, taps, b, b]: the taps of the kernel, the last size fastest, each [out, in].
        layout: which blocks of channels (out, in) are connected.
        bias: [layout.out_features].
        kernel_size: one number, or one for each size.
        stride: as kernel_size.
        padding: for each size a number, a pair (before, after), "same" or "causal" (as many pixels as x has; stride 1)
            or "valid" (none). One for all sizes, or a sequence of them.
        dilation: as kernel_size.
        transposed: whether it is the transposed convolution; the blocks are [out, in] there, too.
        output_padding: pixels added after the result of a transposed convolution.
        channel_order: [layout.in_features], a permutation: channel c of the layout's inputs is channel
            channel_order[c] of x.
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        residual: like the result.
        activation: "none" (or None), "relu", "gelu" (the exact one), "gelu_tanh" or "silu".
        data_format: "channels_last" or "channels_first". Each is read and written as it is.

    Returns:
        The images, in the order of x and of its dtype.

    Raises:
        ValueError: the geometry is wrong; in a graph, a shape is known to be wrong; x is on a GPU.
        tf.errors.InvalidArgumentError: a shape is wrong.
        TypeError: the layout is none, or dtypes differ.
    """
    rank = x.shape.rank if hasattr(x, "shape") and hasattr(x.shape, "rank") else np.ndim(x)
    if rank is None or not 3 <= rank <= 5:
        raise ValueError(f"[conv] x has rank {rank}, needs n, channels and 1 to 3 sizes")
    made = make_geometry(rank - 2, kernel_size, stride, padding, dilation, output_padding, transposed)
    return apply_conv(x, values, layout, made, bias, channel_order, gates, residual, activation, data_format)


@tf.autograph.experimental.do_not_convert
def apply_conv(
    x: Any,
    values: Any,
    layout: Layout,
    geometry: Sequence[int],
    bias: Any = None,
    channel_order: Any = None,
    gates: Any = None,
    residual: Any = None,
    activation: str | None = "none",
    data_format: str = "channels_last",
) -> Any:
    """`conv` with the geometry as numbers."""
    activate = activation_of("conv", activation)
    if data_format not in FORMATS:
        raise ValueError(f"[conv] data_format is {data_format!r}, needs one of {', '.join(FORMATS)}")
    last = data_format == "channels_last"
    index = index_of(layout, "conv")
    refuse_gpu("conv", x)
    shape = None
    if not tf.executing_eagerly():
        x = tf.convert_to_tensor(x)
        shape = _result_shape(x, layout, geometry, last)
    y = ops.conv(
        x=x,
        values=values,
        index=index,
        gates=[] if gates is None else [tf.convert_to_tensor(gates)],
        bias=[] if bias is None else [bias],
        channel_order=[] if channel_order is None else [tf.convert_to_tensor(channel_order, tf.int32)],
        geometry=list(geometry),
        transposed=layout.transposed,
        channels_last=last,
    )
    if shape is not None:
        refuse_gpu("conv", y)
        y.set_shape(shape)
    if residual is not None:
        y = y + residual
    return y if activate is None else activate(y)


def _result_shape(x: Any, layout: Layout, geometry: Sequence[int], last: bool) -> list[int | None]:
    """What a graph can know of the result's shape."""
    n, *rest = x.shape.as_list()
    channels, size = (rest[-1], rest[:-1]) if last else (rest[0], rest[1:])
    if channels not in (None, layout.in_features):
        raise ValueError(f"[conv] x is {x.shape.as_list()}, layout needs {layout.in_features} channels")
    out: list[int | None] = []
    for i, pixels in enumerate(size):
        along = [int(geometry[0]), *(field[i] for field in fields_of(geometry))]
        out.append(None if pixels is None else output_size(along, [pixels])[0])
    return [n, *out, layout.out_features] if last else [n, layout.out_features, *out]
