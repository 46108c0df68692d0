"""Convolutions on TensorFlow's tensors: dense in space, block-sparse over channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .._core.geometry import Padding, Sizes, fields_of, make_geometry, output_size, rank_of
from ..layout import Layout
from . import gradients as gradients  # registers them
from . import ops
from .linear import activation_of, finish
from .tables import as_given, index_of, refuse_gpu


def conv1d(x: Any, values: Any, layout: Layout, bias: Any = None, **options: Any) -> Any:
    """`conv2d` of x [n, width, channels]."""
    return _conv(1, False, x, values, layout, bias, **options)


def conv2d(x: Any, values: Any, layout: Layout, bias: Any = None, **options: Any) -> Any:
    """activation(conv(x, W) + bias + residual), where the filter W has the blocks `values`.

    A CPU op, differentiable any number of times: see `linear`.

    Args:
        x: [n, height, width, layout.in_features], or [n, channels, height, width] if not channels_last.
        values: [layout.blocks, taps, b, b], of the dtype of x: the taps of the kernel, the last size fastest, each
            [out, in].
        layout: which blocks of channels (out, in) are connected.
        bias: [layout.out_features].
        options: the rest, by name.
            kernel_size: one number, or one for each size.
            stride: as kernel_size; 1 by default.
            padding: for each size a number, a pair (before, after), "same" (as many pixels as x has; stride 1),
                "causal" (as "same", but all of it before) or "valid" (none). One for all sizes, or a sequence of them;
                0 by default.
            dilation: as kernel_size; 1 by default.
            channels_last: whether channels are the last axis of x and of the result, as they are by default.
            channel_order: [layout.in_features], a permutation: channel c of the layout's inputs is channel
                channel_order[c] of x.
            gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
            residual: like the result.
            activation: as for `linear`.

    Returns:
        [n, height', width', layout.out_features], of the dtype of x, or as x has its axes.

    Raises:
        ValueError: the geometry is wrong; in a graph, a shape is known to be wrong; x is on a GPU.
        tf.errors.InvalidArgumentError: a shape is wrong.
        TypeError: the layout is none, an option is unknown, or dtypes differ.
    """
    return _conv(2, False, x, values, layout, bias, **options)


def conv3d(x: Any, values: Any, layout: Layout, bias: Any = None, **options: Any) -> Any:
    """`conv2d` of x [n, depth, height, width, channels]."""
    return _conv(3, False, x, values, layout, bias, **options)


def conv_transpose1d(x: Any, values: Any, layout: Layout, bias: Any = None, **options: Any) -> Any:
    """`conv_transpose2d` of x [n, width, channels]."""
    return _conv(1, True, x, values, layout, bias, **options)


def conv_transpose2d(x: Any, values: Any, layout: Layout, bias: Any = None, **options: Any) -> Any:
    """The transposed convolution; all else as for `conv2d`.

    The blocks are [out, in] here, too, and filters are not mirrored. `padding` is numbers or pairs: pixels taken off
    the result. One more option is `output_padding`: pixels added behind, less than the stride or the dilation.
    """
    return _conv(2, True, x, values, layout, bias, **options)


def conv_transpose3d(x: Any, values: Any, layout: Layout, bias: Any = None, **options: Any) -> Any:
    """`conv_transpose2d` of x [n, depth, height, width, channels]."""
    return _conv(3, True, x, values, layout, bias, **options)


@tf.autograph.experimental.do_not_convert
def _conv(
    rank: int,
    transposed: bool,
    x: Any,
    values: Any,
    layout: Layout,
    bias: Any,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    output_padding: Sizes = 0,
    **more: Any,
) -> Any:
    if output_padding != 0 and not transposed:
        raise TypeError("[conv] output_padding is of transposed convolutions")
    geometry = make_geometry(rank, kernel_size, stride, padding, dilation, output_padding, transposed)
    return apply_conv(x, values, layout, geometry, bias, **more)


@tf.autograph.experimental.do_not_convert
def apply_conv(
    x: Any,
    values: Any,
    layout: Layout,
    geometry: Sequence[int],
    bias: Any = None,
    *,
    channels_last: bool = True,
    channel_order: Any = None,
    gates: Any = None,
    residual: Any = None,
    activation: str | None = "none",
) -> Any:
    """`conv2d` and its like by the geometry of `_core.geometry`."""
    activate = activation_of("conv", activation)
    index = index_of(layout, "conv")
    refuse_gpu("conv", x)
    x, values, bias = as_given(x, values, bias)
    shape = None
    if not tf.executing_eagerly():
        x = tf.convert_to_tensor(x)
        shape = _result_shape(x, layout, geometry, channels_last)
    y = ops.conv(
        x=x,
        values=values,
        index=index,
        gates=[] if gates is None else [tf.convert_to_tensor(gates)],
        bias=[] if bias is None else [bias],
        channel_order=[] if channel_order is None else [tf.convert_to_tensor(channel_order, tf.int32)],
        geometry=list(geometry),
        transposed=layout.transposed,
        channels_last=bool(channels_last),
    )
    if shape is not None:
        refuse_gpu("conv", y)
        y.set_shape(shape)
    return finish("conv", y, residual, activate)


def _result_shape(x: Any, layout: Layout, geometry: Sequence[int], last: bool) -> list[int | None]:
    """What a graph can know of the result's shape."""
    if x.shape.rank != rank_of(geometry) + 2:
        raise ValueError(f"[conv] x is {x.shape}, needs n, channels and {rank_of(geometry)} sizes")
    n, *rest = x.shape.as_list()
    channels, size = (rest[-1], rest[:-1]) if last else (rest[0], rest[1:])
    if channels not in (None, layout.in_features):
        raise ValueError(f"[conv] x is {x.shape.as_list()}, layout needs {layout.in_features} channels")
    out: list[int | None] = []
    for i, pixels in enumerate(size):
        along = [int(geometry[0]), *(field[i] for field in fields_of(geometry))]
        out.append(None if pixels is None else output_size(along, [pixels])[0])
    return [n, *out, layout.out_features] if last else [n, layout.out_features, *out]
