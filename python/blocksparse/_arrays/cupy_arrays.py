"""CuPy as a library of arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from .._core import library, structs
from ..layout import Layout
from .base import Arrays, Resources, dtype_code, strides_of


class CuPy(Arrays):
    """Arrays of CuPy, which is imported by the first call."""

    kind = "a CuPy array or one with __cuda_array_interface__"

    def __init__(self, op: str) -> None:
        super().__init__(op)
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
            raise TypeError(f"[{self.op}] needs {self.kind}, got {type(x).__name__}")
        return self.cupy.asarray(x)  # a view, in the order of streams that the interface asks for

    def tensor(self, x: Any, written: bool) -> structs.Tensor:
        if x.ndim > structs.MAX_RANK and x.flags.c_contiguous:
            x = x.reshape(-1, x.shape[-1])  # a view
        code, strides = dtype_code(x.dtype, self.op), strides_of(x, self.op)
        return library.tensor(x.data.ptr, code, x.shape, strides, (library.CUDA, x.device.id))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.cupy.empty(shape, dtype)

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def on_device_of(self, x: Any) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = x.device
        return device

    def call(self, layout: Layout, x: Any, workspace_size: Callable[[Any], int], threads: int) -> _Call:
        return _Call(self.cupy, layout, x.device, workspace_size)


class _Call:
    """The card of x made current; the layout's view, workspace and stream of one call there."""

    def __init__(self, cupy: Any, layout: Layout, device: Any, workspace_size: Callable[[Any], int]) -> None:
        self._cupy, self._layout, self._device, self._workspace_size = cupy, layout, device, workspace_size

    def __enter__(self) -> Resources:
        self._device.__enter__()
        try:
            return self._resources()
        except BaseException:
            self._device.__exit__(None, None, None)
            raise

    def _resources(self) -> Resources:
        cupy = self._cupy
        stream = cupy.cuda.get_current_stream()
        self._view = _view(cupy, self._layout, self._device.id, stream)
        size = self._workspace_size(ctypes.byref(self._view))
        self._memory = cupy.empty(size, "uint8")  # freed in the order of the stream
        workspace = structs.Workspace(self._memory.data.ptr, size)
        return ctypes.byref(self._view), workspace, structs.Stream(stream.ptr, 0)

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)


def _view(cupy: Any, layout: Layout, device: int, stream: Any) -> structs.LayoutView:
    """The layout by its tables on the card."""
    index = layout.tables.get(("cupy", device))
    if index is None:
        index = layout.tables[("cupy", device)] = _move_tables(cupy, layout, device, stream)
    out, in_ = layout.sizes[::-1] if layout.transposed else layout.sizes
    view = structs.LayoutView(index.data.ptr, library.CUDA, device, 0, layout.block_size, out, in_, layout.blocks)
    library.call("bs_layout_view_on_device", index.size, ctypes.byref(view))
    view.transposed = int(layout.transposed)
    return view


def _move_tables(cupy: Any, layout: Layout, device: int, stream: Any) -> Any:
    if stream.is_capturing():
        raise RuntimeError(
            f"[linear] the layout's tables are not on card {device} yet, and cannot be copied while a graph is "
            "captured: call the function once before"
        )
    library.call("bs_cuda_prepare", device)
    index = cupy.asarray(layout.index_for_card())
    stream.synchronize()  # other streams will read it
    return index
