"""The linear op and the convolution on NumPy arrays: float32, float64 and float16; bfloat16 through `ml_dtypes`.

`x` is [..., features] with contiguous features, or the transpose of a contiguous [features, tokens] array (features
first); results have the order of their input. Everything else is checked and explained by the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from ._arrays import linear
from ._arrays.numpy_arrays import NumPy
from ._arrays.numpy_conv import conv_dgrad, conv_fprop, conv_wgrad
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

Array = npt.NDArray[Any]


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
    threads: int = 0,
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
        threads: 0 is OpenMP's current maximum.

    Returns:
        [..., layout.out_features], of the dtype of x.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
    """
    operands: dict[str, Any] = {"bias": bias, "residual": residual, "gates": gates, "out": out}
    result: Array = linear.fprop(_ARRAYS, x, values, layout, activation=activation, threads=threads, **operands)
    return result


def linear_dgrad(
    dy: Array, values: Array, layout: Layout, *, gates: Array | None = None, out: Array | None = None, threads: int = 0
) -> Array:
    """dx = dy W: the gradient of `linear_fprop` with respect to x.

    Args:
        dy: [..., layout.out_features].
        values: the blocks of W, [layout.blocks, b, b], of the dtype of dy.
        layout: which blocks of W there are.
        gates: as in `linear_fprop`.
        out: where to write the result; a new array otherwise.
        threads: 0 is OpenMP's current maximum.

    Returns:
        [..., layout.in_features], of the dtype of dy.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
    """
    result: Array = linear.dgrad(_ARRAYS, dy, values, layout, gates=gates, out=out, threads=threads)
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
    threads: int = 0,
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
        threads: 0 is OpenMP's current maximum.

    Returns:
        [layout.blocks, b, b]; a new array has the dtype of x.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
    """
    operands: dict[str, Any] = {"values": values, "gates": gates, "out": out, "gates_out": gates_out}
    result: Array = linear.wgrad(_ARRAYS, x, dy, layout, accumulate=accumulate, threads=threads, **operands)
    return result


_ARRAYS = NumPy("linear")
