"""The LSTM op as PyTorch sees it.

    lstm_forward(pre, values, index, h0, c0, lengths, save) -> (y, h, c, gates, cells)
    lstm_backward(values, index, y, gates, cells, h0, c0, lengths, dy, dh, dc, ...) -> (dpre, dw, dh0, dc0)

On the CPU both are one call of the core. Elsewhere the same ops are made of the linear op's, a step at a time, and of
one linear_wgrad over all steps: nothing is copied to the host or waited for, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import _lib
from . import _ops

_lib_def = _ops._ops
_lib_def.define(
    "lstm_forward(Tensor pre, Tensor values, Tensor index, Tensor? h0, Tensor? c0, Tensor? lengths, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_lib_def.define(
    "lstm_backward(Tensor values, Tensor index, Tensor y, Tensor gates, Tensor cells, Tensor? h0, Tensor? c0, "
    "Tensor? lengths, Tensor? dy, Tensor? dh, Tensor? dc, bool wide=False, bool weight_gradient=True) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def check_shapes(pre: Tensor, values: Tensor) -> None:
    """What outputs are shaped by; all else is checked by the core."""
    if pre.dim() != 4 or pre.size(2) != 4:
        raise ValueError(f"[lstm] pre is {list(pre.shape)}, needs [steps, n, 4, hidden]")
    if values.dim() != 3:
        raise ValueError(f"[lstm] values are {list(values.shape)}, needs [blocks, b, b]")


# ---- What the outputs look like ------------------------------------------------------------------------------------


@torch.library.register_fake("blocksparse::lstm_forward", lib=_lib_def)
def _empty_forward(
    pre: Tensor, values: Tensor, index: Tensor, h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, save: bool
) -> _Five:
    check_shapes(pre, values)
    _ops._check_devices(pre, values, index, h0, c0, lengths)
    steps, n, _, hidden = pre.shape
    state = _ops.sum_dtype(pre.dtype)
    kept = steps if save else 0
    return (
        pre.new_empty(steps, n, hidden),
        pre.new_empty(n, hidden),
        pre.new_empty(n, hidden, dtype=state),
        pre.new_empty(kept, n, 4, hidden),
        pre.new_empty(kept, n, hidden, dtype=state),
    )


@torch.library.register_fake("blocksparse::lstm_backward", lib=_lib_def)
def _empty_backward(
    values: Tensor,
    index: Tensor,
    y: Tensor,
    gates: Tensor,
    cells: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    wide: bool = False,
    weight_gradient: bool = True,
) -> _Four:
    _, n, hidden = y.shape
    state = _ops.sum_dtype(y.dtype)
    return (
        torch.empty_like(gates),
        values.new_empty(values.shape if weight_gradient else (0,), dtype=state if wide else y.dtype),
        y.new_empty(n, hidden),
        y.new_empty(n, hidden, dtype=state),
    )


# ---- CPU: the core's op --------------------------------------------------------------------------------------------


def _workspace(which: str, view: _lib.LayoutView, x: Tensor, steps: int) -> tuple[_lib.Workspace, Tensor]:
    code = _ops._DTYPES.get(x.dtype, -1)
    size = _lib.ask(f"bs_lstm_{which}_workspace_size", ctypes.byref(view), code, steps, x.size(1))
    memory = x.new_empty(size, dtype=torch.uint8)
    return _lib.Workspace(memory.data_ptr(), size), memory


def _lengths_pointer(lengths: Tensor | None, n: int) -> int | None:
    if lengths is None:
        return None
    if lengths.dtype != torch.int64 or lengths.shape != (n,) or not lengths.is_contiguous():
        raise ValueError(f"[lstm] lengths are {lengths.dtype} {list(lengths.shape)}, needs int64 [{n}]")
    return lengths.data_ptr()


def _forward(
    pre: Tensor, values: Tensor, index: Tensor, h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, save: bool
) -> _Five:
    made = _empty_forward(pre, values, index, h0, c0, lengths, save)
    y, h, c, gates, cells = made
    steps, n, _, hidden = pre.shape
    view = _ops._view(index, False, *_ops._blocks(values), 4 * hidden, hidden)
    workspace, _memory = _workspace("forward", view, pre, steps)
    kept = (_ops._pointer(gates), _ops._pointer(cells)) if save else (None, None)
    outputs = _lib.LstmOutputs(_ops._pointer(y), _ops._pointer(h), _ops._pointer(c), *kept)
    inputs = (_ops._pointer(pre), _ops._pointer(values), _ops._pointer(h0), _ops._pointer(c0))
    pointer = _lengths_pointer(lengths, n)
    call = (ctypes.byref(view), *inputs, pointer, ctypes.byref(outputs), workspace, _ops._stream(pre))
    _lib.call("bs_lstm_forward", *call)
    return made


def _backward(
    values: Tensor,
    index: Tensor,
    y: Tensor,
    gates: Tensor,
    cells: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    wide: bool = False,
    weight_gradient: bool = True,
) -> _Four:
    made = _empty_backward(values, index, y, gates, cells, h0, c0, lengths, dy, dh, dc, wide, weight_gradient)
    dpre, dw, dh0, dc0 = made
    steps, n, hidden = y.shape
    view = _ops._view(index, False, *_ops._blocks(values), 4 * hidden, hidden)
    workspace, _memory = _workspace("backward", view, y, steps)
    state = (_ops._pointer(values), _ops._pointer(h0), _ops._pointer(c0), _lengths_pointer(lengths, n))
    saved = _lib.LstmSaved(*state, _ops._pointer(y), _ops._pointer(gates), _ops._pointer(cells))
    of_weight = _ops._pointer(dw) if weight_gradient else None
    grads = _lib.LstmGrads(_ops._pointer(dpre), of_weight, _ops._pointer(dh0), _ops._pointer(dc0))
    of_outputs = (_ops._pointer(dy), _ops._pointer(dh), _ops._pointer(dc))
    call = (ctypes.byref(view), ctypes.byref(saved), *of_outputs, 0, ctypes.byref(grads), workspace, _ops._stream(y))
    _lib.call("bs_lstm_backward", *call)
    return made


# ---- Elsewhere: a step at a time -----------------------------------------------------------------------------------


def forward_by_steps(
    pre: Tensor, values: Tensor, index: Tensor, h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, save: bool
) -> _Five:
    """`lstm_forward` of linear ops. z is rounded to the dtype of pre before the gates, as it is not in the core."""
    y, _, _, gates, cells = made = _empty_forward(pre, values, index, h0, c0, lengths, save)
    steps, n, _, hidden = pre.shape
    state = cells.dtype
    h = pre.new_zeros(n, hidden) if h0 is None else h0
    c = pre.new_zeros(n, hidden, dtype=state) if c0 is None else c0
    for t in range(steps):
        z = _ops.fprop(h, values, index, 4 * hidden, False, None, pre[t].flatten(1)).view(n, 4, hidden).to(state)
        i, f, _, o = z.sigmoid().unbind(1)
        g = z[:, 2].tanh()
        c_t = f * c + i * g
        h_t = (o * c_t.tanh()).to(pre.dtype)
        kept = torch.stack([i, f, g, o], 1).to(pre.dtype)
        if lengths is None:
            h, c = h_t, c_t
        else:
            runs = (t < lengths).view(n, 1)
            h, c = torch.where(runs, h_t, h), torch.where(runs, c_t, c)
            h_t, c_t, kept = h_t * runs, c_t * runs, kept * runs.view(n, 1, 1)
        y[t] = h_t
        if save:
            gates[t], cells[t] = kept, c_t
    made[1].copy_(h)
    made[2].copy_(c)
    return made


def backward_by_steps(
    values: Tensor,
    index: Tensor,
    y: Tensor,
    gates: Tensor,
    cells: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    wide: bool = False,
    weight_gradient: bool = True,
) -> _Four:
    """`lstm_backward` of linear ops."""
    made = _empty_backward(values, index, y, gates, cells, h0, c0, lengths, dy, dh, dc, wide, weight_gradient)
    dpre, dw, dh0, dc0 = made
    steps, n, hidden = y.shape
    state = cells.dtype
    dh_t = y.new_zeros(n, hidden, dtype=state) if dh is None else dh.to(state)
    dc_t = y.new_zeros(n, hidden, dtype=state) if dc is None else dc
    zero = y.new_zeros(n, hidden, dtype=state) if c0 is None else c0
    for t in reversed(range(steps)):
        i, f, g, o = gates[t].to(state).unbind(1)
        squashed = cells[t].tanh()
        dh_all = dh_t if dy is None else dh_t + dy[t]
        dc_all = dc_t + dh_all * o * (1 - squashed * squashed)
        before = cells[t - 1] if t > 0 else zero
        dz = torch.stack(
            [
                dc_all * g * i * (1 - i),
                dc_all * before * f * (1 - f),
                dc_all * i * (1 - g * g),
                dh_all * squashed * o * (1 - o),
            ],
            1,
        )
        if lengths is None:
            dpre[t] = dz
            dh_t, dc_t = _ops.dgrad(dpre[t].flatten(1), values, index, hidden).to(state), dc_all * f
            continue
        runs = (t < lengths).view(n, 1)
        dpre[t] = torch.where(runs.view(n, 1, 1), dz, 0)
        back = _ops.dgrad(dpre[t].flatten(1), values, index, hidden).to(state)
        dh_t, dc_t = torch.where(runs, back, dh_t), torch.where(runs, dc_all * f, dc_t)
    dh0.copy_(dh_t)
    dc0.copy_(dc_t)
    if weight_gradient:
        start = y.new_zeros(n, hidden) if h0 is None else h0
        xs, dys = [start, y[:-1].flatten(0, 1)], [dpre[0].flatten(1), dpre[1:].flatten(0, 1).flatten(1)]
        dw.copy_(_ops.wgrad_list(xs, dys, index, *values.shape[:2], False, wide)[0]) if steps else dw.zero_()
    return made


_lib_def.impl("lstm_forward", _forward, "CPU")
_lib_def.impl("lstm_backward", _backward, "CPU")
_lib_def.impl("lstm_forward", forward_by_steps, "CUDA")
_lib_def.impl("lstm_backward", backward_by_steps, "CUDA")

forward = torch.ops.blocksparse.lstm_forward.default
backward = torch.ops.blocksparse.lstm_backward.default
