"""The gradients of the layer norm around its op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import norm
from .transforms import refuse_tangents


class LayerNorm(torch.autograd.Function):
    """See `blocksparse.torch.norm.layer_norm`: x, gain, shift, factor, term, relu, epsilon -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        shift: Tensor,
        factor: Tensor | None,
        term: Tensor | None,
        relu: bool,
        epsilon: float,
    ) -> Tensor:
        """y [n, groups, features]."""
        y, stats = norm.forward(x, gain, shift, factor, term, relu, epsilon)
        ctx.save_for_backward(x, gain, shift, factor, y, stats)
        ctx.relu, ctx.has_term, ctx.epsilon = relu, term is not None, epsilon
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, gain, shift, factor and term."""
        refuse_tangents("layer_norm", dy)
        x, gain, shift, factor, y, _ = ctx.saved_tensors
        if (
            torch.is_grad_enabled() and not torch.compiler.is_compiling()
        ):  # compiled functions have no second derivatives
            runs = y.detach() > 0 if ctx.relu else None
            *made, dterm = _composed(dy, (x, gain, shift, factor), runs, ctx.epsilon)
            return *made, dterm if ctx.has_term else None, None, None
        made = norm.backward(dy.contiguous(), *ctx.saved_tensors, ctx.relu, ctx.has_term)
        dx, dgain, dshift, dfactor, dterm = made
        of_inputs = (None if factor is None else dfactor, dterm if ctx.has_term else None)
        return dx, dgain, dshift, *of_inputs, None, None


def _composed(
    dy: Tensor, given: tuple[Tensor, Tensor, Tensor, Tensor | None], runs: Tensor | None, epsilon: float
) -> tuple[Tensor | None, ...]:
    """The backward pass as differentiable ops, where gradients are to have gradients: those of all, see `norm.h`.

    `runs` says where relu has let y pass; None: there is no relu.
    """
    x, gain, shift, factor = given
    dz = dy.to(gain.dtype) if runs is None else torch.where(runs, dy.to(gain.dtype), 0)
    centred = x.to(gain.dtype)
    centred = centred - centred.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    normed = centred * scale
    dn = dz if factor is None else dz * factor.to(gain.dtype)
    dnormed = dn * gain
    dx = scale * (dnormed - dnormed.mean(-1, keepdim=True) - normed * (dnormed * normed).mean(-1, keepdim=True))
    dfactor = None if factor is None else (dz * (normed * gain + shift)).to(factor.dtype)
    return dx.to(x.dtype), (dn * normed).sum(0), dn.sum(0), dfactor, dz.to(x.dtype)
