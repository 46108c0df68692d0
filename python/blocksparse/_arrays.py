"""Arrays, and the linear op on them: what NumPy and CuPy share. An `Arrays` is what each does its own way."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ._core import library, structs
from ._core.arguments import shown, to_flag, to_list
from .layout import Layout, need_layout

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


def tokens(x: Any) -> int:
    """All but the last dimension."""
    return math.prod(x.shape[:-1])


def activation_code(op: str, activation: Any) -> int:
    """bs_activation.

    Raises:
        ValueError: there is none of that name.
    """
    code = library.ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if code is None:
        raise ValueError(f"[{op}] activation is {shown(activation)}, needs one of {', '.join(library.ACTIVATIONS)}")
    return code


def workspace_size(which: str, x: Any, n: int) -> Callable[[Any], int]:
    """That of the linear op for n tokens."""
    code = dtype_code(x.dtype)
    return lambda view: library.ask(f"bs_linear_{which}_workspace_size", view, code, n)


def fprop(
    arrays: Arrays,
    x: Any,
    values: Any,
    layout: Layout,
    *,
    activation: str,
    threads: int,
    bias: Any | None,
    residual: Any | None,
    gates: Any | None,
    out: Any | None,
    tf32: bool = False,
) -> Any:
    """y = activation(x W^T + bias + residual)."""
    code = activation_code("linear_fprop", activation)
    need_layout("linear_fprop", layout)
    x, pointer = arrays.take(x), arrays.pointer
    with arrays.call(layout, x, workspace_size("fprop", x, tokens(x)), threads) as (view, workspace, stream):
        stream.math = tf32
        y = arrays.like(x, layout.out_features) if out is None else out
        epilogue = structs.Epilogue(pointer(bias), pointer(residual), code)
        arguments = (pointer(x), pointer(values), pointer(gates), ctypes.byref(epilogue), pointer(y, written=True))
        library.call("bs_linear_fprop", view, *arguments, workspace, stream)
    return y


def dgrad(
    arrays: Arrays,
    dy: Any,
    values: Any,
    layout: Layout,
    *,
    gates: Any | None,
    out: Any | None,
    threads: int,
    tf32: bool = False,
) -> Any:
    """dx = dy W."""
    need_layout("linear_dgrad", layout)
    dy, pointer = arrays.take(dy), arrays.pointer
    with arrays.call(layout, dy, workspace_size("dgrad", dy, tokens(dy)), threads) as (view, workspace, stream):
        stream.math = tf32
        dx = arrays.like(dy, layout.in_features) if out is None else out
        arguments = (pointer(dy), pointer(values), pointer(gates), pointer(dx, written=True))
        library.call("bs_linear_dgrad", view, *arguments, workspace, stream)
    return dx


def wgrad(
    arrays: Arrays,
    x: Any | Sequence[Any],
    dy: Any | Sequence[Any],
    layout: Layout,
    *,
    accumulate: bool,
    threads: int,
    values: Any | None,
    gates: Any | None,
    out: Any | None,
    gates_out: Any | None,
    tf32: bool = False,
) -> Any:
    """dW of the blocks of the layout, summed over all (x, dy) given."""
    need_layout("linear_wgrad", layout)
    adds = to_flag("linear_wgrad", "accumulate", accumulate)

    def taken(name: str, given: Any) -> list[Any]:
        listed = (
            [given] if arrays.is_array(given) else to_list("linear_wgrad", name, given, "an array or a list of them")
        )
        return [arrays.take(a) for a in listed]

    xs, dys = taken("x", x), taken("dy", dy)
    if len(xs) != len(dys):
        raise ValueError(f"[linear_wgrad] {len(xs)} arrays x and {len(dys)} dy, needs as many of each")
    if out is None and (adds or not xs):
        raise ValueError("[linear_wgrad] out is None, needs an array to add to, or to tell the dtype")
    first = xs[0] if xs else arrays.take(out)
    x_tensors = (structs.Tensor * len(xs))(*[arrays.tensor(a, False) for a in xs])
    dy_tensors = (structs.Tensor * len(dys))(*[arrays.tensor(a, False) for a in dys])
    size = workspace_size("wgrad", first, sum(map(tokens, xs)))
    with arrays.call(layout, first, size, threads) as (view, workspace, stream):
        stream.math = tf32
        dw = arrays.empty(layout.values_shape, first.dtype) if out is None else out
        gradients = (arrays.pointer(dw, written=True), arrays.pointer(gates_out, written=True))
        given = (arrays.pointer(values), arrays.pointer(gates))
        arguments = (len(xs), x_tensors, dy_tensors, *given, adds, *gradients)
        library.call("bs_linear_wgrad", view, *arguments, workspace, stream)
    return dw
