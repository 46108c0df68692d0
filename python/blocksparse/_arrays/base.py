"""`Arrays`: what each library of arrays does its own way."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from .._core import library, structs
from .._core.arguments import shown
from ..layout import Layout

_CODES: dict[np.dtype[Any], int] = {}  # of dtypes seen so far
Resources = tuple[Any, structs.Workspace, structs.Stream]


class Arrays(ABC):
    """One library of arrays; `op` is what messages begin with."""

    kind: str  # a, in messages

    def __init__(self, op: str) -> None:
        self.op = op

    @abstractmethod
    def is_array(self, x: object) -> bool:
        """Whether it is one of this library's."""

    @abstractmethod
    def take(self, x: Any) -> Any:
        """The argument as an array of this library, without a copy.

        Raises:
            TypeError: it is none.
        """

    @abstractmethod
    def tensor(self, x: Any, written: bool) -> structs.Tensor:
        """What the C library takes."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array."""

    @abstractmethod
    def address(self, x: Any) -> int:
        """Of its memory."""

    @abstractmethod
    def on_device_of(self, x: Any) -> AbstractContextManager[Any]:
        """New arrays come to lie there."""

    @abstractmethod
    def call(
        self, layout: Layout, x: Any, workspace_size: Callable[[Any], int], threads: int
    ) -> AbstractContextManager[Resources]:
        """The layout's view, workspace and stream of one call, on the device of x; sizes are told of the view."""

    def pointer(self, x: Any | None, *, written: bool = False) -> Any:
        """To a bs_tensor; None stays None."""
        return None if x is None else ctypes.pointer(self.tensor(self.take(x), written))

    def like(self, x: Any, features: int) -> Any:
        """A new array [..., features] in the order of x: features-first if x is."""
        if x.ndim == 2 and x.strides[0] == x.itemsize and x.strides[1] != x.itemsize and x.shape[0] > 1:
            return self.empty((features, x.shape[0]), x.dtype).T
        return self.empty((*x.shape[:-1], features), x.dtype)


def dtype_code(dtype: np.dtype[Any], op: str = "linear") -> int:
    """bs_dtype.

    Raises:
        ValueError: it has none.
    """
    code = _CODES.get(dtype)
    if code is None:
        code = library.DTYPES.get(dtype.name)  # which takes NumPy 5 us
        if code is None:
            raise ValueError(f"[{op}] an array of {dtype}, needs one of {', '.join(library.DTYPES)}")
        _CODES[dtype] = code
    return code


def strides_of(x: Any, op: str = "linear") -> list[int]:
    """In elements.

    Raises:
        ValueError: they are no whole elements.
    """
    size = x.dtype.itemsize
    if any(stride % size for stride in x.strides):
        raise ValueError(f"[{op}] an array of {x.dtype} with strides of {x.strides} bytes, needs whole elements")
    return [stride // size for stride in x.strides]


def activation_code(op: str, activation: Any) -> int:
    """bs_activation.

    Raises:
        ValueError: there is none of that name.
    """
    code = library.ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if code is None:
        raise ValueError(f"[{op}] activation is {shown(activation)}, needs one of {', '.join(library.ACTIVATIONS)}")
    return code
