"""The layer norm of recurrent networks, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import traced
from ..autograd.norm import LayerNorm
from ..autograd.transforms import refuse_tangents
from ..ops import norm
from ..ops.calls import contiguous_or_none


def layer_norm(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    factor: Tensor | None = None,
    term: Tensor | None = None,
    relu: bool = False,
    epsilon: float = 1e-5,
) -> Tensor:
    """y = f((x^ gain + shift) factor + term): x^ is x normalised over its last dimension, f is relu or nothing.

    Differentiable any number of times, backward.

    Args:
        x: [n, groups, features]. Each group has a norm of its own. What is not contiguous is copied first.
        gain: [groups, features], float32 (float64 for float64); and so is shift.
        shift: see gain.
        factor: like x; 1 if not given.
        term: like x; 0 if not given.
        relu: whether negative results become 0.
        epsilon: added to the variance.

    Returns:
        y, like x.

    Raises:
        ValueError: a shape or dtype is wrong.
        NotImplementedError: a tensor has a tangent (forward-mode differentiation).
    """
    refuse_tangents("layer_norm", x, gain, shift, factor, term)
    x, gain, shift = x.contiguous(), gain.contiguous(), shift.contiguous()
    factor, term = contiguous_or_none(factor), contiguous_or_none(term)
    if traced.is_tracing():
        made: Tensor = traced.layer_norm(x, gain, shift, factor, term, relu, epsilon)
        return made
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gain, shift, factor, term)):
        y: Tensor = LayerNorm.apply(x, gain, shift, factor, term, relu, epsilon)
        return y
    result: Tensor = norm.forward(x, gain, shift, factor, term, relu, epsilon)[0]
    return result
