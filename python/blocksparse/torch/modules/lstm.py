"""LSTMs with block-sparse recurrent weights: `BlockSparseLSTM` and `MultiplicativeLSTM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layout import Layout
from .. import convert
from ..autograd import sequence
from ..autograd.multiplicative import Multiplicative
from ..functional.lstm import State, apply_lstm
from ..functional.shared_weight import SharedWeight
from ..ops.lstm import GATES, UNITS
from .linear import BlockSparseLinear
from .recurrent import Recurrent, cell, inputs_of, per_layer, projection, run_steps, stack_gates, start_of


class BlockSparseLSTM(Recurrent):
    """`torch.nn.LSTM` with recurrent weights that are zero outside of the blocks of a layout.

    `input[i]` and `recurrent[i]` are the linear layers of layer i; all of its bias is the input's. Gates are in the
    order i, f, g, o.

    Args:
        input_size: features of x.
        hidden_size: units of a layer, a multiple of the block size.
        layout: of one gate's weight [hidden, hidden], for all four; or of W [4 hidden, hidden]. A list: one a layer.
        num_layers: how many there are, each reading the one below.
        bias: whether there is one.
        batch_first: x is [n, steps, features], and y.
        dropout: between layers.
        input_layout: of the input's weight [4 hidden, features], which is dense by default. A list: one a layer.
        forget_bias: added to the forget gate's bias at the start.
        bidirectional: False; see below.
        proj_size: 0; see below.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: sizes that do not fit each other.
        NotImplementedError: bidirectional or proj_size is asked for, which this does not have.
    """

    input: Any  # nn.ModuleList of nn.Linear or BlockSparseLinear
    recurrent: Any  # nn.ModuleList of BlockSparseLinear

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        layout: Layout | Sequence[Layout],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        *,
        input_layout: Layout | Sequence[Layout] | None = None,
        forget_bias: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_layers, batch_first, dropout)
        name = "BlockSparseLSTM"
        if bidirectional:
            raise NotImplementedError(f"[{name}] has no bidirectional: take two, one over the steps in reverse")
        if proj_size != 0:
            raise NotImplementedError(f"[{name}] has no proj_size: put a linear layer behind it")
        self.input_size = input_size = inputs_of(name, input_size)
        self.input, self.recurrent = nn.ModuleList(), nn.ModuleList()
        layouts = per_layer(name, "layouts", layout, num_layers)
        input_layouts = per_layer(name, "input layouts", input_layout, num_layers)
        for i, (of_state, of_input) in enumerate(zip(layouts, input_layouts, strict=True)):
            stacked = stack_gates(name, of_state, hidden_size)
            width = input_size if i == 0 else hidden_size
            self.input.append(projection(name, width, GATES * hidden_size, of_input, bias, device, dtype))
            self.recurrent.append(
                BlockSparseLinear(hidden_size, GATES * hidden_size, stacked, False, device=device, dtype=dtype)
            )
            if bias and forget_bias != 0:
                with torch.no_grad():
                    self.input[i].bias[hidden_size : 2 * hidden_size].add_(forget_bias)

    def run_layer(self, i: int, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
        """See `Recurrent`."""
        layer, pre = self.recurrent[i], self.input[i](x)
        return apply_lstm(pre, layer.weight, layer.tables(pre.device), layer.layout.sizes, state, lengths)

    @classmethod
    def from_dense(
        cls,
        dense: nn.LSTM,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | Sequence[Layout] | None = None,
    ) -> BlockSparseLSTM:
        """With the recurrent blocks of a dense LSTM that have the largest norms, or with those of a given layout.

        By density each gate keeps the blocks that are its own largest. A list of layouts has one for each layer.

        Raises:
            ValueError: not exactly one of density and layout is given, sizes do not fit, or the dense one is
                bidirectional or projects.
        """
        if (density is None) == (layout is None):
            raise ValueError("[from_dense] needs density or layout, one of them")
        if dense.bidirectional or dense.proj_size > 0:
            raise ValueError("[from_dense] the LSTM is bidirectional or projects, needs a plain one")
        layers, hidden = dense.num_layers, dense.hidden_size
        weights = [getattr(dense, f"weight_hh_l{i}") for i in range(layers)]
        if layout is None:
            layout = [convert.select_blocks(w, density or 0.0, block_size) for w in weights]
        layouts = per_layer("from_dense", "layouts", layout, layers)
        shape: Any = dense.input_size, hidden, layouts, layers, dense.bias, dense.batch_first, dense.dropout
        made = cls(*shape, device=weights[0].device, dtype=weights[0].dtype)
        with torch.no_grad():
            for i, w in enumerate(weights):
                made.recurrent[i].weight.copy_(convert.from_dense(w, made.recurrent[i].layout))
                made.input[i].weight.copy_(getattr(dense, f"weight_ih_l{i}"))
                if dense.bias:
                    made.input[i].bias.copy_(getattr(dense, f"bias_ih_l{i}") + getattr(dense, f"bias_hh_l{i}"))
        return made

    def to_dense(self) -> nn.LSTM:
        """The same network as `torch.nn.LSTM`, zeros and all."""
        weight = self.recurrent[0].weight
        bias = self.input[0].bias is not None
        options = {"device": weight.device, "dtype": weight.dtype}
        dense = nn.LSTM(
            self.input_size, self.hidden_size, self.num_layers, bias, self.batch_first, self.dropout, **options
        )
        with torch.no_grad():
            for i, (of_input, recurrent) in enumerate(zip(self.input, self.recurrent, strict=True)):
                full = of_input if isinstance(of_input, nn.Linear) else of_input.to_dense()
                getattr(dense, f"weight_hh_l{i}").copy_(convert.to_dense(recurrent.weight, recurrent.layout))
                getattr(dense, f"weight_ih_l{i}").copy_(full.weight)
                if bias:
                    getattr(dense, f"bias_ih_l{i}").copy_(full.bias)
                    getattr(dense, f"bias_hh_l{i}").zero_()
        return dense

    def extra_repr(self) -> str:
        """The size and the blocks."""
        layout: Layout = self.recurrent[0].layout
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, blocks={layout.blocks}"


class MultiplicativeLSTM(Recurrent):
    """The multiplicative LSTM with block-sparse recurrent weights.

        m = (W_mx x) * (W_mh h)
        z = W_x x + W_h m + bias, then as an LSTM

    All steps are one op; under `torch.compile`, and where hidden_size is no multiple of 8, they are composed of ops.

    Args:
        input_size: features of x.
        hidden_size: units, a multiple of the block size.
        layout: of W_mh [hidden, hidden] and of each gate's part of W_h. A pair: of W_mh, and of W_h [hidden, hidden]
            or [4 hidden, hidden].
        bias: whether there is one.
        batch_first: x is [n, steps, features], and y.
        forget_bias: added to the forget gate's bias at the start.
        device: of the parameters.
        dtype: of the parameters.

    Source: Krause et al., arXiv:1609.07959 (2016).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        layout: Layout | tuple[Layout, Layout],
        bias: bool = True,
        batch_first: bool = False,
        *,
        forget_bias: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, 1, batch_first, 0.0)
        of_m, of_h = layout if isinstance(layout, tuple) else (layout, layout)
        stacked = stack_gates("MultiplicativeLSTM", of_h, hidden_size)
        self.input_size = input_size = inputs_of("MultiplicativeLSTM", input_size)
        self.input_m = nn.Linear(input_size, hidden_size, False, device, dtype)
        self.input = nn.Linear(input_size, GATES * hidden_size, bias, device, dtype)
        self.recurrent_m = BlockSparseLinear(hidden_size, hidden_size, of_m, False, device=device, dtype=dtype)
        self.recurrent = BlockSparseLinear(hidden_size, GATES * hidden_size, stacked, False, device=device, dtype=dtype)
        if bias and forget_bias != 0:
            with torch.no_grad():
                self.input.bias[hidden_size : 2 * hidden_size].add_(forget_bias)

    def run_layer(self, i: int, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
        """See `Recurrent`."""
        of_m, of_x = self.input_m(x), self.input(x)
        if self._is_one_op(x):
            network = Multiplicative([self.recurrent_m, self.recurrent])
            pre = of_x.unflatten(-1, (GATES, self.hidden_size))
            weights = (self.recurrent_m.weight, self.recurrent.weight)
            y, h, c = sequence.run(network, lengths, *start_of(of_m, state), of_m, pre, *weights)
            return y, (h, c)
        factors, terms = of_m.unbind(), of_x.unbind()  # once: each index would make zeros for all steps in backward
        w_m, w_h = SharedWeight(self.recurrent_m), SharedWeight(self.recurrent)

        def step(t: int, h: Tensor, c: Tensor) -> State:
            m = factors[t] * w_m(h)
            z = (terms[t] + w_h(m)).view(-1, GATES, self.hidden_size).to(c.dtype)
            return cell(z, c, h.dtype)

        return run_steps(step, x.size(0), start_of(of_x[:, :, : self.hidden_size], state), lengths)

    def _is_one_op(self, x: Tensor) -> bool:
        return self.hidden_size % UNITS == 0 and sequence.takes(x)
