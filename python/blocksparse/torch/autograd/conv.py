"""The gradients of the convolution, of any order, around its ops.

The three passes are linear in each of their tensors, so the gradients of one are the other two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._core.geometry import output_size
from ..ops import conv as ops
from .bias import sum_of_tokens
from .taps import listener_of
from .transforms import Pass, apply, run, tangent_of, tangents_of_gradient


def _again(function: type[Pass], images: int, last: bool, *fixed: Any) -> Callable[..., Any]:
    """The pass as a function of its first tensors, so many of them images, which may lie anyhow."""

    def again(*tensors: Tensor | None) -> Any:
        given = [None if t is None else ops.to_order(t, last and i < images) for i, t in enumerate(tensors)]
        return apply(function, *given, *fixed)

    return again


class Product(Pass):
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
        """y [n, out, size'...] of x [n, in, size...], values [blocks, taps, b, b], gates [blocks] and bias [out]."""
        ctx.save_for_backward(x, values, gates, index, order)
        ctx.fixed = fixed
        values = values if values.dtype == x.dtype else values.to(x.dtype)
        geometry, sizes, transposed, last, tf32 = fixed
        more = (bias, None, gates, order, 0, tf32)
        y: Tensor = ops.fprop(x, values, index, geometry, sizes[0], last, transposed, *more)
        return y

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        """The derivative of y along tangents."""
        *tensors, index, order = ctx.saved_tensors
        geometry, sizes, _, last, _ = ctx.fixed
        of_bias = tangents[3]
        dy = tangent_of(_again(Product, 1, last, None, index, order, *ctx.fixed), tensors, tangents[:3])
        if of_bias is None:
            return dy
        of_bias = of_bias.view(-1, *(1,) * (tensors[0].dim() - 2))
        if dy is None:
            dy = of_bias.new_zeros(tensors[0].size(0), sizes[0], *output_size(geometry, tensors[0].shape[2:]))
        return dy + of_bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, values, gates and bias, from dy [n, out, size'...]."""
        x, values, gates, index, order = ctx.saved_tensors
        wants_x, wants_values, wants_gates, wants_bias = ctx.needs_input_grad[:4]
        listener = listener_of(values) if wants_values else None
        wide = values.dtype != x.dtype
        values = values.to(x.dtype) if wide else values  # here, so that the second gradient goes through it
        dy = ops.to_order(dy, ctx.fixed[3])
        if listener is not None:
            listener(x, dy)
        dx = dw = dgates = dbias = None
        if wants_x:
            dx = run(Transposed, dy, values, gates, index, order, tuple(x.shape[2:]), *ctx.fixed)
        if wants_values or wants_gates:
            dw, dgates = run(Gradient, x, dy, values, gates, index, order, wide, wants_gates, *ctx.fixed)
        if wants_bias:
            on_card = dy.is_cuda and ctx.fixed[3]  # channels-last: pixels are tokens
            dbias = sum_of_tokens(dy.movedim(1, -1)) if on_card else dy.sum((0, *range(2, dy.dim())))
        return dx, dw if wants_values else None, dgates if wants_gates else None, dbias, *(None,) * 7


class Transposed(Pass):
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
        """dx [n, in, size...] of dy [n, out, size'...], values [blocks, taps, b, b] and gates [blocks]."""
        ctx.save_for_backward(dy, values, gates, index, order)
        ctx.fixed = (size, *fixed)
        geometry, sizes, transposed, last, tf32 = fixed
        return ops.dgrad(dy, values, index, geometry, sizes[1], size, last, transposed, gates, order, tf32)

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        """The derivative of dx along tangents."""
        *tensors, index, order = ctx.saved_tensors
        return tangent_of(_again(Transposed, 1, ctx.fixed[4], index, order, *ctx.fixed), tensors, tangents[:3])

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of dy, values and gates, from ddx [n, in, size...]."""
        dy, values, gates, index, order = ctx.saved_tensors
        wants_dy, wants_values, wants_gates = ctx.needs_input_grad[:3]
        _, *fixed = ctx.fixed
        ddx = ops.to_order(ddx, fixed[3])
        ddy = dw = dgates = None
        if wants_dy:
            ddy = apply(Product, ddx, values, gates, None, index, order, *fixed)
        if wants_values or wants_gates:
            dw, dgates = apply(Gradient, ddx, dy, values, gates, index, order, False, wants_gates, *fixed)
        return ddy, dw if wants_values else None, dgates if wants_gates else None, *(None,) * 8


class Gradient(Pass):
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
        """(dW [blocks, taps, b, b], dgates [blocks] or empty) of x, dy, values and gates."""
        ctx.save_for_backward(x, dy, values, gates, index, order)
        ctx.fixed = (wide, wants_gates, *fixed)
        geometry, _, transposed, _, tf32 = fixed
        blocks, _, b, _ = values.shape
        more = (values, gates, order, wants_gates, tf32)
        dw, dgates = ops.wgrad(x, dy, index, geometry, blocks, b, transposed, wide, *more)
        return dw, dgates

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> tuple[Tensor | None, Tensor | None]:
        """The derivatives of dW and dgates along tangents."""
        *tensors, index, order = ctx.saved_tensors
        return tangents_of_gradient(_again(Gradient, 2, ctx.fixed[5], index, order, *ctx.fixed), tensors, tangents[:4])

    @staticmethod
    def backward(ctx: Any, ddw: Tensor, ddgates: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, dy, values and gates, from ddw [blocks, taps, b, b] and ddgates [blocks]."""
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
            ddx = run(Transposed, dy, v, None, index, order, tuple(x.shape[2:]), *fixed)
        if wants_dy:
            dddy = apply(Product, x, v, None, None, index, order, *fixed)
        if (wants_values and wanted_gates) or wants_gates:
            ddw = ddw.to(x.dtype).contiguous()
            s, inner = apply(Gradient, x, dy, ddw, None, index, order, False, True, *fixed)
            dvalues = (ddgates.view(per_block) * s).to(values.dtype) if wants_values and wanted_gates else None
            dgates = inner if wants_gates else None
        return ddx, dddy, dvalues, dgates, *(None,) * 9
