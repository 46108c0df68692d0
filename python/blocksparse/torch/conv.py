"""Convolutions with gradients of any order: dense in space, block-sparse over channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import Layout
from ._conv_autograd import apply_conv
from .functional import index_of

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
    channel_order: Tensor | None = None,
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
    channel_order: Tensor | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """activation(conv(x, W) + bias + residual), where the filter W [out, in, height, width] has the blocks `values`.

    Differentiable any number of times; knows autocast, `torch.compile` and CUDA graphs. float32 on CUDA may take
    tf32 if `torch.backends.cudnn` allowed it for convolutions at the time of this call.

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
            channel_order[c] of x. A shuffle that costs nothing.
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        residual: like the result.
        activation: "none", "relu", "gelu" (the exact one) or "silu". Computed with the convolution where no gradient
            is wanted, after it otherwise.

    Returns:
        [n, layout.out_features, height', width'], of the dtype of x; under autocast, of autocast's.

    Raises:
        ValueError: a shape, dtype or the geometry is wrong.
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
    channel_order: Tensor | None = None,
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
    channel_order: Tensor | None = None,
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
    channel_order: Tensor | None = None,
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
    channel_order: Tensor | None = None,
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
    numbers = tuple(given) if isinstance(given, Sequence) else (given,) * rank
    if len(numbers) != rank or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"[conv] {name} is {given!r}, needs an integer, or {rank} of them")
    return numbers


def _pads(given: Any, extent: int, stride: int, transposed: bool) -> tuple[int, int]:
    """(before, after) along one size; `extent` is that of the kernel less 1."""
    if isinstance(given, int):
        return given, given
    if given == "valid":
        return 0, 0
    if given in ("same", "causal"):
        if transposed or stride != 1:
            kind = "a transposed convolution" if transposed else f"stride {stride}"
            raise ValueError(f"[conv] padding is {given!r}, which {kind} does not have: needs numbers")
        before = extent if given == "causal" else extent // 2
        return before, extent - before
    if isinstance(given, Sequence) and len(given) == 2 and all(isinstance(number, int) for number in given):
        return given[0], given[1]
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


# ---- The call ------------------------------------------------------------------------------------------------------


def _conv(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    geometry: tuple[int, ...],
    bias: Tensor | None,
    channel_order: Tensor | None,
    gates: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"[conv] x is a {type(x).__name__}, needs a torch.Tensor")
    index = index_of(layout, x.device)
    if channel_order is not None:
        channel_order = channel_order.to(x.device, torch.int32).contiguous()
    call = (geometry, layout.sizes, layout.transposed, bias, channel_order, gates, residual, activation)
    return apply_conv(x, values, index, *call)
