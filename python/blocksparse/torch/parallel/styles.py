"""Styles for `torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..._core.arguments import need
from ...interleave import interleaved_features
from ...layout import Layout
from ..modules import BlockSparseGLU, BlockSparseLinear, BlockSparseMLP
from ..tables import index_of
from . import dealing
from .agreement import need_same
from .dealing import Deal, Int64, Layer
from .dealt import Dealt
from .layers import ColwiseGLU, ColwiseLinear, ParallelLayer, Part, RowwiseLinear
from .optimizers import follow


class _Style(ParallelStyle):
    """What both styles of one layer share."""

    def __init__(
        self,
        deal: Deal | None,
        input_layouts: Placement | None,
        output_layouts: Placement | None,
        use_local_output: bool,
        dealt: Placement | None,
    ) -> None:
        op = self._op
        if deal is not None:
            need(op, "deal", deal, Deal, "what blocksparse.torch.parallel.deal returns")
        self.deal, self.use_local_output = deal, use_local_output
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()
        for name, placement in (("input_layouts", self.input_layouts), ("output_layouts", self.output_layouts)):
            if not isinstance(placement, Shard | Replicate):
                raise ValueError(f"[{op}] {name} is {placement!r}, needs Replicate() or Shard(dim)")
        if dealt is not None and dealt == Shard(-1) and deal is None:
            raise ValueError(
                f"[{op}] Shard(-1) means features in the order that they are dealt: needs the deal that the layer at "
                "the other end has, from blocksparse.torch.parallel.deal"
            )

    @property
    def _op(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        layouts = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{self._op}({layouts}, use_local_output={self.use_local_output})"

    def _check(self, layer: Layer, mesh: DeviceMesh, deal: Deal, features: int) -> None:
        op = self._op
        if mesh.ndim != 1:
            raise ValueError(f'[{op}] the mesh has {mesh.ndim} dimensions, needs one: mesh["tp"], say')
        if isinstance(layer, ParallelLayer):
            raise ValueError(f"[{op}] the layer is divided already, by {layer.part.op}")
        if layer.gates_now() is not layer.gates:
            raise ValueError(f"[{op}] the layer has lent gates, needs to be rid of its pruner first")
        if deal.features != features or deal.processes != mesh.size() or deal.unit % layer.layout.block_size:
            raise ValueError(
                f"[{op}] deal is of {deal.features} features in units of {deal.unit} to {deal.processes} processes, "
                f"needs {features} in multiples of {layer.layout.block_size} to {mesh.size()}"
            )
        # A process with one parameter less would wait for the others' without an end.
        parameters = (f"{name} {str(p.dtype).removeprefix('torch.')}" for name, p in layer.named_parameters())
        texts = {"parameters": ", ".join(parameters), "activation": layer.activation or "none"}
        need_same(op, {"layout": hash(layer.layout), "deal": hash(deal), **texts}, mesh.get_group())

    def _divide(
        self, layer: Layer, kind: type[ParallelLayer], part: Part, replicated: tuple[str, ...]
    ) -> ParallelLayer:
        """Makes a layer one of `kind`, of which this process has a part."""
        source = self.src_data_rank
        for name, whole in list(layer.named_parameters(recurse=False)):
            if name in replicated:
                spread = distribute_tensor(whole.detach(), part.mesh, [Replicate()], src_data_rank=source)
            else:
                spread = part.rows[name].deal(whole, source)
            layer.register_parameter(name, nn.Parameter(spread, requires_grad=whole.requires_grad))
        layer.__class__ = kind  # type: ignore[assignment]
        made = cast(ParallelLayer, layer)
        made.part = part
        made._index = index_of(part.layout, made.weight.device)
        follow(made)
        return made


class ColwiseParallel(_Style):
    """Divides the outputs of a `BlockSparseLinear` or `BlockSparseGLU`: each process has equally many of the blocks.

    Which outputs a process has is dealt, row by row of blocks, see `deal`: a cut between consecutive rows would give
    one process the hubs of a scale-free layout. Where y is gathered, its features are in the order of one process.
    Where it is not, each process has those dealt to it, in rising order, for a `RowwiseParallel` of the same deal.

    Args:
        deal: of the outputs, to be shared with the layer that takes them. None: made for this layer alone.
        input_layouts: how x is divided: `Replicate()` (default), or `Shard(d)` of a dimension of tokens.
        output_layouts: how y shall be: `Shard(-1)`, as it is dealt (default with a deal), `Replicate()` (default
            without one), or `Shard(d)` of a dimension of tokens, whose size is a multiple of the processes.
        use_local_output: whether y is a tensor, not a DTensor. What is dealt is a tensor always.

    Raises:
        ValueError: the deal does not fit, the layouts of processes differ, or there are more processes than rows.
    """

    def __init__(
        self,
        deal: Deal | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        output_layouts = Shard(-1) if output_layouts is None and deal is not None else output_layouts
        super().__init__(deal, input_layouts, output_layouts, use_local_output, output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = dealing.need_layer(self._op, module)
        deal = self.deal or dealing.deal(device_mesh.size(), outputs_of=layer)
        self._check(layer, device_mesh, deal, dealing.outputs(layer))
        unit, rank = dealing.blocks_per_unit(layer, deal.unit), device_mesh.get_local_rank()
        blocks = _dealt_blocks(dealing.rows_of(layer), unit, deal)
        rows = {"weight": Dealt(device_mesh, blocks)}
        if layer.gates is not None:
            rows["gates"] = rows["weight"]
        if layer.bias is not None:
            edge, count = unit * layer.layout.block_size, layer.layout.out_features
            rows["bias"] = Dealt(device_mesh, [_of_units(hand, edge, count) for hand in deal.hands])
        outputs = deal.features_of(rank).size
        if isinstance(layer, BlockSparseGLU):
            outputs = interleaved_features(outputs)
        layout = _part_of(layer.layout, blocks[rank], deal.hands[rank], unit, 0, outputs)
        ends = self.input_layouts, self.output_layouts, self.use_local_output
        part = Part(self._op, deal, layout, rows, device_mesh, *ends)
        kind = ColwiseGLU if isinstance(layer, BlockSparseGLU) else ColwiseLinear
        return self._divide(layer, kind, part, ())


class RowwiseParallel(_Style):
    """Divides the inputs of a `BlockSparseLinear`: each process has equally many of the blocks, and y is summed.

    Args:
        deal: of the inputs, shared with the layer that makes them. None: made for this layer alone.
        input_layouts: how x is divided: `Shard(-1)`, as it is dealt (default with a deal), `Replicate()` (default
            without one), or `Shard(d)` of a dimension of tokens.
        output_layouts: how y shall be: `Replicate()` (default), or `Shard(d)` of a dimension of tokens, whose size is a
            multiple of the processes.
        use_local_output: whether y is a tensor, not a DTensor.

    Raises:
        ValueError: the deal does not fit, the layouts of processes differ, or there are more processes than columns.
    """

    def __init__(
        self,
        deal: Deal | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        input_layouts = Shard(-1) if input_layouts is None and deal is not None else input_layouts
        super().__init__(deal, input_layouts, output_layouts, use_local_output, input_layouts)
        if self.output_layouts == Shard(-1):
            raise ValueError("[RowwiseParallel] output_layouts is Shard(-1), needs Replicate() or Shard(dim) of tokens")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = dealing.need_layer(self._op, module)
        if not isinstance(layer, BlockSparseLinear):
            raise TypeError(f"[{self._op}] takes a BlockSparseLinear, given a {type(layer).__name__}")
        deal = self.deal or dealing.deal(device_mesh.size(), inputs_of=layer)
        self._check(layer, device_mesh, deal, layer.in_features)
        unit, rank = deal.unit // layer.layout.block_size, device_mesh.get_local_rank()
        blocks = _dealt_blocks(layer.layout.coordinates()[1], unit, deal)
        rows = {"weight": Dealt(device_mesh, blocks)}
        if layer.gates is not None:
            rows["gates"] = rows["weight"]
        layout = _part_of(layer.layout, blocks[rank], deal.hands[rank], unit, 1, deal.features_of(rank).size)
        ends = self.input_layouts, self.output_layouts, self.use_local_output
        part = Part(self._op, deal, layout, rows, device_mesh, *ends)
        return self._divide(layer, RowwiseLinear, part, ("bias",))


class MLPParallel(ParallelStyle):
    """Divides the hidden features of a `BlockSparseMLP`: its `up` by its outputs, its `down` by its inputs.

    One deal for both: each process has equal shares of the blocks of `up` (gate and up of a gated one) and of `down`,
    and nothing is exchanged between them.

    Args:
        input_layouts: how x is divided: `Replicate()` (default), or `Shard(d)` of a dimension of tokens.
        output_layouts: how y shall be, likewise.
        use_local_output: whether y is a tensor, not a DTensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts, self.output_layouts = input_layouts, output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, BlockSparseMLP):
            raise TypeError(f"[MLPParallel] takes a BlockSparseMLP, given a {type(module).__name__}")
        layouts = {f"layout of {name}": hash(getattr(module, name).layout) for name in ("up", "down")}
        need_same("MLPParallel", layouts, device_mesh.get_group())  # a deal of others would differ, too, but say less
        deal = dealing.deal(device_mesh.size(), outputs_of=module.up, inputs_of=module.down)
        up = ColwiseParallel(deal, input_layouts=self.input_layouts)
        down = RowwiseParallel(deal, output_layouts=self.output_layouts, use_local_output=self.use_local_output)
        for style, layer in ((up, module.up), (down, module.down)):
            style.src_data_rank = self.src_data_rank
            style._apply(layer, device_mesh)
        return module


def _of_units(units: Int64, edge: int, count: int) -> Int64:
    """Those of 0 ... count - 1 that lie in units of `edge`."""
    found = (units[:, None] * edge + np.arange(edge)).reshape(-1)
    return found[found < count]


def _dealt_blocks(places: npt.NDArray[np.int32], edge: int, deal: Deal) -> list[Int64]:
    """The blocks of each process, from the row (or column) of each block and how many of them a unit has."""
    owner = np.empty(-(-deal.features // deal.unit), np.int32)
    for process, hand in enumerate(deal.hands):
        owner[hand] = process
    of = owner[places // edge]
    return [np.flatnonzero(of == process) for process in range(deal.processes)]


def _part_of(layout: Layout, blocks: Int64, units: Int64, edge: int, side: int, features: int) -> Layout:
    """The layout of some blocks, of the rows (side 0) or columns (side 1) in some units, moved together.

    Rows keep their order, so the blocks keep theirs.
    """
    kept = _of_units(units, edge, layout.grid[side])
    moved = np.full(layout.grid[side], -1, np.int32)
    moved[kept] = np.arange(kept.size, dtype=np.int32)
    coordinates, grid, sizes = [x[blocks] for x in layout.coordinates()], list(layout.grid), list(layout.sizes)
    coordinates[side], grid[side], sizes[side] = moved[coordinates[side]], kept.size, features
    if layout.transposed:
        coordinates, grid, sizes = coordinates[::-1], grid[::-1], sizes[::-1]
    names: dict[str, Any] = dict(zip(("out_features", "in_features"), sizes, strict=True))
    out, in_ = coordinates
    made = Layout.from_coordinates(out, in_, (grid[0], grid[1]), layout.block_size, **names)
    return made.t() if layout.transposed else made
