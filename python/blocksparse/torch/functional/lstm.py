"""Recurrent networks with block-sparse weights, as functions: the LSTM, and weights that are used at many steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...layout import Layout, need_layout
from ..arguments import need_lengths, need_tensor, state_of
from ..autograd.transforms import refuse_tangents
from ..modules.linear import BlockSparseLinear
from ..ops import linear as _ops
from ..ops import lstm as _lstm_ops
from ..tables import index_of
from .linear import apply_linear

State = tuple[Tensor, Tensor]  # h [n, hidden], c [n, hidden]


def lstm(
    pre: Tensor,
    values: Tensor,
    layout: Layout,
    state: State | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, State]:
    """A sequence through an LSTM: z = pre[t] + W h, c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c).

    The gates' rows of W [4 hidden, hidden] are in the order i, f, g, o, as in `torch.nn.LSTM`. Differentiable once, and
    backward; knows autocast and `torch.compile`. For truncated backpropagation through time pass the last chunk's
    state, detached.

    Args:
        pre: [steps, n, 4 * hidden] or [steps, n, 4, hidden]: the input's projection and all biases.
        values: [layout.blocks, b, b].
        layout: of W [4 hidden, hidden]: `layout.stack(4)` if the gates share one. hidden is a multiple of b.
        state: (h, c) before the first step, [n, hidden] each; zeros by default. c is used and returned in float32
            (float64 for float64), whatever the dtype of pre.
        lengths: int64 [n], steps of each sequence; afterwards its state stays and its y is 0. All steps by default. On
            the CPU a batch whose longest sequences come first takes less time; on a card what is out of range counts as
            the nearest that is right.

    Returns:
        y [steps, n, hidden], and the state (h, c) after each sequence's last step.

    Raises:
        ValueError: a shape or dtype is wrong.
        NotImplementedError: a tensor has a tangent (forward-mode differentiation).
    """
    need_tensor("lstm", "pre", pre)
    need_tensor("lstm", "values", values)
    need_layout("lstm", layout)
    state = state_of("lstm", state)
    if pre.dim() > 1:
        need_lengths("lstm", lengths, pre.size(1))
    return apply_lstm(pre, values, index_of(layout, pre.device), layout.sizes, state, lengths)


def apply_lstm(
    pre: Tensor,
    values: Tensor,
    index: Tensor,
    sizes: tuple[int, int],
    state: State | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, State]:
    """`lstm` with the layout as its tables and sizes (4 * hidden, hidden)."""
    rows, hidden = sizes
    if pre.dim() == 3 and pre.size(2) == rows:
        pre = pre.unflatten(2, (4, hidden))
    if rows != 4 * hidden or pre.dim() != 4 or tuple(pre.shape[2:]) != (4, hidden):
        raise ValueError(
            f"[lstm] pre is {list(pre.shape)} and layout {rows} x {hidden}, "
            "needs [steps, n, 4, hidden] and 4 hidden x hidden"
        )
    dtype = pre.dtype
    kind = "cuda" if pre.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        pre = pre.to(dtype)
    elif values.dtype != dtype:
        raise ValueError(f"[lstm] values are {values.dtype}, needs {dtype}, the dtype of pre (or autocast)")
    h0, c0 = (None, None) if state is None else state
    if h0 is not None and c0 is not None:
        h0, c0 = h0.to(dtype).contiguous(), c0.to(_ops.sum_dtype(dtype)).contiguous()
    if lengths is not None:
        lengths = lengths.to(pre.device, torch.int64).contiguous()
    pre = pre.contiguous()
    refuse_tangents("lstm", pre, values, h0, c0)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (pre, values, h0, c0)):
        y, h, c = _Lstm.apply(pre, values, index, h0, c0, lengths)
    else:
        y, h, c, _, _ = _lstm_ops.forward(pre, values.to(dtype), index, h0, c0, lengths, False)
    return y, (h, c)


def apply_cell(z: Tensor, values: Tensor, index: Tensor, c: Tensor) -> State:
    """One step from z [n, 4, hidden] and c [n, hidden], without a product: -> h, c. values and index are not read."""
    pre = z.unsqueeze(0)
    refuse_tangents("lstm", z, c)
    if torch.is_grad_enabled() and (z.requires_grad or c.requires_grad):
        _, h, c = _Lstm.apply(pre, values, index, None, c, None)
    else:
        _, h, c, _, _ = _lstm_ops.forward(pre, values, index, None, c, None, False)
    return h, c


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class _Lstm(torch.autograd.Function):
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
        narrow = values.to(pre.dtype)
        y, h, c, gates, cells = _lstm_ops.forward(pre, narrow, index, h0, c0, lengths, True)
        ctx.save_for_backward(narrow, index, y, gates, cells, h0, c0, lengths)
        ctx.wide = values.dtype != pre.dtype
        ctx.set_materialize_grads(False)
        return y, h, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        h0, c0 = ctx.saved_tensors[5:7]
        wants_values = ctx.needs_input_grad[1]
        of_outputs = (_contiguous(dy), _contiguous(dh), _contiguous(dc))
        refuse_tangents("lstm", *of_outputs)
        made = _lstm_ops.backward(*ctx.saved_tensors, *of_outputs, ctx.wide, wants_values)
        dpre, dw, dh0, dc0 = made
        of_state = (None if h0 is None else dh0, None if c0 is None else dc0)
        return dpre, dw if wants_values else None, None, *of_state, None


# ---- One weight at many steps --------------------------------------------------------------------------------------


class SharedWeight:
    """A layer's weight for the steps of one forward pass, with its gradient as one product over all of them.

    Backward notes (x, dy) of each use; when autograd has been through all uses, dW is made by one call. Make a new one
    for each forward pass. Autocast is obeyed; the layer's bias is not used.

    What is noted between backward calls is lost on `torch.compile`, so there every use makes its own part of dW.
    """

    def __init__(self, layer: nn.Linear | BlockSparseLinear) -> None:
        weight = layer.weight
        refuse_tangents("SharedWeight", weight)
        self.layout = layer.layout if isinstance(layer, BlockSparseLinear) else None
        self.index = layer.tables(weight.device) if isinstance(layer, BlockSparseLinear) else None
        self.used: list[tuple[Tensor, Tensor]] = []  # (x [n, in], dy [n, out]) of each use, last first
        kind = "cuda" if weight.is_cuda else "cpu"
        narrow = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
        self.dtype = torch.get_autocast_dtype(kind) if narrow else weight.dtype
        self.compiled = torch.compiler.is_compiling()
        self.source: Tensor = weight if self.compiled else _Collect.apply(weight, self)
        self.weight = weight if self.compiled else weight.detach().to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> x W^T [n, out]."""
        x = x.to(self.dtype)
        refuse_tangents("SharedWeight", x)
        if self.compiled:
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

    def gradient(self) -> Tensor:
        """dW = sum of dy^T x over all uses."""
        xs, dys = zip(*self.used, strict=True)
        self.used.clear()
        wide = self.source.dtype != self.dtype
        if self.layout is None or self.index is None:
            return (torch.cat(dys).t() @ torch.cat(xs)).to(self.source.dtype)
        blocks, b, _ = self.weight.shape
        more = (self.layout.transposed, wide, None, None, False, _ops.allows_tf32(xs[0]))
        return _ops.wgrad_list(list(xs), list(dys), self.index, blocks, b, *more)[0]


class _Collect(torch.autograd.Function):
    """The weight itself. Autograd calls backward when all uses have been through theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shared: SharedWeight) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None]:
        return (ctx.shared.gradient() if ctx.shared.used else None), None


class _Use(torch.autograd.Function):
    """y = x W^T. Backward gives dx, and notes x and dy for `_Collect`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, shared: SharedWeight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.shared = shared
        return shared.product(x.contiguous(), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        refuse_tangents("linear_wgrad", dy)
        dy = dy.contiguous()
        if ctx.needs_input_grad[1]:
            ctx.shared.used.append((x.contiguous(), dy))
        return (ctx.shared.product(dy, True) if ctx.needs_input_grad[0] else None), None, None
