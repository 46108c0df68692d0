"""The linear op on CuPy arrays: float32, float64 and float16, and bfloat16 where CuPy has it.

The functions of `blocksparse.numpy`, on the card where `x` lies and on CuPy's current stream: work is queued, and
results are CuPy arrays. Other arrays that have `__cuda_array_interface__` are taken as well, without a copy. The
layout's tables are copied to a card by the first call there, so call once on a stream before a graph is captured on
it. CuPy is imported by the first call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from . import _arrays, _lib, _structs
from .layout import Layout

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
        activation: "none", "relu", "gelu" (the exact one) or "silu".
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
    result: Array = _arrays.fprop(_ARRAYS, x, values, layout, activation=activation, threads=0, **operands)
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
    result: Array = _arrays.dgrad(_ARRAYS, dy, values, layout, gates=gates, out=out, threads=0, tf32=allow_tf32)
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
    result: Array = _arrays.wgrad(_ARRAYS, x, dy, layout, accumulate=accumulate, threads=0, tf32=allow_tf32, **operands)
    return result


class _CuPy(_arrays.Arrays):
    def __init__(self) -> None:
        self._module: ModuleType | None = None

    @property
    def cupy(self) -> Any:
        if self._module is None:
            import cupy

            self._module = cupy
        return self._module

    def is_array(self, x: object) -> bool:
        return hasattr(x, "__cuda_array_interface__")

    def take(self, x: Any) -> Any:
        if isinstance(x, self.cupy.ndarray):
            return x
        if not self.is_array(x):
            raise TypeError(f"[linear] needs a CuPy array or one with __cuda_array_interface__, got {type(x).__name__}")
        return self.cupy.asarray(x)  # a view, in the order of streams that the interface asks for

    def tensor(self, x: Any, written: bool) -> _structs.Tensor:
        if x.ndim > _structs.MAX_RANK and x.flags.c_contiguous:
            x = x.reshape(-1, x.shape[-1])  # a view
        code, strides = _arrays.dtype_code(x.dtype), _arrays.strides_of(x)
        return _lib.tensor(x.data.ptr, code, x.shape, strides, (_lib.CUDA, x.device.id))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.cupy.empty(shape, dtype)

    def call(self, layout: Layout, which: str, x: Any, n: int, threads: int) -> _Call:
        return _Call(self.cupy, layout, which, x, n)


class _Call:
    """The card of x made current; the layout's view, workspace and stream of one call there."""

    def __init__(self, cupy: Any, layout: Layout, which: str, x: Any, n: int) -> None:
        self._cupy, self._layout, self._which, self._n = cupy, layout, which, n
        self._code, self._device = _arrays.dtype_code(x.dtype), x.device

    def __enter__(self) -> _arrays.Resources:
        self._device.__enter__()
        try:
            return self._resources()
        except BaseException:
            self._device.__exit__(None, None, None)
            raise

    def _resources(self) -> _arrays.Resources:
        cupy = self._cupy
        stream = cupy.cuda.get_current_stream()
        self._view = _view(cupy, self._layout, self._device.id, stream)
        size = _lib.ask(f"bs_linear_{self._which}_workspace_size", ctypes.byref(self._view), self._code, self._n)
        self._memory = cupy.empty(size, "uint8")  # freed in the order of the stream
        workspace = _structs.Workspace(self._memory.data.ptr, size)
        return ctypes.byref(self._view), workspace, _structs.Stream(stream.ptr, 0)

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)


def _view(cupy: Any, layout: Layout, device: int, stream: Any) -> _structs.LayoutView:
    """The layout by its tables on the card."""
    index = layout._tables.get(("cupy", device))
    if index is None:
        index = layout._tables[("cupy", device)] = _move_tables(cupy, layout, device, stream)
    out, in_ = layout.sizes[::-1] if layout.transposed else layout.sizes
    view = _structs.LayoutView(index.data.ptr, _lib.CUDA, device, 0, layout.block_size, out, in_, layout.blocks)
    _lib.call("bs_layout_view_on_device", index.size, ctypes.byref(view))
    view.transposed = int(layout.transposed)
    return view


def _move_tables(cupy: Any, layout: Layout, device: int, stream: Any) -> Any:
    if stream.is_capturing():
        raise RuntimeError(
            f"[linear] the layout's tables are not on card {device} yet, and cannot be copied while a graph is "
            "captured: call the function once before"
        )
    _lib.call("bs_cuda_prepare", device)
    index = cupy.asarray(layout.index_memory())
    stream.synchronize()  # other streams will read it
    return index


_ARRAYS = _CuPy()
