"""`DeepUpdateLSTM`: the small-world LSTM, whose state goes through several block-sparse matrices at each step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.arguments import to_int, to_list
from ...layout import Layout, need_layout
from .. import blocks
from ..autograd import deep_update_steps, sequence
from ..autograd.deep_update import DeepUpdate
from ..functional.lstm import State, apply_cell
from ..functional.norm import layer_norm
from ..functional.shared_weight import SharedWeight
from ..ops.lstm import GATES, UNITS
from .digits import Integers, digits_of, saved_integers
from .linear import BlockSparseLinear
from .recurrent import Recurrent, cell, inputs_of, run_steps, stack_gates, start_of

EPSILON = 1e-6  # of the layer norms
# Inputs of all steps from which on dense matrices are put into blocks. Zen 5, 1120 units, one step: 1 takes 7.4 ms in
# blocks and 3.7 without, 32 take 10.7 and 13.7.
WORTH_BLOCKS = 32


class DeepUpdateLSTM(Recurrent):
    """An LSTM whose state passes through `inner` block-sparse matrices before the gates, so that all units mix.

    With linear(h) = LayerNorm(W h) * gain + shift, each with its own W, gain and shift, a step is

        h = linear_0(h) * m                      m, a = linear(x), dense, on the ports alone
        h = relu(linear_1(h) + a)
        h = relu(linear_j(h))                    j = 2 .. inner - 1
        i, f, g, o = linear_{i, f, g, o}(h)      four matrices; c and h from them as in an LSTM

    Block-sparse matrices begin as identities. Gates are normalised each for itself; the forget gate's shift begins as
    1. Norms and c are float32 under autocast.

    Args:
        input_size: features of x: of an embedding, say.
        hidden_size: units.
        layouts: `inner` of W_0 ..., and last that of one gate, all [hidden, hidden]. One alone: for all of them. None:
            all matrices are dense. See also `from_graph`.
        inner: matrices before the gates, 2 or more; needed where `layouts` is no list.
        ports: the units that x touches: every ports-th one, or a list of them (int64 tensor). What was saved with
            others is not loaded.
        batch_first: x is [n, steps, features], and y.
        dropout: of g, in training.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: sizes that do not fit each other.

    Source: Gray, Radford and Kingma, "GPU kernels for block-sparse weights" (2017); openai/blocksparse, `LSTM_scott`.
    """

    ports: Tensor
    _own_ports: Tensor | None = None  # as they were given; None in modules that were pickled by older versions

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        layouts: Sequence[Layout] | Layout | None,
        inner: int | None = None,
        ports: int | Tensor = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, 1, batch_first, dropout)
        inner = None if inner is None else to_int("inner", inner, 31, "DeepUpdateLSTM")
        if layouts is None or isinstance(layouts, Layout):
            all_layouts: list[Layout | None] = [layouts] * ((inner or 0) + 1)
        else:
            all_layouts = to_list("DeepUpdateLSTM", "layouts", layouts, "a layout, or one for each matrix")
        for layout in all_layouts:
            if layout is not None:
                need_layout("DeepUpdateLSTM", layout)
        self.input_size = input_size = inputs_of("DeepUpdateLSTM", input_size)
        self.inner = len(all_layouts) - 1
        if self.inner < 2 or (inner is not None and inner != self.inner):
            raise ValueError(
                f"[DeepUpdateLSTM] inner is {inner}, with {len(all_layouts)} layouts; needs 2 or more, and one layout "
                "for each and one for the gates"
            )
        units = self._own_ports = _ports(ports, hidden_size).cpu()
        self.register_buffer("ports", digits_of(units, hidden_size).to(torch.empty(0, device=device).device))
        self._units = Integers(torch.int64)
        width = units.numel()
        self.input = nn.Parameter(torch.empty(2, width, input_size, device=device, dtype=dtype))
        self.input_norm = nn.Parameter(torch.empty(2, 2, width, device=device, dtype=dtype))
        self.matrices = nn.ModuleList(
            _square(hidden_size, layout, 1, device, dtype) for layout in all_layouts[: self.inner]
        )
        self.matrix_norm = nn.Parameter(torch.empty(self.inner, 2, hidden_size, device=device, dtype=dtype))
        self.gates = _square(hidden_size, all_layouts[-1], GATES, device, dtype)
        self.gate_norm = nn.Parameter(torch.empty(2, GATES, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_graph(
        cls,
        input_size: int,
        hidden_size: int,
        graph: str,
        block_size: int,
        inner: int,
        *,
        seed: int = 0,
        share: bool = False,
        ports: int | Tensor = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> DeepUpdateLSTM:
        """With layouts drawn by a graph's name, such as "ba(175,3)": one for each matrix, or `share` one for all.

        Matrix j is drawn with seed + j, and the gates with seed + inner.
        """
        seeds = [seed] * (inner + 1) if share else range(seed, seed + inner + 1)
        layouts = [Layout.from_graph(graph, block_size, seed=s) for s in seeds]
        missing = [_missing_diagonal(layout) for layout in layouts]
        if max(missing) > 0:
            warnings.warn(
                f'the graph "{graph}" leaves out up to {max(missing)} of {hidden_size // block_size} diagonal blocks: '
                "matrices begin as identities, and without their diagonal such networks hardly train",
                stacklevel=2,
            )
        options = {"device": device, "dtype": dtype}
        return cls(input_size, hidden_size, layouts, inner, ports, batch_first, dropout, **options)  # type: ignore[arg-type]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Identities, gains of 1, shifts of 0 (forget gate: 1); the input's weights normal, of variance 1 / inputs."""
        self.input.normal_(std=self.input_size**-0.5)
        for norm in (self.input_norm, self.matrix_norm):
            norm[:, 0] = 1
            norm[:, 1] = 0
        self.gate_norm[0] = 1
        self.gate_norm[1] = 0
        self.gate_norm[1, 1] = 1
        for layer in (*self.matrices, self.gates):
            if isinstance(layer, BlockSparseLinear):
                layer.identity_init_()
            else:
                eye = torch.eye(self.hidden_size, device=layer.weight.device, dtype=layer.weight.dtype)
                layer.weight.copy_(eye.repeat(layer.out_features // self.hidden_size, 1))

    @property
    def layouts(self) -> list[Layout | None]:
        """Of each matrix in turn, and last of all four gates' [4 hidden, hidden]; None where they are dense."""
        return [getattr(layer, "layout", None) for layer in (*self.matrices, self.gates)]

    @property
    def port_units(self) -> Tensor:
        """The units that x touches, int64 [ports], as `ports` saves them."""
        return self._units.of(self.ports)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        ports = state_dict.get(prefix + "ports")
        if ports is not None and not ports.is_meta:
            errors: list[str] = arguments[-1]
            try:
                units = saved_integers(ports)
            except ValueError as error:
                errors.append(f"{prefix}ports: {error}")
                return
            count = self.ports.size(0)
            if units.shape != (count,) or not _are_ports(units, self.hidden_size):
                last = self.hidden_size - 1
                errors.append(f"{prefix}ports: {list(units.shape)}, needs {count}, rising, and within 0 to {last}")
                return
            own = self._own_ports  # for the buffer may hold nothing yet
            if own is not None and bool((differs := units.cpu() != own).any()):
                i = int(differs.nonzero()[0])
                errors.append(
                    f"{prefix}input was saved with other ports: ports[{i}] is unit {int(units[i])}, "
                    f"this module has {int(own[i])} there"
                )
                return
            state_dict[prefix + "ports"] = digits_of(units, self.hidden_size)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def run_layer(self, i: int, x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
        """See `Recurrent`."""
        m, a = (self._port(x, port, neutral) for port, neutral in ((0, 1.0), (1, 0.0)))  # [steps, n, hidden]
        begin = start_of(m, state)
        if self._is_one_op(x):
            if not self._is_sparse():  # a graph that is captured later is of the steps
                deep_update_steps.prepare(x.device, self.hidden_size)
            network = DeepUpdate(layers := self._in_blocks(), EPSILON)
            of_norms = (self.matrix_norm.to(begin[1].dtype), self.gate_norm.to(begin[1].dtype))
            weights = (layer.weight for layer in layers)
            y, h, c = sequence.run(network, lengths, *begin, m, a, *of_norms, *weights)
            return y, (h, c)
        if self._is_one_node(x, lengths):
            steps = deep_update_steps.Network([*self.matrices, self.gates], EPSILON)
            of_norms = (self.matrix_norm.to(begin[1].dtype), self.gate_norm.to(begin[1].dtype))
            y, h, c = deep_update_steps.run(steps, *begin, m.contiguous(), a.contiguous(), *of_norms)
            return y, (h, c)
        shared = [SharedWeight(layer) for layer in (*self.matrices, self.gates)]
        wide, shape = begin[1].dtype, (-1, 1, self.hidden_size)
        norms = [pair.unbind() for pair in self.matrix_norm.to(wide).unsqueeze(2).unbind()]  # (gain, shift) of each
        gain, shift = self.gate_norm.to(wide).unbind()
        factors, terms = ([t.view(shape) for t in of_x.contiguous().unbind()] for of_x in (m, a))

        def step(t: int, h: Tensor, c: Tensor) -> State:
            for j, (of_gain, of_shift) in enumerate(norms):
                factor, term = factors[t] if j == 0 else None, terms[t] if j == 1 else None
                h = layer_norm(shared[j](h).view(shape), of_gain, of_shift, factor, term, j > 0, EPSILON).flatten(1)
            z = shared[-1](h).view(-1, GATES, self.hidden_size)
            z = layer_norm(z, gain, shift, epsilon=EPSILON)
            if self.dropout > 0 and self.training:
                return self._cell_with_dropout(z.to(wide), c, m.dtype)
            return self._cell(z, c)

        return run_steps(step, x.size(0), begin, lengths)

    @torch.no_grad()
    def on_table(self, table: Tensor) -> Callable[[Tensor, State | None], tuple[Tensor, State]]:
        """For inference on inputs that are rows of a table [rows, features]: all that stays the same is computed once.

        That is m and a of each row, and weights in blocks and in the dtype of their products, autocast's if it is on.
        Later changes of the module are not seen.

        Returns:
            `run(rows, state)`: what this module makes of `table[rows]`, for int64 rows [steps, n] and a state (h, c)
            [n, hidden] or None: (y [steps, n, hidden], state). Without gradients, and to be called under the same
            autocast. It raises IndexError for rows that the table does not have.
        """
        if not self._is_plain(table):
            return torch.no_grad()(
                lambda rows, state: self.run_layer(0, nn.functional.embedding(rows, table), state, None)
            )
        m, a = (self._port(table, port, neutral) for port, neutral in ((0, 1.0), (1, 0.0)))  # [rows, hidden]
        layers = [blocks.LooseBlocks(layer.weight.detach().to(m.dtype), layer.layout) for layer in self._in_blocks()]
        network = DeepUpdate(layers, EPSILON)
        of_norms = [norm.to(torch.promote_types(m.dtype, torch.float32)) for norm in (self.matrix_norm, self.gate_norm)]

        @torch.no_grad()
        def run(rows: Tensor, state: State | None) -> tuple[Tensor, State]:
            factor, term = nn.functional.embedding(rows, m), nn.functional.embedding(rows, a)
            weights = (layer.weight for layer in layers)
            y, h, c = sequence.run(network, None, *start_of(factor, state), factor, term, *of_norms, *weights)
            return y, (h, c)

        return run

    def _in_blocks(self) -> list[blocks.Blocks]:
        """All matrices, dense ones in blocks that are all there."""
        layers = (*self.matrices, self.gates)
        return [blocks.FullBlocks(layer) if isinstance(layer, nn.Linear) else layer for layer in layers]

    def _is_one_op(self, x: Tensor) -> bool:
        """Whether all steps are one op of the core, where a dense matrix is one of blocks that are all there."""
        return self._is_plain(x) and (self._is_sparse() or _are_blocks_worth_it(x))

    def _is_one_node(self, x: Tensor, lengths: Tensor | None) -> bool:
        """Whether all steps can be run as one; else they are composed of ops, which PyTorch can also compile."""
        return self._is_plain(x) and lengths is None

    def _is_plain(self, x: Tensor) -> bool:
        drops = self.dropout > 0 and self.training
        return self.hidden_size % UNITS == 0 and not drops and sequence.takes(x)

    def _is_sparse(self) -> bool:
        return all(isinstance(m, BlockSparseLinear) for m in (*self.matrices, self.gates))

    def _cell(self, z: Tensor, c: Tensor) -> State:
        """As one op, that of a sequence of one step which begins without h."""
        if not isinstance(self.gates, BlockSparseLinear):
            return cell(z.to(c.dtype), c, z.dtype)
        return apply_cell(z, self.gates.weight.detach().to(z.dtype), self.gates.tables(z.device), c)

    def _cell_with_dropout(self, z: Tensor, c: Tensor, dtype: torch.dtype) -> State:
        i, f, _, o = z.sigmoid().unbind(1)
        c = f * c + i * nn.functional.dropout(z[:, 2].tanh(), self.dropout)
        return (o * c.tanh()).to(dtype), c

    def _port(self, x: Tensor, port: int, neutral: float) -> Tensor:
        """m or a, [steps, n, hidden], with a neutral value where there is no port."""
        made = nn.functional.linear(x, self.input[port])
        gain, shift = self.input_norm[port].to(torch.promote_types(made.dtype, torch.float32)).unsqueeze(1).unbind()
        written = layer_norm(made.view(-1, 1, made.size(-1)), gain, shift, epsilon=EPSILON).view(made.shape)
        if self.ports.size(0) == self.hidden_size:
            return written
        full = written.new_full((*x.shape[:-1], self.hidden_size), neutral)
        return full.index_copy(-1, self.port_units, written)

    def extra_repr(self) -> str:
        """The size."""
        return f"{self.input_size}, {self.hidden_size}, inner={self.inner}, ports={self.ports.size(0)}"


def _are_blocks_worth_it(x: Tensor) -> bool:
    """Whether dense matrices are put into blocks for the steps of x [steps, n, features].

    On a card not where a gradient or a CUDA graph may be made: then cuBLAS's products count, and not how long it takes
    Python to start them.
    """
    recorded = x.is_cuda and (torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing())
    return x.size(0) * x.size(1) >= WORTH_BLOCKS and not recorded


def _missing_diagonal(layout: Layout) -> int:
    out, in_ = layout.coordinates()
    return min(layout.grid) - int((out == in_).sum())


def _ports(ports: int | Tensor, hidden_size: int) -> Tensor:
    if isinstance(ports, Tensor):
        if ports.dim() != 1 or ports.dtype != torch.int64 or not _are_ports(ports, hidden_size):
            raise ValueError(f"[DeepUpdateLSTM] ports need to be int64, rising, and within 0 to {hidden_size - 1}")
        return ports
    if not 1 <= ports <= hidden_size:
        raise ValueError(f"[DeepUpdateLSTM] ports is {ports}, needs 1 to {hidden_size}")
    return torch.arange(0, hidden_size, ports, device="cpu")


def _are_ports(units: Tensor, hidden_size: int) -> bool:
    rise = bool((units.diff() > 0).all())
    return units.numel() > 0 and rise and bool(units[0] >= 0) and bool(units[-1] < hidden_size)


def _square(
    n: int, layout: Layout | None, times: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Linear | BlockSparseLinear:
    """`times` square matrices [n, n], one below the other."""
    if layout is None:
        return nn.Linear(n, times * n, False, device, dtype)
    if times > 1:
        layout = stack_gates("DeepUpdateLSTM", layout, n)
    elif (layout.out_features, layout.in_features) != (n, n):
        raise ValueError(f"[DeepUpdateLSTM] a layout is {layout.out_features} x {layout.in_features}, needs {n} x {n}")
    return BlockSparseLinear(n, times * n, layout, False, device=device, dtype=dtype)
