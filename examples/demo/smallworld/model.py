"""A byte-level language model around one deep LSTM cell whose matrices are block-sparse, or dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import blocksparse.torch as bst
from blocksparse import Layout

SYMBOLS = 256  # byte values
GATES = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: `width` units, which the input writes and the output reads."""

    width: int
    inner: int = 2  # matrices that the state goes through before the gates: D of the formulas, 2 or more
    embedding: int = 64


def count_parameters(shape: Shape, recurrent: int | None = None) -> int:
    """Parameters of a model whose square matrices have `recurrent` entries each (None: dense)."""
    n, e, v = shape.width, shape.embedding, SYMBOLS
    recurrent = n * n if recurrent is None else recurrent
    layers = GATES + shape.inner
    return layers * recurrent + 2 * e * n + v * n + v * e + 2 * layers * n + 4 * n + 3 * v


def dense_twin(total: int, shape: Shape) -> Shape:
    """The dense shape with as nearly `total` parameters as its width allows.

    A width that is a multiple of 8, or of 4, is taken if it is within 1 %: it is kinder to the dense kernels.
    """

    def at(width: int) -> Shape:
        return Shape(width, shape.inner, shape.embedding)

    def error(width: int) -> float:
        return abs(count_parameters(at(width)) / total - 1)

    for step in (8, 4, 1):
        best = min(range(step, shape.width + step, step), key=error)
        if error(best) < 0.01:
            break
    return at(best)


# ---- The model -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Predicts the next byte, by `DeepUpdateLSTM`. For bytes x_t, with linear(h) = LayerNorm(W h), each with its own W,
    gain and shift:

        m, a = linear_m(e), linear_a(e)                  e = embedding of x_t
        h = linear_0(h) * m
        h = relu(linear_1(h) + a)
        h = relu(linear_j(h))                            j = 2 .. inner - 1
        i, f, g, o = linear_{i, f, g, o}(h)              the shift of f begins as 1; the 2017 code added that twice
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        logits = V h + bias                              rows of V have a norm of their own

    Args:
        shape: the sizes.
        layouts: of the inner matrices and, last, of the gates: inner + 1 of them. None: all dense.

    Source: openai/blocksparse, `examples/lstm/layers.py`, `LSTM_scott`.
    """

    def __init__(self, shape: Shape, layouts: Sequence[Layout] | None = None) -> None:
        super().__init__()
        n, e, self.shape = shape.width, shape.embedding, shape
        if layouts is not None and len(layouts) != shape.inner + 1:
            raise ValueError(f"[model] {len(layouts)} layouts, needs {shape.inner + 1}: {shape.inner} and the gates'")
        self.embedding = nn.Parameter(nn.init.orthogonal_(torch.empty(SYMBOLS, e)))
        self.embedding_gain = nn.Parameter(torch.ones(SYMBOLS, 1))
        self.lstm = bst.DeepUpdateLSTM(e, n, layouts, shape.inner)
        self.output = nn.Parameter(torch.randn(SYMBOLS, n) * 0.02)
        self.output_gain = nn.Parameter(torch.ones(SYMBOLS, 1))
        self.output_bias = nn.Parameter(torch.zeros(SYMBOLS))

    def start(self, n: int) -> tuple[Tensor, Tensor]:
        """The state (h, c) before any byte, [n, width] each."""
        return self.output.new_zeros(n, self.shape.width), self.output.new_zeros(n, self.shape.width)

    def forward(self, text: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """text [time, n] of byte values, state from `start` or the last call -> (logits [time, n, 256], state)."""
        table = functional.normalize(self.embedding) * self.embedding_gain
        h, c = (part.unsqueeze(0) for part in state)
        y, (h, c) = self.lstm(functional.embedding(text, table), (h, c))
        weight = functional.normalize(self.output) * self.output_gain
        return functional.linear(y, weight, self.output_bias), (h.squeeze(0), c.squeeze(0))
