"""Weights that many steps of a recurrent network share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.linear import Gradient, Transposed
from ..autograd.taps import listener_of
from ..autograd.traced import is_tracing
from ..autograd.transforms import apply, refuse_tangents
from ..blocks import Blocks
from ..ops import linear as ops
from .linear import apply_linear


class SharedWeight:
    """A layer's weight for the steps of one forward pass, with its gradient as one product over all of them.

    Backward notes (x, dy) of each use; when autograd has been through all uses, dW is made by one call. Make a new one
    for each forward pass. Autocast is obeyed; the layer's bias is not used.

    Every use makes its own part of dW under `torch.compile` and `torch.jit.trace`, on which what is noted would be
    lost, and where gradients are to have gradients themselves (create_graph).
    """

    def __init__(self, layer: nn.Linear | Blocks) -> None:
        weight = layer.weight.contiguous()
        refuse_tangents("SharedWeight", weight)
        self.layout = None if isinstance(layer, nn.Linear) else layer.layout
        self.index = None if isinstance(layer, nn.Linear) else layer.tables(weight.device)
        self.used: list[tuple[Tensor, Tensor]] = []  # (x [n, in], dy [n, out]) of each use, last first
        self.task = -1  # the backward pass that has noted them: one that does not come to the weight leaves them behind
        kind = "cuda" if weight.is_cuda else "cpu"
        narrow = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
        self.dtype = torch.get_autocast_dtype(kind) if narrow else weight.dtype
        self.recorded = torch.compiler.is_compiling() or is_tracing()
        self.source: Tensor = weight if self.recorded else _Collect.apply(weight, self)
        self.weight = weight if self.recorded else weight.detach().to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> x W^T [n, out]."""
        x = x.to(self.dtype)
        refuse_tangents("SharedWeight", x)
        if self.recorded:
            return self.product(x, False) if self.layout else nn.functional.linear(x, self.weight)
        y: Tensor = _Use.apply(x, self.source, self)
        return y

    def product(self, x: Tensor, transposed: bool) -> Tensor:
        """X W^T, or x W."""
        if self.layout is None or self.index is None:
            return x @ (self.weight if transposed else self.weight.t())
        out, in_ = self.layout.sizes
        sizes = (in_, out) if transposed else (out, in_)
        return apply_linear(x, self.weight, self.index, sizes, self.layout.transposed != transposed)

    def note(self, x: Tensor, dy: Tensor) -> None:
        """For `gradient`, in this backward pass."""
        if self.task != (task := torch._C._current_graph_task_id()):
            self.used.clear()
            self.task = task
        self.used.append((x, dy))

    def gradients(
        self, x: Tensor, source: Tensor, dy: Tensor, wants_x: bool, wants_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx and dW of one use, as differentiable ops of `source`, the weight as wide as it is."""
        narrow = source.to(self.dtype)
        if self.layout is None or self.index is None:
            return dy @ narrow if wants_x else None, (dy.t() @ x).to(source.dtype) if wants_w else None
        fixed = (self.index, self.layout.sizes, self.layout.transposed, ops.allows_tf32(x))
        dx = apply(Transposed, dy, narrow, None, *fixed) if wants_x else None
        wide = source.dtype != self.dtype
        return dx, apply(Gradient, x, dy, narrow, None, *fixed, wide, False)[0] if wants_w else None

    def gradient(self) -> Tensor:
        """dW = sum of dy^T x over all uses."""
        xs, dys = zip(*self.used, strict=True)
        self.used.clear()
        wide = self.source.dtype != self.dtype
        if self.layout is None or self.index is None:
            return (torch.cat(dys).t() @ torch.cat(xs)).to(self.source.dtype)
        blocks, b, _ = self.weight.shape
        more = (self.layout.transposed, wide, None, None, False, ops.allows_tf32(xs[0]))
        return ops.wgrad_list(list(xs), list(dys), self.index, blocks, b, *more)[0]


class _Collect(torch.autograd.Function):
    """The weight itself. Autograd calls backward when all uses have been through theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shared: SharedWeight) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> tuple[Tensor | None, None]:
        shared: SharedWeight = ctx.shared
        if not shared.used or shared.task != torch._C._current_graph_task_id():
            return dw, None
        noted = shared.gradient()
        return (noted if dw is None else dw + noted), None  # both: the backward pass of a backward pass


class _Use(torch.autograd.Function):
    """y = x W^T. Backward gives dx, and notes x and dy for `_Collect`, or gives dW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, shared: SharedWeight) -> Tensor:
        ctx.save_for_backward(x, source)
        ctx.shared = shared
        return shared.product(x.contiguous(), False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, source = ctx.saved_tensors
        shared: SharedWeight = ctx.shared
        wants_x, wants_w, _ = ctx.needs_input_grad
        refuse_tangents("linear_wgrad", dy)
        x, dy = x.contiguous(), dy.contiguous()
        if wants_w and (listener := listener_of(source)) is not None:
            listener(x, dy)
        if torch.is_grad_enabled():
            return *shared.gradients(x, source, dy, wants_x, wants_w), None
        if wants_w:
            shared.note(x, dy)
        return (shared.product(dy, True) if wants_x else None), None, None
