"""The gradient of a bias: sums of dy over its tokens, or the pixels of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import linear as ops
from .transforms import Pass, run


class Sum(Pass):
    """dbias [features] of dy [..., features]."""

    tensors = 1

    @staticmethod
    def forward(ctx: Any, dy: Tensor) -> Tensor:
        """Sums over all but the last dimension."""
        ctx.save_for_backward(dy)
        ctx.fixed = ()
        made: Tensor = ops.bias_gradient(dy)
        return made

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        """The derivative of the sums along a tangent of dy."""
        return None if tangents[0] is None else _plain(tangents[0])

    @staticmethod
    def backward(ctx: Any, ddbias: Tensor) -> tuple[Tensor, ...]:
        """The gradient of dy."""
        (dy,) = ctx.saved_tensors
        return (ddbias.expand_as(dy),)


def sum_of_tokens(dy: Tensor) -> Tensor:
    """Sums of dy [..., features], features side by side, over all else; PyTorch's sum where there is no card.

    PyTorch's takes 36 us on an H200 for what can be read in 6 (64 images of 32 x 32 x 128, bfloat16, 2026-11-26).
    """
    if dy.is_cuda and dy.numel() > 0:
        made: Tensor = run(Sum, dy)
        return made
    return _plain(dy)


def _plain(dy: Tensor) -> Tensor:
    return dy.reshape(-1, dy.size(-1)).sum(0)
