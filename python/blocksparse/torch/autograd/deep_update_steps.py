"""All steps of a deep-update LSTM as one autograd node, with PyTorch's products where matrices are dense.

Every step writes into its part of tensors that hold all steps, so that the gradient of each weight, gain and shift is
one call over the whole sequence, and nothing is recorded between.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._core import library, structs
from ...layout import Layout
from ..arguments import DTYPES
from ..blocks import Blocks
from ..ops import linear as ops
from ..ops.calls import blocks_of, pointer_to, scratch, stream_of, sum_dtype, view_of
from ..ops.lstm import GATES, UNITS
from ..tables import index_of
from .transforms import needs_gradient, refuse_second, refuse_tangents


class Matrix:
    """One weight for the steps of a call, in the dtype of their products."""

    def __init__(self, layer: nn.Linear | Blocks, n: int, dtype: torch.dtype) -> None:
        self.weight = layer.weight.detach().to(dtype).contiguous()
        self.wide = layer.weight.dtype != dtype
        self.layout = None if isinstance(layer, nn.Linear) else layer.layout
        if isinstance(layer, nn.Linear):
            return
        self.index = layer.tables(self.weight.device)
        self.sizes = (*blocks_of(self.weight), *layer.layout.sizes)
        self.view = view_of(self.index, layer.layout.transposed, *self.sizes)
        self.stream = stream_of(self.weight, ops.allows_tf32(self.weight))
        self.forward_space = ops.workspace("fprop", self.view, self.weight, n)
        self.backward_space = ops.workspace("dgrad", self.view, self.weight, n)

    def product(self, x: Tensor, out: Tensor) -> None:
        """Out [n, outputs] = x W^T."""
        if self.layout is None:
            torch.mm(x, self.weight.t(), out=out)
            return
        epilogue = structs.Epilogue(None, None, 0)
        given = (pointer_to(x), pointer_to(self.weight), None, ctypes.byref(epilogue), pointer_to(out))
        library.call("bs_linear_fprop", ctypes.byref(self.view), *given, self.forward_space[0], self.stream)

    def transposed(self, dy: Tensor, out: Tensor) -> None:
        """Out [n, inputs] = dy W."""
        if self.layout is None:
            torch.mm(dy, self.weight, out=out)
            return
        given = (pointer_to(dy), pointer_to(self.weight), None, pointer_to(out))
        library.call("bs_linear_dgrad", ctypes.byref(self.view), *given, self.backward_space[0], self.stream)

    def gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """dW of all steps, as wide as the layer's weight."""
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        if self.layout is None:
            return (dy.t() @ x).to(sum_dtype(dy.dtype) if self.wide else dy.dtype)
        blocks, b = self.sizes[:2]
        more = (self.layout.transposed, self.wide, None, None, False, ops.allows_tf32(x))
        made: Tensor = ops.wgrad(x, dy, self.index, blocks, b, *more)[0]
        return made


@dataclass
class Norm:
    """Gain and shift [groups, hidden] of a layer norm, and whether relu follows."""

    gain: Tensor
    shift: Tensor
    relu: bool
    epsilon: float

    def forward(self, x: Tensor, y: Tensor, stats: Tensor, factor: Tensor | None, term: Tensor | None) -> None:
        """Writes y and stats of x [n, groups, hidden]."""
        given = (pointer_to(t) for t in (x, self.gain, self.shift, factor, term))
        inputs = structs.LayerNormInputs(*given, int(self.relu), self.epsilon)
        outputs = (pointer_to(y), pointer_to(stats))
        library.call("bs_layer_norm_forward", ctypes.byref(inputs), *outputs, stream_of(x))

    def backward(self, saved: tuple[Tensor | None, ...], dy: Tensor, wanted: tuple[Tensor | None, ...]) -> None:
        """Saved: x, factor, y, stats; wanted: dx, dgain, dshift, dfactor, dterm."""
        x, factor, y, stats = saved
        tensors = (x, self.gain, self.shift, factor, y, stats)
        of_forward = structs.LayerNormSaved(*(pointer_to(t) for t in tensors), int(self.relu))
        grads = structs.LayerNormGrads(*(pointer_to(t) for t in wanted))
        given = (ctypes.byref(of_forward), pointer_to(dy), ctypes.byref(grads), stream_of(dy))
        library.call("bs_layer_norm_backward", *given)

    def gradient(self, saved: tuple[Tensor | None, ...], dy: Tensor) -> Tensor:
        """Of gain and shift [2, groups, hidden], over all steps."""
        rows = [None if t is None else t.flatten(0, 1) for t in (*saved, dy)]
        made = torch.stack([self.gain, self.shift])
        assert rows[-1] is not None
        self.backward(tuple(rows[:-1]), rows[-1], (None, made[0], made[1], None, None))
        return made


class Cell:
    """The LSTM's cell, by the op of one step that begins without h, and with a layout without blocks."""

    def __init__(self, like: Tensor, n: int, hidden: int) -> None:
        layout = _no_blocks(hidden)
        self.index = index_of(layout, like.device)
        self.weight = like.new_empty(0, UNITS, UNITS)
        self.view = view_of(self.index, False, 0, UNITS, GATES * hidden, hidden)
        self.stream = stream_of(like)
        code, view = DTYPES[like.dtype], ctypes.byref(self.view)
        sizes = [library.ask(f"bs_lstm_{which}_workspace_size", view, code, 1, n) for which in ("forward", "backward")]
        self.space, self.memory = scratch(max(sizes), like)

    def forward(self, z: Tensor, c0: Tensor, h: Tensor, c: Tensor, gates: Tensor | None) -> None:
        """Of one step: writes h, c and gates; z [n, 4, hidden]."""
        y, cells = h.unsqueeze(0), c.unsqueeze(0)
        kept = (None, None) if gates is None else (pointer_to(gates.unsqueeze(0)), pointer_to(cells))
        outputs = structs.LstmOutputs(pointer_to(y), None, None if kept[1] else pointer_to(c), *kept)
        given = (pointer_to(z.unsqueeze(0)), pointer_to(self.weight), None, pointer_to(c0), None)
        library.call("bs_lstm_forward", ctypes.byref(self.view), *given, ctypes.byref(outputs), self.space, self.stream)

    def backward(
        self,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
        dz: Tensor,
        dc0: Tensor,
    ) -> None:
        """Saved: h, gates, c, and c before; grads: of h, twice, and of c. Writes dz and dc0."""
        h, gates, c, c0 = saved
        of_step = (pointer_to(t.unsqueeze(0)) for t in (h, gates, c))
        of_forward = structs.LstmSaved(pointer_to(self.weight), None, pointer_to(c0), None, *of_step)
        dy, dh, dc = grads
        given = (None if dy is None else pointer_to(dy.unsqueeze(0)), pointer_to(dh), pointer_to(dc))
        made = structs.LstmGrads(pointer_to(dz.unsqueeze(0)), None, None, pointer_to(dc0))
        call = (ctypes.byref(of_forward), *given, 0, ctypes.byref(made), self.space, self.stream)
        library.call("bs_lstm_backward", ctypes.byref(self.view), *call)


def prepare(device: torch.device, hidden: int) -> None:
    """What the steps need on a device, which cannot go there while a graph is captured."""
    index_of(_no_blocks(hidden), device)


@functools.lru_cache
def _no_blocks(hidden: int) -> Layout:
    return Layout.from_coordinates([], [], (GATES * hidden // UNITS, hidden // UNITS), UNITS)


class Network:
    """What the steps of a call share.

    Args:
        layers: matrices, and last the gates' [4 hidden, hidden].
        epsilon: of the norms.
    """

    def __init__(self, layers: list[nn.Linear | Blocks], epsilon: float) -> None:
        self.layers, self.epsilon = layers, epsilon

    def prepare(self, like: Tensor, matrix_norm: Tensor, gate_norm: Tensor) -> None:
        """For tensors [steps, n, hidden] like that."""
        _, n, hidden = like.shape
        self.matrices = [Matrix(layer, n, like.dtype) for layer in self.layers]
        self.norms = [
            Norm(pair[0].unsqueeze(0), pair[1].unsqueeze(0), j > 0, self.epsilon) for j, pair in enumerate(matrix_norm)
        ]
        self.norms.append(Norm(gate_norm[0], gate_norm[1], False, self.epsilon))
        self.cell = Cell(like, n, hidden)


def run(network: Network, h0: Tensor, c0: Tensor, factor: Tensor, term: Tensor, *of_norms: Tensor) -> Any:
    """All steps: y [steps, n, hidden], h and c [n, hidden].

    h0 [n, hidden], c0, factor and term [steps, n, hidden]; norms [inner, 2, hidden] and [2, 4, hidden].
    """
    weights = [layer.weight for layer in network.layers]
    tensors = (h0, c0, factor, term, *of_norms, *weights)
    refuse_tangents("deep_update", *tensors)
    if torch.is_grad_enabled() and needs_gradient(*tensors):
        return _Run.apply(network, *tensors)
    return _forward(network, False, h0, c0, factor, term, *of_norms)[:3]


def _forward(
    network: Network,
    save: bool,
    h0: Tensor,
    c0: Tensor,
    factor: Tensor,
    term: Tensor,
    matrix_norm: Tensor,
    gate_norm: Tensor,
) -> tuple[Tensor, ...]:
    """y, h, c; hs and cells [1 + steps, n, hidden], gates, and of each matrix its product, norm and statistics."""
    network.prepare(factor, matrix_norm, gate_norm)
    steps, n, hidden = factor.shape
    kept, last = steps if save else 1, len(network.matrices) - 1
    hs, cells = factor.new_empty(1 + steps, n, hidden), c0.new_empty(1 + kept, n, hidden)
    hs[0], cells[0] = h0, c0
    groups = [*(last * [1]), GATES]
    made = [factor.new_empty(kept, n, g, hidden) for g in groups]
    normed = [factor.new_empty(kept, n, 1, hidden) for _ in range(last)]
    normed.append(factor.new_empty(1, n, GATES, hidden))  # which backward does not need
    stats = [c0.new_empty(kept, n, g, 2) for g in groups]
    gates = factor.new_empty(kept, n, GATES, hidden) if save else None
    for t in range(steps):
        at = t if save else 0
        h = hs[t]
        for j, (matrix, norm) in enumerate(zip(network.matrices, network.norms, strict=True)):
            z, y = made[j][at], normed[j][at if j < last else 0]
            matrix.product(h, z.flatten(1))
            inputs = (factor[t].unsqueeze(1) if j == 0 else None, term[t].unsqueeze(1) if j == 1 else None)
            norm.forward(z, y, stats[j][at], *inputs)
            h = y.flatten(1)
        c, c_next = (cells[t], cells[t + 1]) if save else (cells[t % 2], cells[(t + 1) % 2])
        network.cell.forward(normed[last][0], c, hs[t + 1], c_next, None if gates is None else gates[at])
    c = cells[steps if save else steps % 2]
    empty = factor.new_empty(0) if gates is None else gates
    return hs[1:], hs[steps].clone(), c.clone(), hs, cells, empty, *made, *normed[:last], *stats


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        network: Network,
        h0: Tensor,
        c0: Tensor,
        factor: Tensor,
        term: Tensor,
        matrix_norm: Tensor,
        gate_norm: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, h, c, *saved = _forward(network, True, h0, c0, factor, term, matrix_norm, gate_norm)
        # The network holds the parameters; saved, PyTorch refuses a backward pass after they were changed in place.
        parameters = (matrix_norm, gate_norm, *weights)
        ctx.parameters = len(parameters)
        ctx.save_for_backward(*parameters, y, factor, *saved)
        ctx.network = network
        ctx.set_materialize_grads(False)
        return y, h, c

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_tangents("deep_update", dy, dh, dc)
        of_state = [None if t is None else t.contiguous() for t in (dy, dh, dc)]
        y, *saved = ctx.saved_tensors[ctx.parameters :]
        with torch.no_grad():
            grads = _backward(ctx.network, tuple(saved), of_state, ctx.needs_input_grad[1:])
        return (None, *refuse_second("deep_update", grads, y))


def _backward(
    network: Network, saved: tuple[Tensor, ...], grads: list[Tensor | None], needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients of what `_Run.forward` takes behind the network."""
    factor, hs, cells, gates, *more = saved
    last = len(network.matrices) - 1
    made, normed, stats = more[: last + 1], more[last + 1 : 2 * last + 1], more[2 * last + 1 :]
    of_made, of_normed = [torch.empty_like(t) for t in made], [torch.empty_like(t) for t in made]
    dfactor, dterm = torch.empty_like(factor), torch.empty_like(factor)
    dy, dh, dc = grads
    spare = [torch.empty_like(hs[0]) for _ in range(2)]
    states = [torch.empty_like(cells[0]) for _ in range(2)]
    for t in reversed(range(factor.size(0))):
        step = (hs[t + 1], gates[t], cells[t + 1], cells[t])
        network.cell.backward(step, (None if dy is None else dy[t], dh, dc), of_normed[last][t], states[t % 2])
        dc = states[t % 2]
        for j in reversed(range(last + 1)):
            extra = (dfactor[t].unsqueeze(1) if j == 0 else None, dterm[t].unsqueeze(1) if j == 1 else None)
            of_norm = _saved_of(j, last, factor, made, normed, stats)
            part = tuple(None if x is None else x[t] for x in of_norm)
            network.norms[j].backward(part, of_normed[j][t], (of_made[j][t], None, None, *extra))
            out = of_normed[j - 1][t].flatten(1) if j > 0 else spare[t % 2]
            if j > 0 or t > 0 or needed[0]:
                network.matrices[j].transposed(of_made[j][t].flatten(1), out)
        dh = spare[t % 2]
    of_norms = [
        norm.gradient(_saved_of(j, last, factor, made, normed, stats), of_normed[j])
        for j, norm in enumerate(network.norms)
    ]
    xs = [hs[:-1], *(x.squeeze(2) for x in normed)]
    of_weights = [
        matrix.gradient(x, dz.flatten(2)) if wanted else None
        for matrix, x, dz, wanted in zip(network.matrices, xs, of_made, needed[6:], strict=True)
    ]
    return [dh, dc, dfactor, dterm, torch.stack(of_norms[:-1]).squeeze(2), of_norms[-1], *of_weights]


def _saved_of(
    j: int, last: int, factor: Tensor, made: list[Tensor], normed: list[Tensor], stats: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """x, factor, y and stats of all steps of a norm."""
    return made[j], factor.unsqueeze(2) if j == 0 else None, normed[j] if 0 < j < last else None, stats[j]
