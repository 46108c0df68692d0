"""LSTMs with block-sparse recurrent weights: `BlockSparseLSTM` and `MultiplicativeLSTM`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..._core.arguments import need, to_int, to_list
from ...layout import Layout, need_layout
from .. import convert
from ..arguments import need_lengths, need_tensor, state_of
from ..autograd import sequence as sequence_op
from ..autograd.multiplicative import Multiplicative
from ..functional.lstm import SharedWeight, State, apply_lstm
from .linear import BlockSparseLinear

GATES = 4  # i, f, g, o
UNITS = 8  # a multiple of which the core's cells take


def stack_gates(name: str, layout: Layout | None, hidden_size: int) -> Layout:
    """The layout of W [4 hidden, hidden] from that of one gate; itself if it is that already."""
    layout = need_layout(name, layout)
    sizes = layout.out_features, layout.in_features
    if hidden_size % layout.block_size != 0:
        raise ValueError(f"[{name}] hidden_size is {hidden_size}, needs a multiple of the block size")
    if sizes == (GATES * hidden_size, hidden_size):
        return layout
    if sizes != (hidden_size, hidden_size):
        raise ValueError(
            f"[{name}] layout is {sizes[0]} x {sizes[1]} (out x in), needs {hidden_size} x {hidden_size}, for all four "
            f"gates, or {GATES * hidden_size} x {hidden_size}"
        )
    return layout.stack(GATES)


def projection(
    name: str,
    in_features: int,
    out_features: int,
    layout: Layout | None,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Linear | BlockSparseLinear:
    """A dense layer, or a block-sparse one where there is a layout."""
    if layout is None:
        return nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
    if (layout.out_features, layout.in_features) != (out_features, in_features):
        raise ValueError(
            f"[{name}] an input's layout is {layout.out_features} x {layout.in_features} (out x in), "
            f"needs {out_features} x {in_features}"
        )
    return BlockSparseLinear(in_features, out_features, layout, bias, device=device, dtype=dtype)


def per_layer(name: str, what: str, given: Layout | Sequence[Layout] | None, layers: int) -> list[Layout | None]:
    """One for each layer, of one for all or a list."""
    if given is None or isinstance(given, Layout):
        return [given] * layers
    given = to_list(name, what, given, "a layout, or one for each layer")
    if len(given) != layers:
        raise ValueError(f"[{name}] {len(given)} {what}, needs one, or {layers}: one for each layer")
    return given


class Recurrent(nn.Module, ABC):
    """What layers of recurrent cells share: shapes of inputs and states as `torch.nn.LSTM` has them.

    A subclass runs one layer over [steps, n, features], in `run_layer`.
    """

    def __init__(self, hidden_size: int, num_layers: int, batch_first: bool, dropout: float) -> None:
        super().__init__()
        name = type(self).__name__
        num_layers, hidden_size = (
            to_int("num_layers", num_layers, 31, name),
            to_int("hidden_size", hidden_size, 31, name),
        )
        need(name, "dropout", dropout, Real, "a number")
        if num_layers < 1:
            raise ValueError(f"[{name}] num_layers is {num_layers}, needs 1 or more")
        if not 0 <= dropout <= 1:
            raise ValueError(f"[{name}] dropout is {dropout}, needs 0 to 1")
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.batch_first, self.dropout = batch_first, dropout

    @abstractmethod
    def run_layer(self, i: int, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
        """X [steps, n, features] -> y [steps, n, hidden], (h, c) [n, hidden]."""

    def forward(
        self, x: Tensor | PackedSequence, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """As `torch.nn.LSTM`, and more.

        Args:
            x: [steps, n, input_size], [n, steps, input_size] with batch_first, [steps, input_size], or packed.
            state: (h, c), [num_layers, n, hidden_size] each ([num_layers, hidden_size] if x is unbatched); zeros by
                default. To go on where the last call ended, pass its state; detached, gradients end there.
            lengths: int64 [n]: steps of each sequence, in place of packing. y is 0 behind the last one.

        Returns:
            y like x with hidden_size features, and (h, c) after each sequence's last step, like state. c is float32
            (float64 for float64) for narrower x, too.
        """
        if isinstance(x, PackedSequence):
            if lengths is not None:
                raise ValueError(f"[{type(self).__name__}] x is packed and has lengths, needs no others")
            return self._forward_packed(x, state)
        name = type(self).__name__
        need_tensor(name, "x", x)
        state = state_of(name, state)
        if x.dim() not in (2, 3):
            raise ValueError(f"[{name}] x is {list(x.shape)}, needs 2 or 3 dimensions")
        if x.dim() == 2:
            state = None if state is None else (state[0].unsqueeze(1), state[1].unsqueeze(1))
            y, (h, c) = self._layers(x.unsqueeze(1), state, lengths)
            return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
        if not self.batch_first:
            return self._layers(x, state, lengths)
        y, state = self._layers(x.transpose(0, 1), state, lengths)
        return y.transpose(0, 1), state

    def _layers(self, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
        needed = (self.num_layers, x.size(1), self.hidden_size)
        for name, given in zip("hc", state or (), strict=False):
            if tuple(given.shape) != needed:
                raise ValueError(f"[{type(self).__name__}] {name} is {list(given.shape)}, needs {list(needed)}")
        need_lengths(type(self).__name__, lengths, needed[1])
        hs, cs = [], []
        for i in range(self.num_layers):
            if i > 0 and self.dropout > 0:
                x = nn.functional.dropout(x, self.dropout, self.training)
            x, (h, c) = self.run_layer(i, x, None if state is None else (state[0][i], state[1][i]), lengths)
            hs.append(h)
            cs.append(c)
        return x, (torch.stack(hs), torch.stack(cs))

    def _forward_packed(self, x: PackedSequence, state: State | None) -> tuple[PackedSequence, State]:
        # In the order in which they are packed, the longest first: those that have ended are not computed.
        padded, lengths = pad_packed_sequence(PackedSequence(x.data, x.batch_sizes))
        if state is not None and x.sorted_indices is not None:
            state = (state[0].index_select(1, x.sorted_indices), state[1].index_select(1, x.sorted_indices))
        y, (h, c) = self._layers(padded, state, lengths)
        if x.unsorted_indices is not None:
            h, c = h.index_select(1, x.unsorted_indices), c.index_select(1, x.unsorted_indices)
        packed = pack_padded_sequence(y, lengths)
        return PackedSequence(packed.data, x.batch_sizes, x.sorted_indices, x.unsorted_indices), (h, c)


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
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: sizes that do not fit each other.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_layers, batch_first, dropout)
        name = "BlockSparseLSTM"
        input_size = to_int("input_size", input_size, op=name)
        self.input_size = input_size
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
        cls, dense: nn.LSTM, *, density: float | None = None, block_size: int = 32, layout: Layout | None = None
    ) -> BlockSparseLSTM:
        """With the recurrent blocks of a dense LSTM that have the largest norms, or with those of a given layout.

        By density each gate keeps the blocks that are its own largest.

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
        layouts = [layout or convert.select_blocks(w, density or 0.0, block_size) for w in weights]
        shape = dense.input_size, hidden, layouts, layers, dense.bias, dense.batch_first, dense.dropout
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
        self.input_size = input_size
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
            y, h, c = sequence_op.run(network, lengths, *start_of(of_m, state), of_m, pre, *weights)
            return y, (h, c)
        factors, terms = of_m.unbind(), of_x.unbind()  # once: each index would make zeros for all steps in backward
        w_m, w_h = SharedWeight(self.recurrent_m), SharedWeight(self.recurrent)

        def step(t: int, h: Tensor, c: Tensor) -> State:
            m = factors[t] * w_m(h)
            z = (terms[t] + w_h(m)).view(-1, GATES, self.hidden_size).to(c.dtype)
            return cell(z, c, h.dtype)

        return run_steps(step, x.size(0), start_of(of_x[:, :, : self.hidden_size], state), lengths)

    def _is_one_op(self, x: Tensor) -> bool:
        return self.hidden_size % UNITS == 0 and sequence_op.takes(x)


def cell(z: Tensor, c: Tensor, dtype: torch.dtype) -> State:
    """z [n, 4, hidden], c [n, hidden] -> h of a dtype, c."""
    i, f, _, o = z.sigmoid().unbind(1)
    c = f * c + i * z[:, 2].tanh()
    return (o * c.tanh()).to(dtype), c


def start_of(like: Tensor, state: State | None) -> State:
    """The state before the first step of y [steps, n, hidden]: c is float32 or wider."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    if state is not None:
        return state[0].to(like.dtype), state[1].to(wide)
    h = like.new_zeros(like.shape[1:])
    return h, h.to(wide)


def run_steps(
    step: Callable[[int, Tensor, Tensor], State], steps: int, state: State, lengths: Tensor | None
) -> tuple[Tensor, State]:
    """Calls step(t, h, c) -> (h, c) for each step; sequences that have ended keep their state, and their y is 0."""
    h, c = state
    seen = []
    if lengths is not None:
        lengths = lengths.to(h.device)
    for t in range(steps):
        h_t, c_t = step(t, h, c)
        if lengths is None:
            h, c = h_t, c_t
            seen.append(h)
            continue
        runs = (t < lengths).unsqueeze(1)
        h, c = torch.where(runs, h_t, h), torch.where(runs, c_t, c)
        seen.append(h_t * runs)
    y = torch.stack(seen) if seen else h.new_empty(0, *h.shape)
    return y, (h, c)
