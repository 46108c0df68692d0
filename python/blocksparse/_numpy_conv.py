"""The convolution on NumPy arrays; `blocksparse.numpy` exports its functions."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _arrays, _lib, _structs
from ._given import to_flag, to_threads
from .layout import Layout, need_layout

Array = npt.NDArray[Any]
Sizes = int | Sequence[int]
Padding = int | Sequence[int | tuple[int, int]]


def conv_geometry(
    kernel: Sequence[int],
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    transposed: bool = False,
    output_padding: Sizes = 0,
) -> _structs.ConvGeometry:
    """What the C library takes: one number for all axes, or one for each; a padding may be (before, after).

    Raises:
        ValueError: there are more or fewer numbers than sizes of the kernel, or something is no integer.
    """
    sizes_of_kernel = _integers(kernel)
    if sizes_of_kernel is None or not 1 <= len(sizes_of_kernel) <= _structs.MAX_SIZES:
        raise ValueError(f"[conv] kernel is {kernel!r}, needs 1 to {_structs.MAX_SIZES} sizes, integers")
    rank = len(sizes_of_kernel)

    def each(name: str, value: Sizes) -> list[int]:
        one = _integer(value)
        values = _integers(value) if one is None else [one] * rank
        if values is None or len(values) != rank:
            raise ValueError(f"[conv] {name} is {value!r}, needs one number or {rank}, integers")
        return values

    pairs = _paddings(padding, rank)
    before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    sizes = (sizes_of_kernel, each("stride", stride), each("dilation", dilation), before, after)
    fields = [_structs.Sizes(*values) for values in (*sizes, each("output_padding", output_padding))]
    return _structs.ConvGeometry(rank, to_flag("conv", "transposed", transposed), *fields)


def _integer(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _integers(values: Any) -> list[int] | None:
    """None if they are no sequence of integers."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        return None


def _paddings(padding: Any, rank: int) -> list[list[int]]:
    """(before, after) for each size."""
    one = _integer(padding)
    if one is not None:
        return [[one, one]] * rank
    pairs: list[list[int] | None] = []
    for given in padding if isinstance(padding, Sequence | np.ndarray) else ():
        one = _integer(given)
        pairs.append(_integers(given) if one is None else [one, one])
    if len(pairs) != rank or any(pair is None or len(pair) != 2 for pair in pairs):
        raise ValueError(f"[conv] padding is {padding!r}, needs one number or {rank} numbers or pairs (before, after)")
    return [pair for pair in pairs if pair is not None]


def conv_output_size(geometry: _structs.ConvGeometry, size: Sequence[int]) -> tuple[int, ...]:
    """The sizes of y for those of x.

    Raises:
        ValueError: the geometry makes no sense, or does not fit the sizes.
        TypeError: the geometry is none.
    """
    _check_geometry(geometry)
    sizes, rank = _integers(size), geometry.rank
    if sizes is None or len(sizes) != rank:
        raise ValueError(f"[conv_output_size] size is {size!r}, needs {rank} integers, as many as the geometry has")
    output = _structs.Sizes()
    _lib.call("bs_conv_output_size", ctypes.byref(geometry), _structs.Sizes(*sizes), output)
    return tuple(output[:rank])


def conv_fprop(
    x: Array,
    values: Array,
    layout: Layout,
    geometry: _structs.ConvGeometry,
    *,
    channel_order: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str = "none",
    gates: Array | None = None,
    out: Array | None = None,
    threads: int = 0,
) -> Array:
    """y = activation(the convolution of x + bias + residual).

    Args:
        x: [n, layout.in_features, sizes...], contiguous or channels-last.
        values: the filter, [layout.blocks, taps, b, b], of the dtype of x.
        layout: which blocks of the filter there are, over (out channels, in channels).
        geometry: see `conv_geometry`.
        channel_order: [layout.in_features], int32, a permutation: the layout's channel c is channel_order[c] of x.
        bias: [layout.out_features].
        residual: like the result.
        activation: "none", "relu", "gelu" (the exact one) or "silu".
        gates: [layout.blocks], float32 (float64 for float64): a factor for each block; 0 skips it.
        out: where to write the result; a new array otherwise.
        threads: 0 is OpenMP's current maximum.

    Returns:
        [n, layout.out_features, sizes...], of the dtype and order of x, or of the residual's where x fits both.

    Raises:
        ValueError: a shape, dtype, memory format or the geometry is wrong.
        TypeError: an argument is of another kind.
    """
    code = _arrays.activation_code("conv_fprop", activation)
    _check(layout, geometry, x=x, values=values)
    y = _like(x, layout.out_features, conv_output_size(geometry, _sizes(x, geometry)), residual) if out is None else out
    epilogue = _structs.Epilogue(_pointer(bias), _pointer(residual), code)
    call = _Call("fprop", layout, geometry, x, channel_order, threads)
    call(_pointer(x), _pointer(values), _pointer(gates), call.order, ctypes.byref(epilogue), _pointer(y, written=True))
    return y


def conv_dgrad(
    dy: Array,
    values: Array,
    layout: Layout,
    geometry: _structs.ConvGeometry,
    size: Sequence[int],
    *,
    channel_order: Array | None = None,
    gates: Array | None = None,
    out: Array | None = None,
    threads: int = 0,
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
        threads: 0 is OpenMP's current maximum.

    Returns:
        [n, layout.in_features, size...], of the dtype and order of dy.

    Raises:
        ValueError: a shape, dtype, memory format or the geometry is wrong.
        TypeError: an argument is of another kind.
    """
    _check(layout, geometry, dy=dy, values=values)
    conv_output_size(geometry, size)
    dx = _like(dy, layout.in_features, tuple(size)) if out is None else out
    call = _Call("dgrad", layout, geometry, dx, channel_order, threads)
    call(_pointer(dy), _pointer(values), _pointer(gates), call.order, _pointer(dx, written=True))
    return dx


def conv_wgrad(
    x: Array,
    dy: Array,
    layout: Layout,
    geometry: _structs.ConvGeometry,
    *,
    channel_order: Array | None = None,
    values: Array | None = None,
    gates: Array | None = None,
    out: Array | None = None,
    gates_out: Array | None = None,
    accumulate: bool = False,
    threads: int = 0,
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
        threads: 0 is OpenMP's current maximum.

    Returns:
        [layout.blocks, taps, b, b]; a new array has the dtype of x.

    Raises:
        ValueError: a shape, dtype, memory format or the geometry is wrong.
        TypeError: an argument is of another kind.
    """
    _check(layout, geometry, x=x, dy=dy)
    adds = to_flag("conv_wgrad", "accumulate", accumulate)
    if out is None and adds:
        raise ValueError("[conv_wgrad] out is None, needs an array to add to")
    blocks, b, _ = layout.values_shape
    taps = int(np.prod(geometry.kernel[: geometry.rank], dtype=np.int64))
    dw = np.empty((blocks, taps, b, b), x.dtype) if out is None else out
    call = _Call("wgrad", layout, geometry, x, channel_order, threads)
    given = (_pointer(x), _pointer(dy), _pointer(values), _pointer(gates), call.order, adds)
    call(*given, _pointer(dw, written=True), _pointer(gates_out, written=True))
    return dw


def _check_geometry(geometry: Any) -> None:
    if not isinstance(geometry, _structs.ConvGeometry):
        raise TypeError(f"[conv] geometry is a {type(geometry).__name__}, needs what conv_geometry makes")


def _check(layout: Any, geometry: Any, **arrays: Any) -> None:
    need_layout("conv", layout)
    _check_geometry(geometry)
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"[conv] {name} is a {type(array).__name__}, needs a NumPy array")
        if name != "values":
            _sizes(array, geometry)


def _sizes(x: Array, geometry: _structs.ConvGeometry) -> tuple[int, ...]:
    if x.ndim != geometry.rank + 2:
        raise ValueError(f"[conv] an array of {x.shape}, needs [n, channels] and {geometry.rank} sizes")
    return x.shape[2:]


def _like(x: Array, channels: int, size: tuple[int, ...], other: Array | None = None) -> Array:
    """A new array in the order of x, or of another where x, of one channel or pixel, fits both."""
    decides = other if other is not None and other.ndim == x.ndim and x.flags.c_contiguous else x
    last = decides.strides[1] == decides.itemsize and not decides.flags.c_contiguous
    if not last:
        return np.empty((x.shape[0], channels, *size), x.dtype)
    return np.moveaxis(np.empty((x.shape[0], *size, channels), x.dtype), -1, 1)


def _tensor(x: Array, written: bool) -> _structs.Tensor:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"[conv] needs a NumPy array, got {type(x).__name__}")
    if not x.dtype.isnative:
        raise ValueError(f"[conv] an array of {x.dtype}, needs the byte order of this machine")
    if written and not x.flags.writeable:
        raise ValueError("[conv] an output array is read-only")
    return _lib.tensor(x.ctypes.data, _arrays.dtype_code(x.dtype), x.shape, _arrays.strides_of(x))


def _pointer(x: Array | None, *, written: bool = False) -> Any:
    return None if x is None else ctypes.pointer(_tensor(x, written))


class _Call:
    """One call: its layout, geometry, order of channels, workspace and stream."""

    def __init__(
        self, which: str, layout: Layout, geometry: _structs.ConvGeometry, x: Array, order: Array | None, threads: int
    ) -> None:
        self._threads = to_threads("conv", threads)
        if order is not None and not isinstance(order, np.ndarray):
            raise TypeError(f"[conv] channel_order is a {type(order).__name__}, needs a NumPy array of int32")
        if order is not None and (order.dtype != np.int32 or order.shape != (layout.in_features,)):
            raise ValueError(
                f"[conv] channel_order is {order.dtype} of {order.shape}, needs int32 of ({layout.in_features},)"
            )
        self._order = None if order is None else np.ascontiguousarray(order)
        self.order = None if self._order is None else self._order.ctypes.data
        self._which, self._layout, self._geometry = which, layout, geometry
        self._x = _tensor(x, False)

    def __call__(self, *arguments: Any) -> None:
        view = self._layout.view()
        sizes = (ctypes.byref(view), ctypes.byref(self._geometry))
        size = _lib.ask(f"bs_conv_{self._which}_workspace_size", *sizes, ctypes.byref(self._x), self.order)
        memory = np.empty(size, np.uint8)
        workspace = _structs.Workspace(memory.ctypes.data, memory.nbytes)
        _lib.call(f"bs_conv_{self._which}", *sizes, *arguments, workspace, _structs.Stream(None, self._threads))
