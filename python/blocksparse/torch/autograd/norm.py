"""The gradients of the layer norm around its op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        ctx.relu, ctx.has_term = relu, term is not None
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, gain, shift, factor and term."""
        refuse_tangents("layer_norm", dy)
        factor = ctx.saved_tensors[3]
        made = norm.backward(dy.contiguous(), *ctx.saved_tensors, ctx.relu, ctx.has_term)
        dx, dgain, dshift, dfactor, dterm = made
        of_inputs = (None if factor is None else dfactor, dterm if ctx.has_term else None)
        return dx, dgain, dshift, *of_inputs, None, None
