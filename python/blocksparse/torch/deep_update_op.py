"""All steps of a deep-update LSTM whose matrices are all block-sparse: two calls of the core, forward and backward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _lib
from . import _ops
from ._lstm_ops import _lengths_pointer
from .modules import BlockSparseLinear

# What the core is given: h0, c0, factor, term, norms of the matrices [inner, 2, H] and the gates [2, 4, H], weights.
Given = Sequence[Tensor]
STATE, NORMS, WEIGHTS = slice(0, 4), slice(4, 6), slice(6, None)


class Network:
    """The layouts of a network's matrices, and last the gates'; their weights go with the tensors of each call.

    Args:
        layers: the matrices.
        epsilon: of the norms.
    """

    def __init__(self, layers: Sequence[BlockSparseLinear], epsilon: float) -> None:
        self.layers, self.epsilon = layers, epsilon

    def inputs(self, given: Given, lengths: Tensor | None) -> _lib.DeepUpdateInputs:
        """As the core takes them; the tensors must outlive it."""
        h0, c0, factor, term = given[STATE]
        norms = self.norms(*given[NORMS])
        matrices = (_lib.DeepUpdateMatrix * len(self.layers))()
        for matrix, layer, weight, (gain, shift) in zip(matrices, self.layers, given[WEIGHTS], norms, strict=True):
            sizes = (*_ops._blocks(weight), *layer.layout.sizes)
            matrix.layout = ctypes.pointer(_ops._view(layer.tables(weight.device), layer.layout.transposed, *sizes))
            matrix.w, matrix.gain, matrix.shift = (_ops._pointer(t) for t in (weight, gain, shift))
        pointers = (_ops._pointer(t) for t in (factor, term, h0, c0))
        of_lengths = _lengths_pointer(lengths, factor.size(1))
        return _lib.DeepUpdateInputs(matrices, len(self.layers), *pointers, of_lengths, self.epsilon)

    @staticmethod
    def norms(of_matrices: Tensor, of_gates: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(gain, shift) of each, as parts of these."""
        gain, shift = of_gates.flatten(1).unbind()
        return [*((pair[0], pair[1]) for pair in of_matrices), (gain, shift)]


def run(network: Network, lengths: Tensor | None, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [steps, n, H], h and c [n, H].

    Args:
        network: layouts.
        lengths: steps of each sequence, int64 [n]; None: all.
        given: h0 [n, H], c0, factor and term [steps, n, H], all contiguous; norms [inner, 2, H] and [2, 4, H]; the
            weights, as they are: products are of factor's dtype.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        made: tuple[Tensor, Tensor, Tensor] = _Run.apply(network, lengths, *given)
        return made
    return _forward(network, lengths, _narrowed(given), False)[:3]


def _narrowed(given: Given) -> list[Tensor]:
    dtype = given[STATE][2].dtype
    return [*given[:6], *(weight.detach().to(dtype) for weight in given[WEIGHTS])]


def _memory(like: Tensor, which: str, inputs: _lib.DeepUpdateInputs) -> tuple[Tensor, _lib.Workspace]:
    memory = like.new_empty(_lib.ask(f"bs_deep_update_{which}_size", ctypes.byref(inputs)), dtype=torch.uint8)
    return memory, _lib.Workspace(memory.data_ptr(), memory.numel())


def _forward(
    network: Network, lengths: Tensor | None, given: Given, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, h, c and what the backward pass needs."""
    h0, c0, factor, _ = given[STATE]
    inputs = network.inputs(given, lengths)
    y, h, c = torch.empty_like(factor), torch.empty_like(h0), torch.empty_like(c0)
    saved, to_save = _memory(factor, "saved", inputs) if save else (factor.new_empty(0), _lib.Workspace())
    _scratch, workspace = _memory(factor, "forward_workspace", inputs)
    made = (_ops._pointer(t) for t in (y, h, c))
    stream = _ops._stream(factor, _ops.allows_tf32(factor))
    _lib.call("bs_deep_update_forward", ctypes.byref(inputs), *made, to_save, workspace, stream)
    return y, h, c, saved


class _Run(torch.autograd.Function):
    """Weights may be wider than factor (autocast): their gradients are as wide as they are."""

    @staticmethod
    def forward(ctx: Any, network: Network, lengths: Tensor | None, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        narrow = _narrowed(given)
        y, h, c, saved = _forward(network, lengths, narrow, True)
        ctx.save_for_backward(lengths, y, saved, *narrow)
        ctx.network = network
        ctx.wide = [weight.dtype != y.dtype for weight in given[WEIGHTS]]
        ctx.set_materialize_grads(False)
        return y, h, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        lengths, y, saved, *given = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        grads = [
            torch.empty_like(t) if t_needed or 2 <= i < 6 else None
            for i, (t, t_needed) in enumerate(zip(given, needed, strict=True))
        ]
        for i, wide in enumerate(ctx.wide, 6):
            if needed[i] and wide:
                grads[i] = torch.empty_like(given[i], dtype=_ops.sum_dtype(y.dtype))
        _backward(ctx.network, lengths, given, (y, saved), (dy, dh, dc), grads)
        return (None, None, *grads)


def _backward(
    network: Network,
    lengths: Tensor | None,
    given: Given,
    made: tuple[Tensor, Tensor],
    of_outputs: tuple[Tensor | None, ...],
    grads: list[Tensor | None],
) -> None:
    """Writes gradients of what was given; None: not wanted."""
    y, saved = made
    inputs = network.inputs(given, lengths)
    of_norms = [t for t in grads[NORMS] if t is not None]
    matrices = (_lib.DeepUpdateMatrixGrads * len(network.layers))()
    for matrix, dw, (dgain, dshift) in zip(matrices, grads[WEIGHTS], network.norms(*of_norms), strict=True):
        matrix.w, matrix.gain, matrix.shift = (_ops._pointer(t) for t in (dw, dgain, dshift))
    dh0, dc0, dfactor, dterm = grads[STATE]
    wanted = _lib.DeepUpdateGrads(matrices, *(_ops._pointer(t) for t in (dfactor, dterm, dh0, dc0)))
    contiguous = [None if t is None else t.contiguous() for t in of_outputs]
    _scratch, workspace = _memory(y, "backward_workspace", inputs)
    _lib.call(
        "bs_deep_update_backward",
        *(ctypes.byref(inputs), _ops._pointer(y), _lib.Workspace(saved.data_ptr(), saved.numel())),
        *(_ops._pointer(t) for t in contiguous),
        *(ctypes.byref(wanted), workspace, _ops._stream(y, _ops.allows_tf32(y))),
    )
