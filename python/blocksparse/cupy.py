"""The linear op and the convolution on CuPy arrays: float32, float64 and float16, and bfloat16 where CuPy has it.

The functions of `blocksparse.numpy`, on the card where `x` lies and on CuPy's current stream: work is queued, and
results are CuPy arrays. Other arrays that have `__cuda_array_interface__` are taken as well, without a copy. The
layout's tables are copied to a card by the first call there, so call once on a stream before a graph is captured on
it. CuPy is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._arrays import linear
from ._arrays.cupy_arrays import CuPy
from ._arrays.cupy_conv import conv_dgrad, conv_fprop, conv_wgrad
from ._core.conv_geometry import conv_geometry, conv_output_size
from .layout import Layout

__all__ = [
    "conv_dgrad",
    "conv_fprop",
    "conv_geometry",
    "conv_output_size",
    "conv_wgrad",
    "linear_dgrad",
    "linear_fprop",
    "linear_wgrad",
]

Array = Any  # cupy.ndarray, or with __cuda_array_interface__


def linear_fprop(
    x: Array,
    values: Array,
    layout: Layout,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str = "none",
    gates: Array | None = None,
    out: Array | None = None,
    allow_tf32: bool = False,
) -> Array:
    """y = activation(x W^T + bias + residual).

    Args:
        x: [..., layout.in_features].
        values: the blocks of W, [layout.blocks, b, b], of the dtype of x.
        layout: which blocks of W there are.
        bias: [layout.out_features].
        residual: like the result.
        activation: "none", "relu", "gelu" (the exact one), "gelu_tanh" or "silu".
        gates: [layout.blocks], float32 (float64 for float64): a factor for each block; 0 skips it.
        out: where to write the result; a new array otherwise.
        allow_tf32: float32 may be computed in tf32, by tensor cores.

    Returns:
        [..., layout.out_features], of the dtype of x.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
        TypeError: an argument is no array of a card.
        UnavailableError: there is no card, or the library was built without CUDA.
    """
    operands: dict[str, Any] = {"bias": bias, "residual": residual, "gates": gates, "out": out, "tf32": allow_tf32}
    result: Array = linear.fprop(_ARRAYS, x, values, layout, activation=activation, threads=0, **operands)
    return result


def linear_dgrad(
    dy: Array,
    values: Array,
    layout: Layout,
    *,
    gates: Array | None = None,
    out: Array | None = None,
    allow_tf32: bool = False,
) -> Array:
    """dx = dy W: the gradient of `linear_fprop` with respect to x.

    Args:
        dy: [..., layout.out_features].
        values: the blocks of W, [layout.blocks, b, b], of the dtype of dy.
        layout: which blocks of W there are.
        gates: as in `linear_fprop`.
        out: where to write the result; a new array otherwise.
        allow_tf32: as in `linear_fprop`.

    Returns:
        [..., layout.in_features], of the dtype of dy.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
        TypeError: an argument is no array of a card.
        UnavailableError: there is no card, or the library was built without CUDA.
    """
    result: Array = linear.dgrad(_ARRAYS, dy, values, layout, gates=gates, out=out, threads=0, tf32=allow_tf32)
    return result


def linear_wgrad(
    x: Array | Sequence[Array],
    dy: Array | Sequence[Array],
    layout: Layout,
    *,
    values: Array | None = None,
    gates: Array | None = None,
    out: Array | None = None,
    gates_out: Array | None = None,
    accumulate: bool = False,
    allow_tf32: bool = False,
) -> Array:
    """dW of the blocks of the layout, summed over all (x, dy) given: S = sum of dy_out^T x_in, dW = gate * S.

    Args:
        x: [..., layout.in_features], or a list of such arrays (the time steps of a recurrent network, say).
        dy: [..., layout.out_features], or as long a list.
        layout: which blocks of W there are.
        values: the blocks of W; needed for `gates_out` alone.
        gates: as in `linear_fprop`.
        out: [layout.blocks, b, b], written or, with `accumulate`, added to; a new array otherwise.
        gates_out: [layout.blocks], where the gradient of the gates, <S, W>, is written or added to.
        accumulate: add to `out` and `gates_out`.
        allow_tf32: as in `linear_fprop`.

    Returns:
        [layout.blocks, b, b]; a new array has the dtype of x.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
        TypeError: an argument is no array of a card.
        UnavailableError: there is no card, or the library was built without CUDA.
    """
    operands = {"values": values, "gates": gates, "out": out, "gates_out": gates_out}
    result: Array = linear.wgrad(_ARRAYS, x, dy, layout, accumulate=accumulate, threads=0, tf32=allow_tf32, **operands)
    return result


_ARRAYS = CuPy("linear")
