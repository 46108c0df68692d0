"""The convolution on CuPy arrays; `blocksparse.cupy` exports its functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core import structs
from ..layout import Layout
from . import conv
from .cupy_arrays import CuPy

Array = Any  # cupy.ndarray, or with __cuda_array_interface__

_ARRAYS = CuPy("conv")


def conv_fprop(
    x: Array,
    values: Array,
    layout: Layout,
    geometry: structs.ConvGeometry,
    *,
    channel_order: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str = "none",
    gates: Array | None = None,
    out: Array | None = None,
    allow_tf32: bool = False,
) -> Array:
    """y = activation(the convolution of x + bias + residual).

    Args:
        x: [n, layout.in_features, sizes...], contiguous or channels-last.
        values: the filter, [layout.blocks, taps, b, b], of the dtype of x.
        layout: which blocks of the filter there are, over (out channels, in channels).
        geometry: see `conv_geometry`.
        channel_order: [layout.in_features], int32 on the card, a permutation, which is not checked there: the
            layout's channel c is channel_order[c] of x.
        bias: [layout.out_features].
        residual: like the result.
        activation: "none", "relu", "gelu" (the exact one), "gelu_tanh" or "silu".
        gates: [layout.blocks], float32 (float64 for float64): a factor for each block; 0 skips it.
        out: where to write the result; a new array otherwise.
        allow_tf32: float32 may be computed in tf32, by tensor cores.

    Returns:
        [n, layout.out_features, sizes...], of the dtype and order of x, or of the residual's where x fits both.

    Raises:
        ValueError: a shape, dtype, memory format or the geometry is wrong.
        TypeError: an argument is of another kind.
        UnavailableError: there is no card, or the library was built without CUDA.
    """
    operands: dict[str, Any] = {"channel_order": channel_order, "bias": bias, "residual": residual, "gates": gates}
    setting: dict[str, Any] = {"activation": activation, "out": out, "tf32": allow_tf32}
    result: Array = conv.fprop(_ARRAYS, x, values, layout, geometry, **operands, **setting)
    return result


def conv_dgrad(
    dy: Array,
    values: Array,
    layout: Layout,
    geometry: structs.ConvGeometry,
    size: Sequence[int],
    *,
    channel_order: Array | None = None,
    gates: Array | None = None,
    out: Array | None = None,
    allow_tf32: bool = False,
) -> Array:
    """The gradient of `conv_fprop` with respect to x, whose sizes were `size`.

    Args:
        dy: [n, layout.out_features, sizes of y...].
        values: as in `conv_fprop`, of the dtype of dy.
        layout: as in `conv_fprop`.
        geometry: as in `conv_fprop`.
        size: the sizes of x, which dy does not tell.
        channel_order: as in `conv_fprop`.
        gates: as in `conv_fprop`.
        out: where to write the result; a new array otherwise.
        allow_tf32: as in `conv_fprop`.

    Returns:
        [n, layout.in_features, size...], of the dtype and order of dy.

    Raises:
        ValueError: a shape, dtype, memory format or the geometry is wrong.
        TypeError: an argument is of another kind.
        UnavailableError: there is no card, or the library was built without CUDA.
    """
    operands: dict[str, Any] = {"channel_order": channel_order, "gates": gates, "out": out, "tf32": allow_tf32}
    result: Array = conv.dgrad(_ARRAYS, dy, values, layout, geometry, size, **operands)
    return result


def conv_wgrad(
    x: Array,
    dy: Array,
    layout: Layout,
    geometry: structs.ConvGeometry,
    *,
    channel_order: Array | None = None,
    values: Array | None = None,
    gates: Array | None = None,
    out: Array | None = None,
    gates_out: Array | None = None,
    accumulate: bool = False,
    allow_tf32: bool = False,
) -> Array:
    """The gradient of `conv_fprop` with respect to the filter: S = sum over images and pixels, dW = gate * S.

    Args:
        x: as in `conv_fprop`.
        dy: [n, layout.out_features, sizes of y...], of the order of x.
        layout: as in `conv_fprop`.
        geometry: as in `conv_fprop`.
        channel_order: as in `conv_fprop`.
        values: the filter; needed for `gates_out` alone.
        gates: as in `conv_fprop`.
        out: [layout.blocks, taps, b, b], written or, with `accumulate`, added to; a new array otherwise.
        gates_out: [layout.blocks], where the gradient of the gates, <S, W>, is written or added to.
        accumulate: add to `out` and `gates_out`.
        allow_tf32: as in `conv_fprop`.

    Returns:
        [layout.blocks, taps, b, b]; a new array has the dtype of x.

    Raises:
        ValueError: a shape, dtype, memory format or the geometry is wrong.
        TypeError: an argument is of another kind.
        UnavailableError: there is no card, or the library was built without CUDA.
    """
    operands: dict[str, Any] = {"channel_order": channel_order, "values": values, "gates": gates, "tf32": allow_tf32}
    setting: dict[str, Any] = {"out": out, "gates_out": gates_out, "accumulate": accumulate}
    result: Array = conv.wgrad(_ARRAYS, x, dy, layout, geometry, **operands, **setting)
    return result
