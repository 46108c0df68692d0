"""The gradients of the LSTM around its op.

What the forward pass saves, the gates and cells of all steps, are outputs of its node. So the backward pass can be
written as a composition of differentiable ops of these, which is what it is where a gradient is to have gradients
itself: their gradients then come back to the same node. Nothing more is saved for that, and an ordinary backward pass
is one call of the core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import lstm as ops
from .linear import Gradient, Transposed
from .taps import listener_of
from .transforms import apply, refuse_tangents


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class Lstm(torch.autograd.Function):
    """Values may be wider than pre (autocast): their gradient is as wide as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        pre: Tensor,
        values: Tensor,
        index: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """y [steps, n, hidden], h and c [n, hidden]: see `blocksparse.torch.lstm`; gates and cells of all steps."""
        ctx.wide = values.dtype != pre.dtype
        narrow = values.to(pre.dtype) if ctx.wide else values
        made: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = ops.forward(pre, narrow, index, h0, c0, lengths, True)
        y, _, _, gates, cells = made
        ctx.save_for_backward(narrow, index, y, gates, cells, h0, c0, lengths, values if ctx.wide else None)
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of pre, values, h0 and c0."""
        *saved, wide_values = ctx.saved_tensors
        h0, c0 = saved[5:7]
        wants_values = ctx.needs_input_grad[1]
        refuse_tangents("lstm", *of_outputs)
        listener = listener_of(saved[0] if saved[-1] is None else saved[-1]) if wants_values else None
        dy, dh, dc, dgates, dcells = of_outputs
        second = torch.is_grad_enabled() or dgates is not None or dcells is not None
        if second and not torch.compiler.is_compiling():  # compiled functions have no second derivatives
            values = saved[0] if wide_values is None else wide_values
            made = _composed((values, *saved[1:]), of_outputs, ctx.needs_input_grad)
            if listener is not None and made[0] is not None:
                listener(*_product_of(saved[2], made[0], h0))
            return *made[:2], None, *made[2:], None
        of_outputs = (_contiguous(dy), _contiguous(dh), _contiguous(dc))
        dpre, dw, dh0, dc0 = ops.backward(*saved, *of_outputs, ctx.wide, wants_values)
        if listener is not None:
            listener(*_product_of(saved[2], dpre, h0))
        of_state = (None if h0 is None else dh0, None if c0 is None else dc0)
        return dpre, dw if wants_values else None, None, *of_state, None


def _composed(
    saved: tuple[Any, ...], of_outputs: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The backward pass as differentiable ops: the gradients of pre, values, h0 and c0; see `lstm.h`."""
    values, index, y, gates, cells, h0, c0, lengths = saved
    dy, dh, dc, dgates, dcells = of_outputs
    steps, _, hidden = y.shape
    sizes, narrow = (4 * hidden, hidden), values.to(y.dtype)
    wide = cells.dtype
    dh = y.new_zeros(y.shape[1:], dtype=wide) if dh is None else dh.to(wide)
    dc = torch.zeros_like(dh) if dc is None else dc
    runs = None if lengths is None else torch.arange(steps, device=y.device).view(-1, 1, 1) < lengths.view(1, -1, 1)
    dzs: list[Tensor] = []
    for t in reversed(range(steps)):
        before = cells[t - 1] if t > 0 else c0
        running = None if runs is None else runs[t]
        dh_t = dh if dy is None else dh + dy[t]
        dc_t = dc if dcells is None else dc + dcells[t]
        dz, dc_before = _step(gates[t].to(wide), cells[t], before, dh_t, dc_t, None if dgates is None else dgates[t])
        if running is not None:
            dz, dc_before = torch.where(running.unsqueeze(1), dz, 0), torch.where(running, dc_before, dc)
        dzs.append(dz.to(y.dtype))
        if t > 0 or h0 is not None:
            product = apply(Transposed, dzs[-1].flatten(1).contiguous(), narrow, None, index, sizes, False, False)
            dh = product.to(wide) if running is None else torch.where(running, product.to(wide), dh)
        dc = dc_before
    dpre = torch.stack(dzs[::-1]) if dzs else gates.clone()
    dw = None
    if wanted[1]:
        dw, _ = apply(
            Gradient,
            *_product_of(y, dpre, h0),
            narrow,
            None,
            index,
            sizes,
            False,
            False,
            values.dtype != y.dtype,
            False,
        )
    return dpre, dw, None if h0 is None else dh.to(h0.dtype), None if c0 is None else dc


def _product_of(y: Tensor, dpre: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """X [N, hidden] and dy [N, 4 hidden] of which dW = dy^T x is made, over all steps."""
    first = y.new_zeros(y.shape[1:]) if h0 is None else h0
    hs = torch.cat([first.unsqueeze(0), y[:-1]]) if y.size(0) > 0 else y
    return hs.flatten(0, 1), dpre.flatten(2).flatten(0, 1)


def _step(
    gates: Tensor, c: Tensor, before: Tensor | None, dh: Tensor, dc: Tensor, dgates: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dz [n, 4, hidden] and dc [n, hidden] before a step, from c after and before it, and gates [n, 4, hidden]."""
    i, f, g, o = gates.unbind(1)
    squashed = c.tanh()
    dc = dc + dh * o * (1 - squashed.square())
    of_f = torch.zeros_like(dc) if before is None else dc * before
    of_gates = torch.stack([dc * g, of_f, dc * i, dh * squashed], 1)
    if dgates is not None:
        of_gates = of_gates + dgates
    slopes = torch.stack([i * (1 - i), f * (1 - f), 1 - g.square(), o * (1 - o)], 1)
    return of_gates * slopes, dc * f
