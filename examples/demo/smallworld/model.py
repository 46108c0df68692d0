"""A byte-level language model around one deep LSTM cell whose matrices are block-sparse, or dense.

Everything is features-last, [tokens, features]. Features-first would make the sparse products up to twice as fast at
b = 8, but PyTorch has no LayerNorm for it, and one written out of plain ops costs three times more than is gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.recurrent import SharedWeight

SYMBOLS = 256  # byte values
EPSILON = 1e-6  # of the layer norms
GATES = 4  # i, f, o, u
FORGET_BIAS = 1.0  # once, in the layer norm's shift; the 2017 code added it twice


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: `width` units, of which every `stride`-th is written by the input and read by the output."""

    width: int
    inner: int = 4  # matrices that the state goes through before the gates: D of the formulas, 2 or more
    stride: int = 1
    embedding: int = 64

    @property
    def ports(self) -> int:
        """Units that input and output touch: P of the formulas."""
        return -(-self.width // self.stride)


def count_parameters(shape: Shape, recurrent: int | None = None) -> int:
    """Parameters of a model whose square matrices have `recurrent` entries each (None: dense)."""
    n, p, e, v = shape.width, shape.ports, shape.embedding, SYMBOLS
    recurrent = n * n if recurrent is None else recurrent
    layers = GATES + shape.inner
    return layers * recurrent + 2 * e * p + v * p + v * e + 2 * layers * n + 4 * p + 3 * v


def dense_twin(total: int, shape: Shape) -> Shape:
    """The dense shape (every unit a port) with as nearly `total` parameters as its width allows.

    A width that is a multiple of 8, or of 4, is taken if it is within 1 %: it is kinder to the dense kernels.
    """

    def at(width: int) -> Shape:
        return Shape(width, shape.inner, 1, shape.embedding)

    def error(width: int) -> float:
        return abs(count_parameters(at(width)) / total - 1)

    for step in (8, 4, 1):
        best = min(range(step, shape.width + step, step), key=error)
        if error(best) < 0.01:
            break
    return at(best)


class _Linear:
    """A layer's weight with the gain and shift of its layer norm, for the time steps of one chunk."""

    def __init__(self, layer: nn.Linear | bst.BlockSparseLinear, gain: Tensor, shift: Tensor) -> None:
        self.matmul, self.gain, self.shift = SharedWeight(layer), gain, shift

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> LayerNorm(x W^T) [n, out]."""
        return _layer_norm(self.matmul(x), self.gain, self.shift)


# ---- The model -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Predicts the next byte. For bytes x_t, with linear(h) = LayerNorm(W h) and its own W, gain and shift each time:

        m, a = linear_m(e), linear_a(e)                  e = embedding of x_t; into the ports alone
        h = linear_0(h) * m
        h = relu(linear_1(h) + a)
        h = relu(linear_j(h))                            j = 2 .. inner - 1
        i, f, o, u = linear_{i, f, o, u}(h)
        c = sigmoid(f) * c + sigmoid(i) * tanh(u)
        h = sigmoid(o) * tanh(c)
        logits = V h + bias                              from the ports alone; rows of V have a norm of their own

    Args:
        shape: the sizes.
        layouts: of the inner matrices and, last, of the gates: inner + 1 of them. None: all dense.

    Source: openai/blocksparse, `examples/lstm/layers.py`, `LSTM_scott`.
    """

    def __init__(self, shape: Shape, layouts: Sequence[Layout] | None = None) -> None:
        super().__init__()
        n, p, e, self.shape = shape.width, shape.ports, shape.embedding, shape
        if layouts is not None and len(layouts) != shape.inner + 1:
            raise ValueError(f"[model] {len(layouts)} layouts, needs {shape.inner + 1}: {shape.inner} and the gates'")
        self.embedding = nn.Parameter(nn.init.orthogonal_(torch.empty(SYMBOLS, e)))
        self.embedding_gain = nn.Parameter(torch.ones(SYMBOLS, 1))
        self.input = nn.Parameter(torch.randn(2, p, e) / e**0.5)
        self.input_norm = nn.Parameter(_norms(2, p))
        self.inner = nn.ModuleList(_square(n, None if layouts is None else layouts[j]) for j in range(shape.inner))
        self.inner_norm = nn.Parameter(_norms(shape.inner, n))
        self.gates = _square(n, None if layouts is None else layouts[-1].stack(GATES), GATES)
        self.gates_norm = nn.Parameter(_norms(GATES, n))
        self.output = nn.Parameter(torch.randn(SYMBOLS, p) * 0.02)
        self.output_gain = nn.Parameter(torch.ones(SYMBOLS, 1))
        self.output_bias = nn.Parameter(torch.zeros(SYMBOLS))
        with torch.no_grad():
            self.gates_norm[1, 1] = FORGET_BIAS

    def start(self, n: int) -> tuple[Tensor, Tensor]:
        """The state (h, c) before any byte, [n, width] each."""
        return self.output.new_zeros(n, self.shape.width), self.output.new_zeros(n, self.shape.width)

    def forward(self, text: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """text [time, n] of byte values, state from `start` or the last call -> (logits [time, n, 256], state)."""
        h, c = state
        inner = [_Linear(layer, *norm) for layer, norm in zip(self.inner, self.inner_norm, strict=True)]
        gates = _Linear(self.gates, *self.gates_norm.unbind(1))
        seen = []
        for factor, term in zip(*(port.unbind() for port in self._ports_of(text)), strict=True):  # [n, width] each
            h, c = self._step(h, c, factor, term, inner, gates)
            seen.append(h)
        read = torch.stack(seen)[..., :: self.shape.stride]  # [time, n, ports]
        weight = functional.normalize(self.output) * self.output_gain
        return functional.linear(read, weight, self.output_bias), (h, c)

    def _ports_of(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """m and a [time, n, width] of text [time, n], from a table of all symbols; 1 and 0 where there is no port."""
        e = functional.normalize(self.embedding) * self.embedding_gain
        tables = []
        for weight, norm, neutral in zip(self.input, self.input_norm, (1.0, 0.0), strict=True):
            port = _layer_norm(functional.linear(e, weight), *norm)
            table = torch.full((SYMBOLS, self.shape.width), neutral, dtype=port.dtype)
            table[:, :: self.shape.stride] = port
            tables.append(functional.embedding(text, table))
        return tables[0], tables[1]

    def _step(
        self, h: Tensor, c: Tensor, factor: Tensor, term: Tensor, inner: Sequence[_Linear], gates: _Linear
    ) -> tuple[Tensor, Tensor]:
        """One byte: h, c, factor, term [n, width] -> h, c."""
        for j, linear in enumerate(inner):
            h = linear(h)
            if j == 0:
                h = h * factor
            elif j == 1:
                h = (h + term).relu()
            else:
                h = h.relu()
        z = gates.matmul(h).view(-1, GATES, self.shape.width)  # [n, 4, width]
        z = functional.layer_norm(z, z.shape[-1:], eps=EPSILON)  # of each gate alone
        z, u = torch.addcmul(gates.shift, z, gates.gain).split((3, 1), 1)
        i, f, o = z.sigmoid().unbind(1)
        c = f * c + i * u.squeeze(1).tanh()
        return o * c.tanh(), c


def _square(n: int, layout: Layout | None, times: int = 1) -> nn.Linear | bst.BlockSparseLinear:
    """`times` square matrices [n, n], one below the other, each the identity at first: W h = h."""
    if layout is not None:
        return bst.BlockSparseLinear(n, times * n, layout, bias=False).identity_init_()
    linear = nn.Linear(n, times * n, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(n).repeat(times, 1))
    return linear


def _norms(count: int, n: int) -> Tensor:
    """The gain, 1, and the shift, 0, of `count` layer norms: [count, 2, n]."""
    return torch.stack([torch.ones(count, n), torch.zeros(count, n)], 1)


def _layer_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gain, shift, EPSILON)
