"""Convolutions with gradients of any order: dense in space, block-sparse over channels."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...layout import Layout, need_layout
from ..arguments import need_activation, need_strided, need_tensor, need_tensors
from ..autograd.conv import apply_conv
from ..autograd.transforms import _is_wrapped
from ..ops import conv as _conv_ops
from ..tables import index_of

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int | str | Sequence[int]]


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
    activation: str = "none",
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
    activation: str = "none",
) -> Tensor:
    """activation(conv(x, W) + bias + residual), where the filter W [out, in, height, width] has the blocks `values`.

    Differentiable any number of times, forward, backward and by `torch.func`; knows autocast, `torch.compile` and CUDA
    graphs. float32 on CUDA may take tf32 if `torch.backends.cudnn` allowed it for convolutions at the time of this
    call.

    Args:
        x: [n, layout.in_features, height, width], or without n. Channels-last x is answered channels-last (the fast
            way), contiguous x contiguous; anything else is copied to channels-last first.
        values: [layout.blocks, taps, b, b]: the taps of the kernel, the last size fastest, each [out, in].
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
        activation: "none", "relu", "gelu" (the exact one) or "silu". Computed with the convolution where no gradient
            is wanted, after it otherwise.

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
    activation: str = "none",
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
    activation: str = "none",
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
    activation: str = "none",
) -> Tensor:
    """`conv_transpose2d` of x [n, channels, depth, height, width]."""
    geometry = make_geometry(3, kernel_size, stride, padding, dilation, output_padding, transposed=True)
    return _conv(x, values, layout, geometry, bias, channel_order, gates, residual, activation)


# ---- Geometry ------------------------------------------------------------------------------------------------------


def per_size(name: str, given: Sizes, rank: int) -> tuple[int, ...]:
    """One number for each size, of one for all or a sequence.

    Raises:
        ValueError: there are more or fewer than `rank`, or something is no integer.
    """
    numbers = _integers(given if isinstance(given, Sequence) else (given,) * rank)
    if numbers is None or len(numbers) != rank:
        raise ValueError(f"[conv] {name} is {given!r}, needs an integer, or {rank} of them")
    return numbers


def _integers(given: Any) -> tuple[int, ...] | None:
    """None if something is no integer of 64 bits; those of NumPy are."""
    try:
        numbers = tuple(number if isinstance(number, int) else operator.index(number) for number in given)
        return numbers if all(-(1 << 63) <= number < 1 << 63 for number in numbers) else None
    except TypeError:
        return None


def _pads(given: Any, extent: int, stride: int, transposed: bool) -> tuple[int, int]:
    """(before, after) along one size; `extent` is that of the kernel less 1."""
    if (one := _integers((given,))) is not None:
        return one * 2  # type: ignore[return-value]
    if isinstance(given, str) and given == "valid":
        return 0, 0
    if isinstance(given, str) and given in ("same", "causal"):
        if transposed or stride != 1:
            kind = "a transposed convolution" if transposed else f"stride {stride}"
            raise ValueError(f"[conv] padding is {given!r}, which {kind} does not have: needs numbers")
        before = extent if given == "causal" else extent // 2
        return before, extent - before
    pair = _integers(given) if isinstance(given, Sequence) else None
    if pair is not None and len(pair) == 2:
        return pair[0], pair[1]
    raise ValueError(f"[conv] padding is {given!r}, needs a number, (before, after), 'same', 'causal' or 'valid'")


def make_geometry(
    rank: int,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    output_padding: Sizes = 0,
    transposed: bool = False,
) -> tuple[int, ...]:
    """What the ops take. Whether the numbers make sense is checked by the core.

    Raises:
        ValueError: there are more or fewer numbers than sizes.
    """
    kernel, strides = per_size("kernel_size", kernel_size, rank), per_size("stride", stride, rank)
    dilations, more = per_size("dilation", dilation, rank), per_size("output_padding", output_padding, rank)
    words = isinstance(padding, str) or not isinstance(padding, Sequence)
    given = (padding,) * rank if words else tuple(padding)  # type: ignore[arg-type]
    if len(given) != rank:
        raise ValueError(f"[conv] padding is {padding!r}, needs one for all sizes, or {rank} of them")
    extents = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    pads = [_pads(pad, extent, s, transposed) for pad, extent, s in zip(given, extents, strides, strict=True)]
    before, after = zip(*pads, strict=True)
    return (int(transposed), *kernel, *strides, *dilations, *before, *after, *more)


def check_geometry(geometry: tuple[int, ...]) -> None:
    """Asks the core about images that are large enough.

    Raises:
        ValueError: the numbers make no sense.
    """
    kernel, _, dilation, before, after, _ = _conv_ops._fields(geometry)
    if geometry[0]:
        size = [1 + b + a for b, a in zip(before, after, strict=True)]
    else:
        size = [1 + d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    _conv_ops._checked(geometry, tuple(size))


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
    if order.shape != (channels,) or torch.compiler.is_compiling() or type(order) is not Tensor or _is_wrapped(order):
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
    activation: str,
) -> Tensor:
    need_tensor("conv", "x", x)
    need_tensor("conv", "values", values)
    need_tensors("conv", bias=bias, gates=gates, residual=residual)
    need_activation("conv", activation)
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
