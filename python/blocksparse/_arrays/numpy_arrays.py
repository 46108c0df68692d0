"""NumPy as a library of arrays."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from .._core import library, structs
from .._core.arguments import to_threads
from ..layout import Layout
from .base import Arrays, Resources, dtype_code, strides_of

_STRIDED = re.compile(r"\] (?P<name>x|w|dy|bias|residual|gates)\b.* has strides ")  # inputs alone


class NumPy(Arrays):
    """Arrays of NumPy."""

    kind = "a NumPy array"

    def is_array(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def take(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            raise TypeError(f"[{self.op}] needs a NumPy array, got {type(x).__name__}")
        return x

    def tensor(self, x: Any, written: bool) -> structs.Tensor:
        if not x.dtype.isnative:
            raise ValueError(f"[{self.op}] an array of {x.dtype}, needs the byte order of this machine")
        if x.ndim > structs.MAX_RANK and x.flags.c_contiguous:
            x = x.reshape(-1, x.shape[-1])  # a view
        if written and not x.flags.writeable:
            raise ValueError(f"[{self.op}] an output array is read-only")
        code, strides = dtype_code(x.dtype, self.op), strides_of(x, self.op)
        return library.tensor(x.ctypes.data, code, x.shape, strides)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def address(self, x: Any) -> int:
        return int(x.ctypes.data)

    def on_device_of(self, x: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def call(self, layout: Layout, x: Any, workspace_size: Callable[[Any], int], threads: int) -> _Call:
        return _Call(layout, workspace_size, to_threads(self.op, threads))


class _Call:
    """The layout's view, workspace and stream of one call."""

    def __init__(self, layout: Layout, workspace_size: Callable[[Any], int], threads: int) -> None:
        self._threads = threads
        self._layout = layout  # its tables stay as long as the call
        self._view = layout.view()
        self._memory = np.empty(workspace_size(ctypes.byref(self._view)), np.uint8)

    def __enter__(self) -> Resources:
        workspace = structs.Workspace(self._memory.ctypes.data, self._memory.nbytes)
        return ctypes.byref(self._view), workspace, structs.Stream(None, self._threads)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Says how to mend what the core cannot read: views that run backwards, or over elements between."""
        if isinstance(error, ValueError) and (strided := _STRIDED.search(str(error))):
            raise ValueError(f"{error}: np.ascontiguousarray({strided['name']}) is taken") from None
