"""The linear op on NumPy arrays: float32 and float64, and float16; bfloat16 through `ml_dtypes`.

`x` is [..., features] with contiguous features, or the transpose of a contiguous [features, tokens] array (features
first); results have the order of their input. Everything else is checked and explained by the core.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _lib
from .layout import Layout

Array = npt.NDArray[Any]
_CODES: dict[np.dtype[Any], int] = {}  # of dtypes seen so far


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
    if activation not in _lib.ACTIVATIONS:
        raise ValueError(f"[linear_fprop] activation is {activation!r}, needs one of {', '.join(_lib.ACTIVATIONS)}")
    _check_kinds(layout, x)
    y = _like(x, layout.out_features) if out is None else out
    epilogue = _lib.Epilogue(_pointer(bias), _pointer(residual), _lib.ACTIVATIONS[activation])
    with _Call(layout, "fprop", x, _tokens(x), threads) as (view, workspace, stream):
        arguments = (_pointer(x), _pointer(values), _pointer(gates), ctypes.byref(epilogue), _pointer(y, written=True))
        _lib.call("bs_linear_fprop", view, *arguments, workspace, stream)
    return y


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
    _check_kinds(layout, dy)
    dx = _like(dy, layout.in_features) if out is None else out
    with _Call(layout, "dgrad", dy, _tokens(dy), threads) as (view, workspace, stream):
        arguments = (_pointer(dy), _pointer(values), _pointer(gates), _pointer(dx, written=True))
        _lib.call("bs_linear_dgrad", view, *arguments, workspace, stream)
    return dx


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
    xs = [x] if isinstance(x, np.ndarray) else list(x)
    dys = [dy] if isinstance(dy, np.ndarray) else list(dy)
    _check_kinds(layout, *xs, *dys)
    if len(xs) != len(dys):
        raise ValueError(f"[linear_wgrad] {len(xs)} arrays x and {len(dys)} dy, needs as many of each")
    if out is None:
        if accumulate or not xs:
            raise ValueError("[linear_wgrad] out is None, needs an array to add to, or to tell the dtype")
        out = np.empty(layout.values_shape, xs[0].dtype)
    first = xs[0] if xs else out
    x_tensors = (_lib.Tensor * len(xs))(*[_tensor(a) for a in xs])
    dy_tensors = (_lib.Tensor * len(dys))(*[_tensor(a) for a in dys])
    with _Call(layout, "wgrad", first, sum(_tokens(a) for a in xs), threads) as (view, workspace, stream):
        gradients = (_pointer(out, written=True), _pointer(gates_out, written=True))
        arguments = (len(xs), x_tensors, dy_tensors, _pointer(values), _pointer(gates), int(accumulate), *gradients)
        _lib.call("bs_linear_wgrad", view, *arguments, workspace, stream)
    return out


class _Call:
    """The layout's view, workspace and stream of one call."""

    def __init__(self, layout: Layout, which: str, x: Array, n: int, threads: int) -> None:
        if not 0 <= threads < 1 << 31:
            raise ValueError(f"[linear] threads is {threads}, needs 0 (all) or more")
        self._layout = layout  # its tables stay as long as the call
        self._view = layout.view()
        size = _lib.ask(f"bs_linear_{which}_workspace_size", ctypes.byref(self._view), _dtype(x), n)
        self._memory = np.empty(size, np.uint8)
        self._threads = threads

    def __enter__(self) -> tuple[Any, _lib.Workspace, _lib.Stream]:
        workspace = _lib.Workspace(self._memory.ctypes.data, self._memory.nbytes)
        return ctypes.byref(self._view), workspace, _lib.Stream(None, self._threads)

    def __exit__(self, *_: object) -> None:
        pass


def _tokens(x: Array) -> int:
    return math.prod(x.shape[:-1])


def _dtype(x: Array) -> int:
    code = _CODES.get(x.dtype)
    if code is None:
        code = _lib.DTYPES.get(x.dtype.name)  # which takes NumPy 5 us
        if code is None:
            raise ValueError(f"[linear] an array of {x.dtype}, needs one of {', '.join(_lib.DTYPES)}")
        _CODES[x.dtype] = code
    return code


def _check_kinds(layout: object, *arrays: object) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(f"[linear] layout is a {type(layout).__name__}, needs a blocksparse.Layout")
    for x in arrays:
        _check_kind(x)


def _check_kind(x: object) -> None:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"[linear] needs a NumPy array, got {type(x).__name__}")


def _tensor(x: Array, *, written: bool = False) -> _lib.Tensor:
    _check_kind(x)
    if not x.dtype.isnative:
        raise ValueError(f"[linear] an array of {x.dtype}, needs the byte order of this machine")
    size = x.dtype.itemsize
    if any(stride % size for stride in x.strides):
        raise ValueError(f"[linear] an array of {x.dtype} with strides of {x.strides} bytes, needs whole elements")
    if x.ndim > _lib.MAX_RANK and x.flags.c_contiguous:
        x = x.reshape(-1, x.shape[-1])  # a view
    if written and not x.flags.writeable:
        raise ValueError("[linear] an output array is read-only")
    return _lib.tensor(x.ctypes.data, _dtype(x), x.shape, [stride // size for stride in x.strides])


def _pointer(x: Array | None, *, written: bool = False) -> Any:
    return None if x is None else ctypes.pointer(_tensor(x, written=written))


def _like(x: Array, features: int) -> Array:
    """A new array [..., features] in the order of x: features-first if x is."""
    if x.ndim == 2 and x.strides[0] == x.itemsize and x.strides[1] != x.itemsize and x.shape[0] > 1:
        first: Array = np.empty((features, x.shape[0]), x.dtype).T
        return first
    return np.empty((*x.shape[:-1], features), x.dtype)
