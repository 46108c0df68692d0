"""Convolutions with gradients of any order: dense in space, block-sparse over channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core import library
from ..._core.geometry import Padding, Sizes, make_geometry
from ...layout import Layout, need_layout
from ..arguments import need_activation, need_same_dtype, need_strided, need_tensor, need_tensors
from ..autograd import traced
from ..autograd.conv import Product
from ..autograd.transforms import apply, has_tangent, is_wrapped, needs_gradient, refuse_compiled_transforms
from ..ops import conv as ops
from ..ops.calls import contiguous_or_none
from ..tables import index_of
from .epilogue import ACTIVATE, finish


def conv1d(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    channel_order: Tensor | Sequence[int] | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = "none",
) -> Tensor:
    """`conv2d` of x [n, channels, width]."""
    geometry = make_geometry(1, kernel_size, stride, padding, dilation)
    return _conv(x, values, layout, geometry, bias, channel_order, gates, residual, activation)


def conv2d(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    channel_order: Tensor | Sequence[int] | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = "none",
) -> Tensor:
    """activation(conv(x, W) + bias + residual), where the filter W [out, in, height, width] has the blocks `values`.

    Differentiable any number of times, forward, backward and by `torch.func`; knows autocast, `torch.compile` and CUDA
    graphs. float32 on CUDA may take tf32 if `torch.backends.cudnn` allowed it for convolutions at the time of this
    call.

    Args:
        x: [n, layout.in_features, height, width], or without n. Channels-last x is answered channels-last (the fast
            way), contiguous x contiguous; anything else is copied to channels-last first.
        values: [layout.blocks, taps, b, b]: the taps of the kernel, the last size fastest, each [out, in]. What is not
            contiguous is copied at every call, as are bias and gates.
        layout: which blocks of channels (out, in) are connected.
        bias: [layout.out_features].
        kernel_size: one number, or one for each size.
        stride: as kernel_size.
        padding: for each size a number, a pair (before, after), "same" (as many pixels as x has; stride 1), "causal"
            (as "same", but all of it before) or "valid" (none). One for all sizes, or a sequence of them.
        dilation: as kernel_size.
        channel_order: [layout.in_features], a permutation: channel c of the layout's inputs is channel
            channel_order[c] of x. An int32 tensor on the device of x is taken as it is; other integers, lists and
            arrays are converted on every call, which a CUDA graph cannot capture if they come from the CPU. What comes
            from the CPU is checked; of an order on a GPU an entry that is no channel reads zeros and writes nothing.
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        residual: like the result.
        activation: "none" (or None), "relu", "gelu" (the exact one), "gelu_tanh" or "silu". Computed with the
            convolution where no gradient is wanted, after it otherwise.

    Returns:
        [n, layout.out_features, height', width'], of the dtype of x; under autocast, of autocast's.

    Raises:
        ValueError: a shape, a dtype, an order from the CPU or the geometry is wrong.
    """
    geometry = make_geometry(2, kernel_size, stride, padding, dilation)
    return _conv(x, values, layout, geometry, bias, channel_order, gates, residual, activation)


def conv3d(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    channel_order: Tensor | Sequence[int] | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = "none",
) -> Tensor:
    """`conv2d` of x [n, channels, depth, height, width]."""
    geometry = make_geometry(3, kernel_size, stride, padding, dilation)
    return _conv(x, values, layout, geometry, bias, channel_order, gates, residual, activation)


def conv_transpose1d(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    channel_order: Tensor | Sequence[int] | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = "none",
) -> Tensor:
    """`conv_transpose2d` of x [n, channels, width]."""
    geometry = make_geometry(1, kernel_size, stride, padding, dilation, output_padding, transposed=True)
    return _conv(x, values, layout, geometry, bias, channel_order, gates, residual, activation)


def conv_transpose2d(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    channel_order: Tensor | Sequence[int] | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """The transposed convolution (`torch.nn.functional.conv_transpose2d`); all else as for `conv2d`.

    The blocks are [out, in] here, too: values [layout.blocks, taps, b, b] of a layout over (out, in).

    Args:
        x: as for `conv2d`.
        values: as for `conv2d`.
        layout: as for `conv2d`.
        bias: as for `conv2d`.
        kernel_size: as for `conv2d`.
        stride: as for `conv2d`.
        padding: pixels taken off the result: one number or a pair (before, after) for each size.
        output_padding: pixels added after the result, less than stride or dilation.
        dilation: as for `conv2d`.
        channel_order: as for `conv2d`.
        gates: as for `conv2d`.
        residual: as for `conv2d`.
        activation: as for `conv2d`.
    """
    geometry = make_geometry(2, kernel_size, stride, padding, dilation, output_padding, transposed=True)
    return _conv(x, values, layout, geometry, bias, channel_order, gates, residual, activation)


def conv_transpose3d(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    channel_order: Tensor | Sequence[int] | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = "none",
) -> Tensor:
    """`conv_transpose2d` of x [n, channels, depth, height, width]."""
    geometry = make_geometry(3, kernel_size, stride, padding, dilation, output_padding, transposed=True)
    return _conv(x, values, layout, geometry, bias, channel_order, gates, residual, activation)


# ---- The order of channels -----------------------------------------------------------------------------------------


def as_order(given: Any) -> Tensor:
    """An order of channels as a tensor: int32 as it is, other integers as int64.

    Raises:
        ValueError: these are no integers.
    """
    try:
        order = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"[conv] channel_order is a {type(given).__name__}, needs integers") from None
    need_strided("conv", channel_order=order)
    if order.dtype == torch.int32:
        return order
    if order.dtype.is_floating_point or order.dtype.is_complex or order.dtype == torch.bool:
        raise ValueError(f"[conv] channel_order is {order.dtype}, needs integers")
    return order.long()


def _check_on_host(order: Tensor, channels: int) -> None:
    """Whether an order is a permutation, as the core says it of those that it can see.

    Raises:
        ValueError: it holds something else, or a channel twice.
    """
    if order.shape != (channels,) or torch.compiler.is_compiling() or type(order) is not Tensor or is_wrapped(order):
        return
    with torch._C._DisableFuncTorch():
        outside = ((order < 0) | (order >= channels)).nonzero().flatten().tolist()
        if outside:
            i = outside[0]
            raise ValueError(f"[conv] channel_order[{i}] is {int(order[i])}, needs 0 to {channels - 1}")
        twice = (order.bincount(minlength=channels) > 1).nonzero().flatten().tolist()
        if twice:
            raise ValueError(f"[conv] channel_order holds channel {twice[0]} twice")


# ---- The call ------------------------------------------------------------------------------------------------------


def _conv(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    geometry: tuple[int, ...],
    bias: Tensor | None,
    channel_order: Tensor | Sequence[int] | None,
    gates: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
) -> Tensor:
    need_tensor("conv", "x", x)
    need_tensor("conv", "values", values)
    need_tensors("conv", bias=bias, gates=gates, residual=residual)
    activation = need_activation("conv", activation)
    need_layout("conv", layout)
    index = index_of(layout, x.device)
    order = None if channel_order is None else as_order(channel_order)
    if order is not None:
        if order.is_meta and not x.is_meta:
            raise ValueError(f"[conv] channel_order is on meta, x on {x.device}: needs to have values")
        if order.device.type == "cpu" and (order.dtype != torch.int32 or x.device.type != "cpu"):
            _check_on_host(order, layout.in_features)  # int32 beside x is checked by the core
        if order.dtype != torch.int32:
            order = order.clamp(-1, layout.in_features)  # what is out of range stays so when narrowed
        order = order.to(x.device, torch.int32).contiguous()
    call = (geometry, layout.sizes, layout.transposed, bias, order, gates, residual, activation)
    return apply_conv(x, values, index, *call)


def apply_conv(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    geometry: tuple[int, ...],
    sizes: tuple[int, int],
    transposed: bool,
    bias: Tensor | None = None,
    order: Tensor | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """A convolution with the layout as its tables and sizes (out_features, in_features)."""
    rank = len(geometry) // 6
    need_strided("conv", x=x, values=values, bias=bias, gates=gates, residual=residual)
    if x.dim() == rank + 1:
        residual = None if residual is None else residual.unsqueeze(0)
        call = (geometry, sizes, transposed, bias, order, gates, residual, activation)
        return apply_conv(x.unsqueeze(0), values, index, *call).squeeze(0)
    if x.dim() != rank + 2 or x.size(1) != sizes[1]:
        names = ", ".join(("depth", "height", "width")[-rank:])
        raise ValueError(f"[conv] x is {list(x.shape)}, needs [n, {sizes[1]}, {names}]")
    if activation not in ACTIVATE:
        raise ValueError(f"[conv] activation is {activation!r}, needs one of {', '.join(ACTIVATE)}")
    dtype, kind = x.dtype, "cuda" if x.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        residual = None if residual is None else residual.to(dtype)
    elif values.dtype != dtype:
        need_same_dtype("conv", x, values)
    # Of values, parametrizations follow .to(memory_format=torch.channels_last).
    values, bias, gates = values.contiguous(), contiguous_or_none(bias), contiguous_or_none(gates)
    last, lies_by_channels = ops.is_channels_last(x), False
    if not last and (not x.is_contiguous() or ops.wants_channels_last(x)):
        lies_by_channels = x.is_contiguous()
        last, x = True, ops.to_order(x, True)
    tf32 = ops.allows_tf32(x)
    fixed = (geometry, sizes, transposed, last, tf32)
    given = (x, values, bias, gates, residual)
    refuse_compiled_transforms("conv")
    is_traced = traced.is_tracing()
    if is_traced or (torch.is_grad_enabled() and needs_gradient(*given)) or has_tangent(*given):
        if is_traced:
            y = traced.conv(x, values, gates, bias, index, order, geometry, *sizes, *fixed[2:])
        else:
            y = apply(Product, x, values, gates, bias, index, order, *fixed)
        y = finish("conv", y, residual, activation)
        return y.contiguous() if lies_by_channels else y
    if residual is not None and residual.dim() == x.dim():
        residual = ops.to_order(residual, last)
    values = values if values.dtype == dtype else values.to(dtype)
    more = (bias, residual, gates, order, library.ACTIVATIONS[activation], tf32)
    y = ops.fprop(x, values, index, geometry, sizes[0], last, transposed, *more)
    return y.contiguous() if lies_by_channels else y
