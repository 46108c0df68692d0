"""Convolutions as functions of arrays: dense in space, block-sparse over channels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.geometry import Padding, Sizes, make_geometry, per_size
from ..layout import Layout
from .arguments import activation_code, allows_tf32, need_array, need_like, need_values
from .ops import products
from .ops.avals import same_axes
from .ops.conv import Conv
from .tables import Tables, tables_for

OP = "conv"


def conv1d(x: Any, values: Any, layout: Layout | Tables, bias: Any | None = None, **options: Any) -> jax.Array:
    """`conv2d` of x [n, width, channels]."""
    return _conv(1, False, x, values, layout, bias, **options)


def conv2d(x: Any, values: Any, layout: Layout | Tables, bias: Any | None = None, **options: Any) -> jax.Array:
    """activation(conv(x, W) + bias + residual), where the filter W has the blocks `values`.

    Differentiable any number of times, forward and backward; knows what `linear` knows. Under `vmap` a batch of x
    becomes more images of one convolution; a batch of values, bias or gates is a loop.

    Args:
        x: [n, height, width, layout.in_features], or without n; [n, channels, height, width] if not channels_last.
        values: [layout.blocks, taps, b, b], of the dtype of x: the taps of the kernel, the last size fastest, each
            [out, in].
        layout: which blocks of channels (out, in) are connected.
        bias: [layout.out_features].
        options: the rest, by name:

            - kernel_size: one number, or one for each size.
            - stride: as kernel_size; 1 by default.
            - padding: for each size a number or a pair (before, after), one for all or a sequence of them; or "SAME" or
              "VALID", as JAX means them, or "causal": extent of the kernel less 1, all of it before, as in flax. 0 by
              default.
            - dilation: as kernel_size; 1 by default.
            - channels_last: whether channels are the last axis of x and of the result, as they are by default; that is
              the fast way.
            - channel_order: [layout.in_features], a permutation: channel c of the layout's inputs is channel
              channel_order[c] of x.
            - gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
            - residual: like the result.
            - activation: as for `linear`.
            - precision: as for `linear`.

    Returns:
        [n, height', width', layout.out_features], of the dtype of x, or as x has its axes.

    Raises:
        ValueError: a shape, a dtype, the order or the geometry is wrong.
        TypeError: an argument is no array, the layout is none, or an option is unknown.
    """
    return _conv(2, False, x, values, layout, bias, **options)


def conv3d(x: Any, values: Any, layout: Layout | Tables, bias: Any | None = None, **options: Any) -> jax.Array:
    """`conv2d` of x [n, depth, height, width, channels]."""
    return _conv(3, False, x, values, layout, bias, **options)


def conv_transpose1d(
    x: Any, values: Any, layout: Layout | Tables, bias: Any | None = None, **options: Any
) -> jax.Array:
    """`conv_transpose2d` of x [n, width, channels]."""
    return _conv(1, True, x, values, layout, bias, **options)


def conv_transpose2d(
    x: Any, values: Any, layout: Layout | Tables, bias: Any | None = None, **options: Any
) -> jax.Array:
    """The transposed convolution; all else as for `conv2d`.

    The blocks are [out, in] here, too, and filters are not mirrored. `padding` is numbers or pairs: pixels taken off
    the result. One more option is `output_padding`: pixels added behind, less than the stride or the dilation.
    """
    return _conv(2, True, x, values, layout, bias, **options)


def conv_transpose3d(
    x: Any, values: Any, layout: Layout | Tables, bias: Any | None = None, **options: Any
) -> jax.Array:
    """`conv_transpose2d` of x [n, depth, height, width, channels]."""
    return _conv(3, True, x, values, layout, bias, **options)


def _conv(
    rank: int, transposed: bool, x: Any, values: Any, layout: Layout | Tables, bias: Any | None, **options: Any
) -> jax.Array:
    if "output_padding" in options and not transposed:
        raise TypeError(f"[{OP}] output_padding is of transposed convolutions")
    return apply_conv(x, values, layout, bias, rank=rank, transposed=transposed, **options)


def apply_conv(
    x: Any,
    values: Any,
    layout: Layout | Tables,
    bias: Any | None = None,
    *,
    rank: int,
    transposed: bool,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    output_padding: Sizes = 0,
    channels_last: bool = True,
    channel_order: Any | Sequence[int] | None = None,
    gates: Any | None = None,
    residual: Any | None = None,
    activation: str | None = "none",
    precision: Any = None,
    wide: bool = False,
) -> jax.Array:
    """`conv2d` and its like; values may be wider than x with `wide`."""
    x, tables = need_array(OP, "x", x), tables_for(OP, layout, x)
    sizes, code = tables.sizes, activation_code(OP, activation)
    alone = x.ndim == rank + 1  # one image
    if (not alone and x.ndim != rank + 2) or x.shape[-1 if channels_last else -rank - 1] != sizes.inputs:
        names = ", ".join(("depth", "height", "width")[-rank:])
        needed = f"[n, {names}, {sizes.inputs}]" if channels_last else f"[n, {sizes.inputs}, {names}]"
        raise ValueError(f"[{OP}] x is {list(x.shape)}, needs {needed}")
    size = x.shape[-rank - 1 : -1] if channels_last else x.shape[-rank:]
    pads = padding if transposed else _pads(padding, size, kernel_size, stride, dilation)
    geometry = make_geometry(rank, kernel_size, stride, pads, dilation, output_padding, transposed)
    order = _order(channel_order, sizes.inputs)
    tf32 = allows_tf32(OP, precision, x.dtype)
    form = Conv(sizes, geometry, size, bool(channels_last), order is not None, tf32)
    shape = form.images(1 if alone else x.shape[0], form.output_size(), sizes.outputs)
    values = need_values(OP, values, form.values_shape(), x.dtype, wide)
    if bias is not None:
        bias = need_like(OP, "bias", bias, (sizes.outputs,), x.dtype)
    if gates is not None:
        gates = need_like(OP, "gates", gates, (sizes.blocks,), products.sum_dtype(x.dtype))
    if residual is not None:
        residual = need_like(OP, "residual", residual, shape[1:] if alone else shape, x.dtype)
    given = (x, values, tables.words, order, bias, residual, gates)
    return _compiled(*given, form=form, activation=code, alone=alone)


def _pads(padding: Any, size: tuple[int, ...], kernel_size: Sizes, stride: Sizes, dilation: Sizes) -> Any:
    """The padding as numbers: what JAX's words mean beside strides depends on the size of x, or is of flax alone."""
    word = padding.upper() if isinstance(padding, str) else ""
    if word not in ("SAME", "SAME_LOWER", "CAUSAL"):
        return padding.lower() if word else padding
    kernel, strides, dilations = (
        per_size(name, given, len(size))
        for name, given in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation))
    )
    extents = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    if word == "CAUSAL":
        return [(extent - 1, 0) for extent in extents]
    return jax.lax.padtype_to_pads(size, extents, strides, word)


@functools.partial(jax.jit, static_argnames=("form", "activation", "alone"), inline=True)
def _compiled(
    x: Any,
    values: Any,
    words: Any,
    order: Any,
    bias: Any,
    residual: Any,
    gates: Any,
    *,
    form: Conv,
    activation: int,
    alone: bool,
) -> jax.Array:
    """Compiled, for calls that nobody else compiles."""
    x, values, words, order, bias, residual, gates = same_axes(x, values, words, order, bias, residual, gates)
    if alone:
        x, residual = x[None], None if residual is None else residual[None]
    integers = (words,) if order is None else (words, order)
    y = products.fprop(form, x, values, integers, bias=bias, residual=residual, gates=gates, activation=activation)
    return y[0] if alone else y


def _order(given: Any, channels: int) -> jax.Array | None:
    """The order of channels as int32.

    Raises:
        ValueError: it is no row of as many integers, or, where they can be read, no permutation.
    """
    if given is None:
        return None
    order = given if isinstance(given, jax.Array) else np.asarray(given)
    if order.shape != (channels,) or order.dtype.kind not in "iu":
        raise ValueError(f"[{OP}] channel_order is {order.dtype} {list(order.shape)}, needs integers [{channels}]")
    if not isinstance(order, jax.core.Tracer) and not np.array_equal(np.sort(order), np.arange(channels)):
        raise ValueError(f"[{OP}] channel_order is no permutation of 0 to {channels - 1}")
    return jnp.asarray(order, jnp.int32)
