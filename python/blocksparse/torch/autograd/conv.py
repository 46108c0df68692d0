"""The gradients of the convolution, of any order, around its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._core import library
from ..arguments import need_same_dtype, need_strided
from ..functional.linear import _ACTIVATE, _needs_gradient
from ..ops import conv as _conv_ops
from .transforms import Pass, apply, has_tangent, refuse_compiled_transforms, run, tangent_of, tangents_of_gradient


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
    need_strided("conv", x=x, values=values, residual=residual)
    if x.dim() == rank + 1:
        residual = None if residual is None else residual.unsqueeze(0)
        call = (geometry, sizes, transposed, bias, order, gates, residual, activation)
        return apply_conv(x.unsqueeze(0), values, index, *call).squeeze(0)
    if x.dim() != rank + 2 or x.size(1) != sizes[1]:
        names = ", ".join(("depth", "height", "width")[-rank:])
        raise ValueError(f"[conv] x is {list(x.shape)}, needs [n, {sizes[1]}, {names}]")
    if activation not in _ACTIVATE:
        raise ValueError(f"[conv] activation is {activation!r}, needs one of {', '.join(_ACTIVATE)}")
    dtype, kind = x.dtype, "cuda" if x.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        residual = None if residual is None else residual.to(dtype)
    elif values.dtype != dtype:
        need_same_dtype("conv", x, values)
    if not values.is_contiguous():  # parametrizations follow .to(memory_format=torch.channels_last)
        values = values.contiguous()
    last, lies_by_channels = _conv_ops.is_channels_last(x), False
    if not last and (not x.is_contiguous() or _conv_ops.wants_channels_last(x)):
        lies_by_channels = x.is_contiguous()
        last, x = True, _conv_ops.to_order(x, True)
    tf32 = _conv_ops.allows_tf32(x)
    fixed = (geometry, sizes, transposed, last, tf32)
    given = (x, values, bias, gates, residual)
    refuse_compiled_transforms("conv")
    if (torch.is_grad_enabled() and _needs_gradient(*given)) or has_tangent(*given):
        y = apply(_Product, x, values, gates, bias, index, order, *fixed)
        if residual is not None:
            if residual.shape != y.shape or residual.dtype != y.dtype:
                raise ValueError(
                    f"[conv] residual is {residual.dtype} {list(residual.shape)}, needs {y.dtype} {list(y.shape)}"
                )
            y = y + residual
        y = y if activation == "none" else _ACTIVATE[activation](y)
        return y.contiguous() if lies_by_channels else y
    if residual is not None and residual.dim() == x.dim():
        residual = _conv_ops.to_order(residual, last)
    values = values if values.dtype == dtype else values.to(dtype)
    y = _fprop(x, values, gates, bias, index, order, *fixed, residual, library.ACTIVATIONS[activation])
    return y.contiguous() if lies_by_channels else y


def _fprop(
    x: Tensor,
    values: Tensor,
    gates: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    order: Tensor | None,
    geometry: tuple[int, ...],
    sizes: tuple[int, int],
    transposed: bool,
    last: bool,
    tf32: bool,
    residual: Tensor | None = None,
    activation: int = 0,
) -> Tensor:
    more = (bias, residual, gates, order, activation, tf32)
    return _conv_ops.fprop(x, values, index, geometry, sizes[0], last, transposed, *more)


def _again(function: type[Pass], images: int, last: bool, *fixed: Any) -> Callable[..., Any]:
    """The pass as a function of its first tensors, so many of them images, which may lie anyhow."""

    def again(*tensors: Tensor | None) -> Any:
        given = [None if t is None else _conv_ops.to_order(t, last and i < images) for i, t in enumerate(tensors)]
        return apply(function, *given, *fixed)

    return again


# Each pass is linear in each of its tensors, so the gradients of each are the other two.
class _Product(Pass):
    """y = conv(x, gates * W) + bias. Values may be wider than x (autocast): their gradient is as wide as they are."""

    tensors = 6
    bias = 3

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        gates: Tensor | None,
        bias: Tensor | None,
        index: Tensor,
        order: Tensor | None,
        *fixed: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, values, gates, index, order)
        ctx.fixed = fixed
        values = values if values.dtype == x.dtype else values.to(x.dtype)
        return _fprop(x, values, gates, bias, index, order, *fixed)

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        *tensors, index, order = ctx.saved_tensors
        geometry, sizes, _, last, _ = ctx.fixed
        of_bias = tangents[3]
        dy = tangent_of(_again(_Product, 1, last, None, index, order, *ctx.fixed), tensors, tangents[:3])
        if of_bias is None:
            return dy
        of_bias = of_bias.view(-1, *(1,) * (tensors[0].dim() - 2))
        if dy is None:
            dy = of_bias.new_zeros(tensors[0].size(0), sizes[0], *_conv_ops.output_size(geometry, tensors[0].shape[2:]))
        return dy + of_bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, values, gates, index, order = ctx.saved_tensors
        wants_x, wants_values, wants_gates, wants_bias = ctx.needs_input_grad[:4]
        wide = values.dtype != x.dtype
        values = values.to(x.dtype) if wide else values  # here, so that the second gradient goes through it
        dy = _conv_ops.to_order(dy, ctx.fixed[3])
        dx = dw = dgates = dbias = None
        if wants_x:
            dx = run(_Transposed, dy, values, gates, index, order, tuple(x.shape[2:]), *ctx.fixed)
        if wants_values or wants_gates:
            dw, dgates = run(_Gradient, x, dy, values, gates, index, order, wide, wants_gates, *ctx.fixed)
        if wants_bias:
            dbias = dy.sum((0, *range(2, dy.dim())))
        return dx, dw if wants_values else None, dgates if wants_gates else None, dbias, *(None,) * 7


class _Transposed(Pass):
    """The gradient of x."""

    tensors = 5

    @staticmethod
    def forward(
        ctx: Any,
        dy: Tensor,
        values: Tensor,
        gates: Tensor | None,
        index: Tensor,
        order: Tensor | None,
        size: tuple[int, ...],
        *fixed: Any,
    ) -> Tensor:
        ctx.save_for_backward(dy, values, gates, index, order)
        ctx.fixed = (size, *fixed)
        geometry, sizes, transposed, last, tf32 = fixed
        return _conv_ops.dgrad(dy, values, index, geometry, sizes[1], size, last, transposed, gates, order, tf32)

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        *tensors, index, order = ctx.saved_tensors
        return tangent_of(_again(_Transposed, 1, ctx.fixed[4], index, order, *ctx.fixed), tensors, tangents[:3])

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
        dy, values, gates, index, order = ctx.saved_tensors
        wants_dy, wants_values, wants_gates = ctx.needs_input_grad[:3]
        _, *fixed = ctx.fixed
        ddx = _conv_ops.to_order(ddx, fixed[3])
        ddy = dw = dgates = None
        if wants_dy:
            ddy = apply(_Product, ddx, values, gates, None, index, order, *fixed)
        if wants_values or wants_gates:
            dw, dgates = apply(_Gradient, ddx, dy, values, gates, index, order, False, wants_gates, *fixed)
        return ddy, dw if wants_values else None, dgates if wants_gates else None, *(None,) * 8


class _Gradient(Pass):
    """dW = gates * S and dgates = <S, W> for each block, with S the sums over images and pixels."""

    tensors = 6

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dy: Tensor,
        values: Tensor,
        gates: Tensor | None,
        index: Tensor,
        order: Tensor | None,
        wide: bool,
        wants_gates: bool,
        *fixed: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, dy, values, gates, index, order)
        ctx.fixed = (wide, wants_gates, *fixed)
        geometry, _, transposed, _, tf32 = fixed
        blocks, _, b, _ = values.shape
        more = (values, gates, order, wants_gates, tf32)
        dw, dgates = _conv_ops.wgrad(x, dy, index, geometry, blocks, b, transposed, wide, *more)
        return dw, dgates

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> tuple[Tensor | None, Tensor | None]:
        *tensors, index, order = ctx.saved_tensors
        return tangents_of_gradient(_again(_Gradient, 2, ctx.fixed[5], index, order, *ctx.fixed), tensors, tangents[:4])

    @staticmethod
    def backward(ctx: Any, ddw: Tensor, ddgates: Tensor) -> tuple[Tensor | None, ...]:
        x, dy, values, gates, index, order = ctx.saved_tensors
        wants_x, wants_dy, wants_values, wants_gates = ctx.needs_input_grad[:4]
        _wide, wanted_gates, *fixed = ctx.fixed
        # <ddw, gates * S> + <ddgates, <S, W>> = <S, V>: V plays the part of a weight.
        per_block = (-1, 1, 1, 1)
        v = ddw if gates is None else ddw * gates.view(per_block)
        if wanted_gates:
            v = v + ddgates.view(per_block) * values
        v = v.to(x.dtype).contiguous()
        ddx = dddy = dvalues = dgates = None
        if wants_x:
            ddx = run(_Transposed, dy, v, None, index, order, tuple(x.shape[2:]), *fixed)
        if wants_dy:
            dddy = apply(_Product, x, v, None, None, index, order, *fixed)
        if (wants_values and wanted_gates) or wants_gates:
            ddw = ddw.to(x.dtype).contiguous()
            s, inner = apply(_Gradient, x, dy, ddw, None, index, order, False, True, *fixed)
            dvalues = (ddgates.view(per_block) * s).to(values.dtype) if wants_values and wanted_gates else None
            dgates = inner if wants_gates else None
        return ddx, dddy, dvalues, dgates, *(None,) * 9
