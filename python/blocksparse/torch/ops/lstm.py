"""The LSTM op as PyTorch sees it.

    lstm_forward(pre, values, index, h0, c0, lengths, save) -> (y, h, c, gates, cells)
    lstm_backward(values, index, y, gates, cells, h0, c0, lengths, dy, dh, dc, ...) -> (dpre, dw, dh0, dc0)

Gradients of what was not given are empty.

Both are one call of the core. On a card nothing is copied to the host or waited for, so they can be captured in a CUDA
graph.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..._core import library, structs
from ..arguments import DTYPES
from .calls import blocks_of, check_devices, lengths_pointer, pointer_to, scratch, stream_of, sum_dtype, view_of
from .registry import OPS, register

GATES = 4  # i, f, g, o
UNITS = 8  # a multiple of which the core's cells take

OPS.define(
    "lstm_forward(Tensor pre, Tensor values, Tensor index, Tensor? h0, Tensor? c0, Tensor? lengths, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
OPS.define(
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
    _check_blocks(values)


def _check_blocks(values: Tensor) -> None:
    if values.dim() != 3:
        raise ValueError(f"[lstm] values are {list(values.shape)}, needs [blocks, b, b]")


# ---- What the outputs look like ------------------------------------------------------------------------------------


@torch.library.register_fake("blocksparse::lstm_forward", lib=OPS)
def _empty_forward(
    pre: Tensor, values: Tensor, index: Tensor, h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, save: bool
) -> _Five:
    check_shapes(pre, values)
    check_devices(pre, values, index, h0, c0, lengths, op="lstm")
    steps, n, _, hidden = pre.shape
    state = sum_dtype(pre.dtype)
    kept = steps if save else 0
    return (
        pre.new_empty(steps, n, hidden),
        pre.new_empty(n, hidden),
        pre.new_empty(n, hidden, dtype=state),
        pre.new_empty(kept, n, 4, hidden),
        pre.new_empty(kept, n, hidden, dtype=state),
    )


@torch.library.register_fake("blocksparse::lstm_backward", lib=OPS)
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
    if y.dim() != 3:
        raise ValueError(f"[lstm] y is {list(y.shape)}, needs [steps, n, hidden]")
    _check_blocks(values)
    check_devices(y, values, index, gates, cells, h0, c0, lengths, dy, dh, dc, op="lstm")
    steps, n, hidden = y.shape
    state = sum_dtype(y.dtype)
    return (
        y.new_empty(steps, n, 4, hidden),
        values.new_empty(values.shape if weight_gradient else (0,), dtype=state if wide else y.dtype),
        y.new_empty(0 if h0 is None else n, hidden),
        y.new_empty(0 if c0 is None else n, hidden, dtype=state),
    )


# ---- Kernels over ctypes -------------------------------------------------------------------------------------------


def _pointer(x: Tensor | None) -> Any:
    return pointer_to(x, "lstm")


def _workspace(which: str, view: structs.LayoutView, x: Tensor, steps: int) -> tuple[structs.Workspace, Tensor]:
    code = DTYPES.get(x.dtype, -1)
    size = library.ask(f"bs_lstm_{which}_workspace_size", ctypes.byref(view), code, steps, x.size(1))
    return scratch(size, x)


def _forward(
    pre: Tensor, values: Tensor, index: Tensor, h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, save: bool
) -> _Five:
    made = _empty_forward(pre, values, index, h0, c0, lengths, save)
    y, h, c, gates, cells = made
    steps, n, _, hidden = pre.shape
    view = view_of(index, False, *blocks_of(values), 4 * hidden, hidden, "lstm")
    workspace, _memory = _workspace("forward", view, pre, steps)
    kept = (_pointer(gates), _pointer(cells)) if save else (None, None)
    outputs = structs.LstmOutputs(_pointer(y), _pointer(h), _pointer(c), *kept)
    inputs = (_pointer(pre), _pointer(values), _pointer(h0), _pointer(c0))
    pointer = lengths_pointer(lengths, n)
    call = (ctypes.byref(view), *inputs, pointer, ctypes.byref(outputs), workspace, stream_of(pre))
    library.call("bs_lstm_forward", *call)
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
    view = view_of(index, False, *blocks_of(values), 4 * hidden, hidden, "lstm")
    workspace, _memory = _workspace("backward", view, y, steps)
    state = (_pointer(values), _pointer(h0), _pointer(c0), lengths_pointer(lengths, n))
    saved = structs.LstmSaved(*state, _pointer(y), _pointer(gates), _pointer(cells))
    of_weight = _pointer(dw) if weight_gradient else None
    of_state = (None if h0 is None else _pointer(dh0), None if c0 is None else _pointer(dc0))
    grads = structs.LstmGrads(_pointer(dpre), of_weight, *of_state)
    of_outputs = (_pointer(dy), _pointer(dh), _pointer(dc))
    call = (ctypes.byref(view), ctypes.byref(saved), *of_outputs, 0, ctypes.byref(grads), workspace, stream_of(y))
    library.call("bs_lstm_backward", *call)
    return made


KERNELS, CUDA_KERNELS = register("lstm", {"lstm_forward": _forward, "lstm_backward": _backward})

forward = torch.ops.blocksparse.lstm_forward.default
backward = torch.ops.blocksparse.lstm_backward.default
