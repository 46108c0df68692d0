"""The gradients of the LSTM around its op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops import lstm as ops
from .transforms import refuse_tangents


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y [steps, n, hidden], h and c [n, hidden]: see `blocksparse.torch.lstm`."""
        narrow = values.to(pre.dtype)
        y, h, c, gates, cells = ops.forward(pre, narrow, index, h0, c0, lengths, True)
        ctx.save_for_backward(narrow, index, y, gates, cells, h0, c0, lengths)
        ctx.wide = values.dtype != pre.dtype
        ctx.set_materialize_grads(False)
        return y, h, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of pre, values, h0 and c0."""
        h0, c0 = ctx.saved_tensors[5:7]
        wants_values = ctx.needs_input_grad[1]
        of_outputs = (_contiguous(dy), _contiguous(dh), _contiguous(dc))
        refuse_tangents("lstm", *of_outputs)
        made = ops.backward(*ctx.saved_tensors, *of_outputs, ctx.wide, wants_values)
        dpre, dw, dh0, dc0 = made
        of_state = (None if h0 is None else dh0, None if c0 is None else dc0)
        return dpre, dw if wants_values else None, None, *of_state, None
