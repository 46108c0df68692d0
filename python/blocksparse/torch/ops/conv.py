"""The convolution as PyTorch sees it.

    conv_fprop(x, values, index, geometry, ...) -> y           y = f(conv(x, W) + bias + residual), with gates
    conv_dgrad(dy, values, index, geometry, size, ...) -> dx   the gradient of x, whose sizes are `size`
    conv_wgrad(x, dy, index, geometry, ...) -> (dw, dgates)

`geometry` is whether the convolution is transposed, then kernel, stride, dilation, padding before, padding after and
output padding, each with a number for every size of an image. `order` is the order of the channels of x, int32; on a
card what is in it is not checked: see conv.h.
`channels_last` says how the result lies; all activations of a call lie alike.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core import library, structs
from ..._core.geometry import fields_of, output_size, to_core
from .calls import check_devices, pointer_to, scratch, stream_of, sum_dtype, view_of
from .registry import OPS, register

OPS.define(
    "conv_fprop(Tensor x, Tensor values, Tensor index, int[] geometry, int out_channels, bool channels_last, "
    "bool transposed=False, Tensor? bias=None, Tensor? residual=None, Tensor? gates=None, Tensor? order=None, "
    "int activation=0, bool tf32=False) -> Tensor"
)
OPS.define(
    "conv_dgrad(Tensor dy, Tensor values, Tensor index, int[] geometry, int in_channels, SymInt[] size, "
    "bool channels_last, bool transposed=False, Tensor? gates=None, Tensor? order=None, bool tf32=False) -> Tensor"
)
OPS.define(
    "conv_wgrad(Tensor x, Tensor dy, Tensor index, int[] geometry, int blocks, int block_size, "
    "bool transposed=False, bool wide=False, Tensor? values=None, Tensor? gates=None, Tensor? order=None, "
    "bool gate_gradient=False, bool tf32=False) -> (Tensor, Tensor)"
)

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Whether x [n, channels, size...] lies as [n, size..., channels] would, as in torch.channels_last."""
    if x.stride(1) != 1 or x.stride(-1) < x.size(1):
        return False
    memory_format = _CHANNELS_LAST.get(x.dim())
    if memory_format is None:
        return x.transpose(1, 2).is_contiguous()
    return x.is_contiguous(memory_format=memory_format)


def to_order(x: Tensor, channels_last: bool) -> Tensor:
    """x itself if it lies so, else a copy that does."""
    if not channels_last:
        return x.contiguous()
    return x if is_channels_last(x) else x.movedim(1, -1).contiguous().movedim(-1, 1)


def wants_channels_last(x: Tensor) -> bool:
    """Whether contiguous images are worth a copy to channels-last and back.

    The fast kernels for cards take 16-bit images that lie so; others are done by plain ones, 10 to 20 times as slow.
    Under torch.func images stay as they are: vmap knows PyTorch's default order alone.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    return x.is_cuda and x.element_size() == 2 and math.prod(x.shape[2:]) > 1


# ---- What the outputs look like ------------------------------------------------------------------------------------


def _empty(x: Tensor, channels: int, size: Sequence[int], channels_last: bool) -> Tensor:
    if x.dim() == 0:
        raise ValueError("[conv] images are [], needs [n, channels, size...]")
    if channels < 0:
        raise ValueError(f"[conv] {channels} channels, needs 0 or more")
    shape = (x.size(0), channels, *size)
    if not channels_last:
        return x.new_empty(shape)
    strides, step = [1], channels
    for length in reversed(size):
        strides.insert(0, step)
        step = step * length
    return x.new_empty_strided(shape, (step, strides.pop(), *strides))


@torch.library.register_fake("blocksparse::conv_fprop", lib=OPS)
def _fprop_fake(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    geometry: Sequence[int],
    out_channels: int,
    channels_last: bool,
    transposed: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gates: Tensor | None = None,
    order: Tensor | None = None,
    activation: int = 0,
    tf32: bool = False,
) -> Tensor:
    check_devices(x, values, index, bias, residual, gates, order, op="conv")
    return _empty(x, out_channels, output_size(geometry, x.shape[2:]), channels_last)


@torch.library.register_fake("blocksparse::conv_dgrad", lib=OPS)
def _dgrad_fake(
    dy: Tensor,
    values: Tensor,
    index: Tensor,
    geometry: Sequence[int],
    in_channels: int,
    size: Sequence[int],
    channels_last: bool,
    transposed: bool = False,
    gates: Tensor | None = None,
    order: Tensor | None = None,
    tf32: bool = False,
) -> Tensor:
    check_devices(dy, values, index, gates, order, op="conv")
    return _empty(dy, in_channels, size, channels_last)


@torch.library.register_fake("blocksparse::conv_wgrad", lib=OPS)
def _wgrad_fake(
    x: Tensor,
    dy: Tensor,
    index: Tensor,
    geometry: Sequence[int],
    blocks: int,
    block_size: int,
    transposed: bool = False,
    wide: bool = False,
    values: Tensor | None = None,
    gates: Tensor | None = None,
    order: Tensor | None = None,
    gate_gradient: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    check_devices(x, dy, index, values, gates, order, op="conv")
    sums, taps = sum_dtype(x.dtype), math.prod(fields_of(geometry)[0])
    dw = x.new_empty(blocks, taps, block_size, block_size, dtype=sums if wide else x.dtype)
    return dw, x.new_empty(blocks if gate_gradient else 0, dtype=sums)


# ---- Kernels over ctypes -------------------------------------------------------------------------------------------


def _view(index: Tensor, transposed: bool, values: tuple[int, int], y: Tensor, x: Tensor) -> structs.LayoutView:
    if x.dim() < 2 or y.dim() < 2:
        raise ValueError(f"[conv] x is {list(x.shape)}, y {list(y.shape)}, needs [n, channels, size...]")
    return view_of(index, transposed, *values, y.size(1), x.size(1), "conv")


def _blocks(values: Tensor) -> tuple[int, int]:
    if values.dim() != 4:
        raise ValueError(f"[conv] values are {list(values.shape)}, needs [blocks, taps, b, b]")
    return values.size(0), values.size(2)


def _pointer(x: Tensor | None) -> Any:
    return pointer_to(x, "conv")


def _order_pointer(order: Tensor | None, channels: int) -> int | None:
    if order is None:
        return None
    if order.dtype != torch.int32 or order.shape != (channels,) or not order.is_contiguous():
        raise ValueError(f"[conv] channel_order is {order.dtype} {list(order.shape)}, needs int32 [{channels}]")
    return order.data_ptr()


def _workspace(
    which: str, view: structs.LayoutView, geometry: structs.ConvGeometry, x: Tensor, described: Any, order: int | None
) -> tuple[structs.Workspace, Tensor]:
    size = library.ask(f"bs_conv_{which}_workspace_size", ctypes.byref(view), ctypes.byref(geometry), described, order)
    return scratch(size, x)


def _fprop(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    geometry: Sequence[int],
    out_channels: int,
    channels_last: bool,
    transposed: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gates: Tensor | None = None,
    order: Tensor | None = None,
    activation: int = 0,
    tf32: bool = False,
) -> Tensor:
    check_devices(x, values, index, bias, residual, gates, order, op="conv")
    made, sizes = to_core(tuple(geometry), tuple(x.shape[2:]))
    y = _empty(x, out_channels, sizes, channels_last)
    view = _view(index, transposed, _blocks(values), y, x)
    x_pointer, order_pointer = _pointer(x), _order_pointer(order, x.size(1))
    workspace, _memory = _workspace("fprop", view, made, x, x_pointer, order_pointer)
    epilogue = structs.Epilogue(_pointer(bias), _pointer(residual), activation)
    inputs = (x_pointer, _pointer(values), _pointer(gates), order_pointer)
    outputs = (ctypes.byref(epilogue), _pointer(y), workspace, stream_of(x, tf32))
    library.call("bs_conv_fprop", ctypes.byref(view), ctypes.byref(made), *inputs, *outputs)
    return y


def _dgrad(
    dy: Tensor,
    values: Tensor,
    index: Tensor,
    geometry: Sequence[int],
    in_channels: int,
    size: Sequence[int],
    channels_last: bool,
    transposed: bool = False,
    gates: Tensor | None = None,
    order: Tensor | None = None,
    tf32: bool = False,
) -> Tensor:
    check_devices(dy, values, index, gates, order, op="conv")
    made, _ = to_core(tuple(geometry), tuple(size))
    dx = _empty(dy, in_channels, size, channels_last)
    view = _view(index, transposed, _blocks(values), dy, dx)
    dx_pointer, order_pointer = _pointer(dx), _order_pointer(order, in_channels)
    workspace, _memory = _workspace("dgrad", view, made, dx, dx_pointer, order_pointer)
    inputs = (_pointer(dy), _pointer(values), _pointer(gates), order_pointer)
    call = (ctypes.byref(view), ctypes.byref(made), *inputs, dx_pointer, workspace, stream_of(dy, tf32))
    library.call("bs_conv_dgrad", *call)
    return dx


def _wgrad(
    x: Tensor,
    dy: Tensor,
    index: Tensor,
    geometry: Sequence[int],
    blocks: int,
    block_size: int,
    transposed: bool = False,
    wide: bool = False,
    values: Tensor | None = None,
    gates: Tensor | None = None,
    order: Tensor | None = None,
    gate_gradient: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    check_devices(x, dy, index, values, gates, order, op="conv")
    made, _ = to_core(tuple(geometry), tuple(x.shape[2:]))
    view = _view(index, transposed, (blocks, block_size), dy, x)
    if (blocks, block_size) != (view.blocks, view.block_size):  # dw is shaped by them, and could be too large to say so
        raise ValueError(f"[conv] dw has {blocks} blocks of {block_size}, needs {view.blocks} of {view.block_size}")
    more: Any = (blocks, block_size, transposed, wide, values, gates, order, gate_gradient, tf32)
    dw, dgates = _wgrad_fake(x, dy, index, geometry, *more)
    x_pointer, order_pointer = _pointer(x), _order_pointer(order, x.size(1))
    workspace, _memory = _workspace("wgrad", view, made, x, x_pointer, order_pointer)
    inputs = (x_pointer, _pointer(dy), _pointer(values), _pointer(gates))
    gradients = (_pointer(dw), _pointer(dgates) if gate_gradient else None)
    call = (ctypes.byref(view), ctypes.byref(made), *inputs, order_pointer, 0, *gradients)
    library.call("bs_conv_wgrad", *call, workspace, stream_of(x, tf32))
    return dw, dgates


KERNELS, CUDA_KERNELS = register("conv", {"conv_fprop": _fprop, "conv_dgrad": _dgrad, "conv_wgrad": _wgrad})

fprop = torch.ops.blocksparse.conv_fprop.default
dgrad = torch.ops.blocksparse.conv_dgrad.default
wgrad = torch.ops.blocksparse.conv_wgrad.default

# ---- tf32 ----------------------------------------------------------------------------------------------------------

_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


@torch.compiler.assume_constant_result  # compiled programs keep what was set when they were traced
def _tf32_is_allowed() -> bool:
    return bool(torch.backends.cudnn.allow_tf32 if _precision is None else _precision("cuda", "conv") == "tf32")


def allows_tf32(x: Tensor) -> bool:
    """Whether PyTorch's own convolutions of such a tensor may be computed in tf32: torch.backends.cudnn."""
    return x.is_cuda and x.dtype == torch.float32 and _tf32_is_allowed()
