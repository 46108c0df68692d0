"""The linear op and the convolution on NumPy arrays: float32, float64 and float16; bfloat16 through `ml_dtypes`.

`x` is [..., features] with contiguous features, or the transpose of a contiguous [features, tokens] array (features
first); results have the order of their input. Everything else is checked and explained by the core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _arrays, _lib, _structs
from ._given import to_threads
from ._numpy_conv import conv_dgrad, conv_fprop, conv_geometry, conv_output_size, conv_wgrad
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
        activation: "none", "relu", "gelu" (the exact one) or "silu".
        gates: [layout.blocks], float32 (float64 for float64): a factor for each block; 0 skips it.
        out: where to write the result; a new array otherwise.
        threads: 0 is OpenMP's current maximum.

    Returns:
        [..., layout.out_features], of the dtype of x.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
    """
    operands: dict[str, Any] = {"bias": bias, "residual": residual, "gates": gates, "out": out}
    result: Array = _arrays.fprop(_ARRAYS, x, values, layout, activation=activation, threads=threads, **operands)
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
    result: Array = _arrays.dgrad(_ARRAYS, dy, values, layout, gates=gates, out=out, threads=threads)
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
    result: Array = _arrays.wgrad(_ARRAYS, x, dy, layout, accumulate=accumulate, threads=threads, **operands)
    return result


class _NumPy(_arrays.Arrays):
    def is_array(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def take(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            raise TypeError(f"[linear] needs a NumPy array, got {type(x).__name__}")
        return x

    def tensor(self, x: Any, written: bool) -> _structs.Tensor:
        if not x.dtype.isnative:
            raise ValueError(f"[linear] an array of {x.dtype}, needs the byte order of this machine")
        if x.ndim > _structs.MAX_RANK and x.flags.c_contiguous:
            x = x.reshape(-1, x.shape[-1])  # a view
        if written and not x.flags.writeable:
            raise ValueError("[linear] an output array is read-only")
        return _lib.tensor(x.ctypes.data, _arrays.dtype_code(x.dtype), x.shape, _arrays.strides_of(x))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def call(self, layout: Layout, which: str, x: Any, n: int, threads: int) -> _Call:
        return _Call(layout, which, x, n, threads)


class _Call:
    """The layout's view, workspace and stream of one call."""

    def __init__(self, layout: Layout, which: str, x: Array, n: int, threads: int) -> None:
        self._threads = to_threads("linear", threads)
        self._layout = layout  # its tables stay as long as the call
        self._view = layout.view()
        code = _arrays.dtype_code(x.dtype)
        size = _lib.ask(f"bs_linear_{which}_workspace_size", ctypes.byref(self._view), code, n)
        self._memory = np.empty(size, np.uint8)

    def __enter__(self) -> _arrays.Resources:
        workspace = _structs.Workspace(self._memory.ctypes.data, self._memory.nbytes)
        return ctypes.byref(self._view), workspace, _structs.Stream(None, self._threads)

    def __exit__(self, *_: object) -> None:
        pass


_ARRAYS = _NumPy()
