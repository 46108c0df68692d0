"""The LSTM with a block-sparse recurrent weight, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import Layout, need_layout
from ..arguments import need_lengths, need_strided, need_tensor, state_of
from ..autograd import traced
from ..autograd.lstm import Lstm
from ..autograd.transforms import needs_gradient, refuse_tangents
from ..ops import lstm as ops
from ..ops.calls import sum_dtype
from ..tables import index_of

State = tuple[Tensor, Tensor]  # h [n, hidden], c [n, hidden]


def lstm(
    pre: Tensor,
    values: Tensor,
    layout: Layout,
    state: State | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, State]:
    """A sequence through an LSTM: z = pre[t] + W h, c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c).

    The gates' rows of W [4 hidden, hidden] are in the order i, f, g, o, as in `torch.nn.LSTM`. Differentiable any
    number of times, backward; knows autocast and `torch.compile`. A gradient that is to have gradients (create_graph)
    is composed of some ops a step. For truncated backpropagation through time pass the last chunk's state, detached.

    Args:
        pre: [steps, n, 4 * hidden] or [steps, n, 4, hidden]: the input's projection and all biases.
        values: [layout.blocks, b, b]. What is not contiguous is copied at every call.
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
    need_strided("lstm", pre=pre, values=values)
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
        h0, c0 = h0.to(dtype).contiguous(), c0.to(sum_dtype(dtype)).contiguous()
    if lengths is not None:
        lengths = lengths.to(pre.device, torch.int64).contiguous()
    pre, values = pre.contiguous(), values.contiguous()
    refuse_tangents("lstm", pre, values, h0, c0)
    if traced.is_tracing():
        y, h, c = traced.lstm(pre, values, index, h0, c0, lengths)
    elif torch.is_grad_enabled() and needs_gradient(pre, values, h0, c0):
        y, h, c, _, _ = Lstm.apply(pre, values, index, h0, c0, lengths)
    else:
        y, h, c, _, _ = ops.forward(pre, values.to(dtype), index, h0, c0, lengths, False)
    return y, (h, c)


def apply_cell(z: Tensor, values: Tensor, index: Tensor, c: Tensor) -> State:
    """One step from z [n, 4, hidden] and c [n, hidden], without a product: -> h, c. values and index are not read."""
    pre, values = z.unsqueeze(0), values.contiguous()
    refuse_tangents("lstm", z, c)
    if traced.is_tracing():
        _, h, c = traced.lstm(pre, values, index, None, c, None)
    elif torch.is_grad_enabled() and needs_gradient(z, c):
        _, h, c, _, _ = Lstm.apply(pre, values, index, None, c, None)
    else:
        _, h, c, _, _ = ops.forward(pre, values, index, None, c, None, False)
    return h, c
