"""`Recurrent`: what layers of recurrent cells share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Real
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..._core.arguments import need, to_int, to_list
from ...layout import Layout, need_layout
from ..arguments import need_lengths, need_tensor, state_of
from ..functional.lstm import State
from ..ops.lstm import GATES
from .leaf import as_leaf
from .linear import BlockSparseLinear


def inputs_of(name: str, input_size: object) -> int:
    """How many features x has."""
    size = to_int("input_size", input_size, 31, name)
    if size < 0:
        raise ValueError(f"[{name}] input_size is {size}, needs 0 or more")
    return size


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
        if not isinstance(x, Tensor):
            if (node := as_leaf(self, x, state, lengths)) is not None:
                return cast(tuple[Tensor, State], node)
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
