"""The gradients of the linear op, of any order, around its ops.

The three passes are linear in each of their tensors, so the gradients of one are the other two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops import linear as ops
from ..ops.calls import usable
from .bias import sum_of_tokens
from .taps import listener_of
from .transforms import Pass, apply, run, tangent_of, tangents_of_gradient


def _again(function: type[Pass], *fixed: Any) -> Callable[..., Any]:
    """The pass as a function of its first tensors, which may lie anyhow."""
    return lambda *tensors: apply(function, *(None if t is None else usable(t) for t in tensors), *fixed)


class Product(Pass):
    """y = x (gates * W)^T + bias. Values may be wider than x (autocast): their gradient is as wide as they are."""

    tensors = 5
    bias = 3
    exchanges = False  # whether forward asks other processes, so that it has to run where no gradient is wanted, too

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        gates: Tensor | None,
        bias: Tensor | None,
        index: Tensor,
        sizes: tuple[int, int],
        transposed: bool,
        tf32: bool,
    ) -> Tensor:
        """y [..., out] of x [..., in], values [blocks, b, b], gates [blocks] and bias [out]."""
        ctx.save_for_backward(x, values, gates, index)
        ctx.fixed = (sizes, transposed, tf32)
        y: Tensor = ops.fprop(x, values.to(x.dtype), index, sizes[0], transposed, bias, None, gates, 0, tf32)
        return y

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        """The derivative of y along tangents."""
        x, values, gates, index = ctx.saved_tensors
        dy, dbias = tangent_of(_again(Product, None, index, *ctx.fixed), (x, values, gates), tangents[:3]), tangents[3]
        if dy is None or dbias is None:
            return dy if dbias is None else dbias.expand(*x.shape[:-1], -1)
        return dy + dbias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, values, gates and bias, from dy [..., out]."""
        return gradients(ctx, dy)


def gradients(
    ctx: Any,
    dy: Tensor,
    send: Callable[[Callable[[Tensor], Tensor], Tensor], Callable[[], Tensor]] | None = None,
    beside: Callable[[Tensor], contextlib.AbstractContextManager[None]] | None = None,
) -> tuple[Any, ...]:
    """Those of `Product`. `send` makes dx of dy by a function and sends it away; a call brings it back at the end.

    `beside` is the context of what is computed while dx is away.
    """
    x, values, gates, index = ctx.saved_tensors
    wants_x, wants_values, wants_gates, wants_bias = ctx.needs_input_grad[:4]
    listener = listener_of(values) if wants_values else None
    wide = values.dtype != x.dtype
    values = values.to(x.dtype) if wide else values  # here, so that the second gradient goes through it
    dy = usable(dy)
    if listener is not None:
        listener(x, dy)
    dx = dw = dgates = dbias = arrived = None
    if wants_x and send is not None:
        arrived = send(lambda dy: run(Transposed, dy, values, gates, index, *ctx.fixed), dy)
    elif wants_x:
        dx = run(Transposed, dy, values, gates, index, *ctx.fixed)
    if wants_values or wants_gates:
        with contextlib.nullcontext() if beside is None or arrived is None else beside(x):
            dw, dgates = run(Gradient, x, dy, values, gates, index, *ctx.fixed, wide, wants_gates)
    if wants_bias:
        dbias = sum_of_tokens(dy) if dy.is_contiguous() else dy.sum(0)  # else it is a features-first matrix
    if arrived is not None:
        dx = arrived()
    return dx, dw if wants_values else None, dgates if wants_gates else None, dbias, None, None, None, None


class Transposed(Pass):
    """dx = dy (gates * W)."""

    tensors = 4

    @staticmethod
    def forward(
        ctx: Any,
        dy: Tensor,
        values: Tensor,
        gates: Tensor | None,
        index: Tensor,
        sizes: tuple[int, int],
        transposed: bool,
        tf32: bool,
    ) -> Tensor:
        """dx [..., in] of dy [..., out], values [blocks, b, b] and gates [blocks]."""
        ctx.save_for_backward(dy, values, gates, index)
        ctx.fixed = (sizes, transposed, tf32)
        dx: Tensor = ops.dgrad(dy, values, index, sizes[1], transposed, gates, tf32)
        return dx

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        """The derivative of dx along tangents."""
        *tensors, index = ctx.saved_tensors
        return tangent_of(_again(Transposed, index, *ctx.fixed), tensors, tangents[:3])

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of dy, values and gates, from ddx [..., in]."""
        dy, values, gates, index = ctx.saved_tensors
        wants_dy, wants_values, wants_gates = ctx.needs_input_grad[:3]
        ddx = usable(ddx)
        ddy = dw = dgates = None
        if wants_dy:
            ddy = apply(Product, ddx, values, gates, None, index, *ctx.fixed)
        if wants_values or wants_gates:
            dw, dgates = apply(Gradient, ddx, dy, values, gates, index, *ctx.fixed, False, wants_gates)
        return ddy, dw if wants_values else None, dgates if wants_gates else None, None, None, None, None


class Gradient(Pass):
    """dW = gates * S and dgates = <S, W> for each block, with S = dy_out^T x_in."""

    tensors = 5

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dy: Tensor,
        values: Tensor,
        gates: Tensor | None,
        index: Tensor,
        sizes: tuple[int, int],
        transposed: bool,
        tf32: bool,
        wide: bool,
        wants_gates: bool,
    ) -> tuple[Tensor, Tensor]:
        """(dW [blocks, b, b], dgates [blocks] or empty) of x [..., in], dy [..., out], values and gates."""
        ctx.save_for_backward(x, dy, values, gates, index)
        ctx.fixed = (sizes, transposed, tf32, wide, wants_gates)
        blocks, b, _ = values.shape
        dw, dgates = ops.wgrad(x, dy, index, blocks, b, transposed, wide, values, gates, wants_gates, tf32)
        return dw, dgates

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> tuple[Tensor | None, Tensor | None]:
        """The derivatives of dW and dgates along tangents."""
        *tensors, index = ctx.saved_tensors
        return tangents_of_gradient(_again(Gradient, index, *ctx.fixed), tensors, tangents[:4])

    @staticmethod
    def backward(ctx: Any, ddw: Tensor, ddgates: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, dy, values and gates, from ddw [blocks, b, b] and ddgates [blocks]."""
        x, dy, values, gates, index = ctx.saved_tensors
        wants_x, wants_dy, wants_values, wants_gates = ctx.needs_input_grad[:4]
        *fixed, _wide, wanted_gates = ctx.fixed
        # <ddw, gates * S> + <ddgates, <S, W>> = <S, V>: V plays the part of a weight.
        per_block = (-1, 1, 1)
        v = ddw if gates is None else ddw * gates.view(per_block)
        if wanted_gates:
            v = v + ddgates.view(per_block) * values
        v = v.to(x.dtype).contiguous()
        ddx = dddy = dvalues = dgates = None
        if wants_x:
            ddx = apply(Transposed, dy, v, None, index, *fixed)
        if wants_dy:
            dddy = apply(Product, x, v, None, None, index, *fixed)
        if (wants_values and wanted_gates) or wants_gates:
            ddw = ddw.to(x.dtype).contiguous()
            s, inner = apply(Gradient, x, dy, ddw, None, index, *fixed, False, True)
            dvalues = (ddgates.view(per_block) * s).to(values.dtype) if wants_values and wanted_gates else None
            dgates = inner if wants_gates else None
        return ddx, dddy, dvalues, dgates, None, None, None, None, None, None
