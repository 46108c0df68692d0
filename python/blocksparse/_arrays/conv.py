"""The convolution on arrays: what the functions of NumPy and CuPy share."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from .._core import library, structs
from .._core.arguments import to_flag
from .._core.conv_geometry import check_geometry, conv_output_size
from ..layout import Layout, need_layout
from .base import Arrays, activation_code

Geometry = structs.ConvGeometry


def fprop(
    arrays: Arrays,
    x: Any,
    values: Any,
    layout: Layout,
    geometry: Geometry,
    *,
    activation: str,
    channel_order: Any | None,
    bias: Any | None,
    residual: Any | None,
    gates: Any | None,
    out: Any | None,
    threads: int = 0,
    tf32: bool = False,
) -> Any:
    """y = activation(the convolution of x + bias + residual)."""
    code = activation_code("conv_fprop", activation)
    x, values = _checked(arrays, layout, geometry, x=x, values=values)
    size = conv_output_size(geometry, _sizes(x, geometry))
    order = _order(arrays, layout, channel_order)
    with _call(arrays, "fprop", layout, geometry, x, order, threads) as (view, workspace, stream):
        stream.math = tf32
        y = _like(arrays, x, layout.out_features, size, residual) if out is None else out
        pointer = arrays.pointer
        epilogue = structs.Epilogue(pointer(bias), pointer(residual), code)
        given = (pointer(x), pointer(values), pointer(gates), _address(arrays, order), ctypes.byref(epilogue))
        results = (pointer(y, written=True), workspace, stream)
        library.call("bs_conv_fprop", view, ctypes.byref(geometry), *given, *results)
    return y


def dgrad(
    arrays: Arrays,
    dy: Any,
    values: Any,
    layout: Layout,
    geometry: Geometry,
    size: Sequence[int],
    *,
    channel_order: Any | None,
    gates: Any | None,
    out: Any | None,
    threads: int = 0,
    tf32: bool = False,
) -> Any:
    """The gradient with respect to x, whose sizes were `size`."""
    dy, values = _checked(arrays, layout, geometry, dy=dy, values=values)
    conv_output_size(geometry, size)
    order, pointer = _order(arrays, layout, channel_order), arrays.pointer
    with arrays.on_device_of(dy):
        dx = _like(arrays, dy, layout.in_features, tuple(size)) if out is None else out
    with _call(arrays, "dgrad", layout, geometry, arrays.take(dx), order, threads) as (view, workspace, stream):
        stream.math = tf32
        given = (pointer(dy), pointer(values), pointer(gates), _address(arrays, order))
        results = (pointer(dx, written=True), workspace, stream)
        library.call("bs_conv_dgrad", view, ctypes.byref(geometry), *given, *results)
    return dx


def wgrad(
    arrays: Arrays,
    x: Any,
    dy: Any,
    layout: Layout,
    geometry: Geometry,
    *,
    channel_order: Any | None,
    values: Any | None,
    gates: Any | None,
    out: Any | None,
    gates_out: Any | None,
    accumulate: bool,
    threads: int = 0,
    tf32: bool = False,
) -> Any:
    """The gradient with respect to the filter: S = sum over images and pixels, dW = gate * S."""
    x, dy = _checked(arrays, layout, geometry, x=x, dy=dy)
    adds = to_flag("conv_wgrad", "accumulate", accumulate)
    if out is None and adds:
        raise ValueError("[conv_wgrad] out is None, needs an array to add to")
    blocks, b, _ = layout.values_shape
    order, pointer = _order(arrays, layout, channel_order), arrays.pointer
    with _call(arrays, "wgrad", layout, geometry, x, order, threads) as (view, workspace, stream):
        stream.math = tf32
        taps = math.prod(geometry.kernel[: geometry.rank])
        dw = arrays.empty((blocks, taps, b, b), x.dtype) if out is None else out
        given = (pointer(x), pointer(dy), pointer(values), pointer(gates), _address(arrays, order), adds)
        results = (pointer(dw, written=True), pointer(gates_out, written=True), workspace, stream)
        library.call("bs_conv_wgrad", view, ctypes.byref(geometry), *given, *results)
    return dw


def _checked(arrays: Arrays, layout: Any, geometry: Any, **given: Any) -> list[Any]:
    """The arrays as those of the library."""
    need_layout("conv", layout)
    check_geometry(geometry)
    taken = []
    for name, array in given.items():
        if not arrays.is_array(array):
            raise TypeError(f"[conv] {name} is a {type(array).__name__}, needs {arrays.kind}")
        taken.append(arrays.take(array))
        if name != "values":
            _sizes(taken[-1], geometry)
    return taken


def _sizes(x: Any, geometry: Geometry) -> tuple[int, ...]:
    if x.ndim != geometry.rank + 2:
        raise ValueError(f"[conv] an array of {x.shape}, needs [n, channels] and {geometry.rank} sizes")
    sizes: tuple[int, ...] = x.shape[2:]
    return sizes


def _like(arrays: Arrays, x: Any, channels: int, size: tuple[int, ...], other: Any | None = None) -> Any:
    """A new array in the order of x, or of another where x, of one channel or pixel, fits both."""
    decides = other if other is not None and other.ndim == x.ndim and x.flags.c_contiguous else x
    last = decides.strides[1] == decides.itemsize and not decides.flags.c_contiguous
    if not last:
        return arrays.empty((x.shape[0], channels, *size), x.dtype)
    return arrays.empty((x.shape[0], *size, channels), x.dtype).transpose(0, x.ndim - 1, *range(1, x.ndim - 1))


def _order(arrays: Arrays, layout: Layout, order: Any | None) -> Any | None:
    """Checked, and contiguous; to be kept as long as the call."""
    if order is None:
        return None
    if not arrays.is_array(order):
        raise TypeError(f"[conv] channel_order is a {type(order).__name__}, needs {arrays.kind} of int32")
    order = arrays.take(order)
    if order.dtype.name != "int32" or order.shape != (layout.in_features,):
        raise ValueError(
            f"[conv] channel_order is {order.dtype} of {order.shape}, needs int32 of ({layout.in_features},)"
        )
    return order if order.flags.c_contiguous else order.copy()


def _address(arrays: Arrays, x: Any | None) -> int | None:
    return None if x is None else arrays.address(x)


def _call(
    arrays: Arrays, which: str, layout: Layout, geometry: Geometry, x: Any, order: Any | None, threads: int
) -> Any:
    """`Arrays.call` with the workspace of a convolution with the sizes of x."""
    sized = arrays.tensor(x, False)

    def workspace_size(view: Any) -> int:
        given = (ctypes.byref(geometry), ctypes.byref(sized), _address(arrays, order))
        return int(library.ask(f"bs_conv_{which}_workspace_size", view, *given))

    return arrays.call(layout, x, workspace_size, threads)
