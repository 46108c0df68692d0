"""The gradients of gated linear units, of any order, around their ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...interleave import GROUP
from ..ops import glu as ops
from .transforms import Pass

_ONCE, _CUBED = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715


def _relu(z: Tensor) -> tuple[Tensor, Tensor]:
    return z.relu(), (z > 0).to(z.dtype)


def _gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    below = 0.5 * torch.erfc(-z / math.sqrt(2))
    return z * below, below + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _silu(z: Tensor) -> tuple[Tensor, Tensor]:
    s = z.sigmoid()
    return z * s, s + z * s * (1 - s)


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor]:
    s = (z * (_ONCE + _CUBED * z * z)).sigmoid()
    return z * s, s + z * s * (1 - s) * (_ONCE + 3 * _CUBED * z * z)


# f and its derivative as differentiable operations, by the core's code of the activation.
_BY_CODE: dict[int, Callable[[Tensor], tuple[Tensor, Tensor]]] = {1: _relu, 2: _gelu, 3: _silu, 4: _gelu_tanh}


def _parts(z: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and up, [..., hidden features up to a multiple of 8]."""
    both = z.unflatten(-1, (-1, 2, GROUP))
    return both[..., 0, :].flatten(-2), both[..., 1, :].flatten(-2)


def composed(z: Tensor, hidden_features: int, activation: int) -> Tensor:
    """y by PyTorch's operations, for graphs that hold no others."""
    gate, up = _parts(z)
    return (_BY_CODE[activation](gate)[0] * up)[..., :hidden_features]


def _composed_backward(z: Tensor, dy: Tensor, activation: int) -> Tensor:
    """The backward pass as differentiable operations, where gradients are to have gradients, in the type of sums."""
    wide = torch.promote_types(z.dtype, torch.float32)
    gate, up = _parts(z.to(wide))
    d = torch.nn.functional.pad(dy.to(wide), (0, gate.size(-1) - dy.size(-1)))
    value, slope = _BY_CODE[activation](gate)
    parts = [part.unflatten(-1, (-1, GROUP)) for part in (d * up * slope, d * value)]
    return torch.stack(parts, -2).flatten(-3).to(z.dtype)


class Glu(Pass):
    """y = f(gate) * up of z, both of which lie in it."""

    tensors = 1

    @staticmethod
    def forward(ctx: Any, z: Tensor, hidden_features: int, activation: int) -> Tensor:
        """y [..., hidden_features] of z [..., 2 round_up(hidden_features, 8)]."""
        ctx.save_for_backward(z)
        ctx.fixed = (hidden_features, activation)
        y: Tensor = ops.forward(z, hidden_features, activation)
        return y

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        """The derivative of y along a tangent of z."""
        dz = tangents[0]
        if dz is None:
            return None
        (z,) = ctx.saved_tensors
        hidden_features, activation = ctx.fixed
        gate, up = _parts(z)
        dgate, dup = _parts(dz)
        value, slope = _BY_CODE[activation](gate)
        return (slope * dgate * up + value * dup)[..., :hidden_features]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of z."""
        (z,) = ctx.saved_tensors
        _, activation = ctx.fixed
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _composed_backward(z, dy, activation), None, None
        return ops.backward(z, dy.contiguous(), activation), None, None
