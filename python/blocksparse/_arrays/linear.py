"""The linear op on arrays: what the functions of NumPy and CuPy share."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

from .._core import library, structs
from .._core.arguments import to_flag, to_list
from ..layout import Layout, need_layout
from .base import Arrays, activation_code, dtype_code


def tokens(x: Any) -> int:
    """All but the last dimension."""
    return math.prod(x.shape[:-1])


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
