"""Layers of which each process of a mesh has a part: what the styles of `styles.py` make of block-sparse ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import pad

from ...layout import Layout
from ..arguments import need_tensor
from ..autograd.linear import Product
from ..autograd.traced import is_tracing
from ..autograd.transforms import is_transformed
from ..functional.epilogue import ACTIVATE, finish
from ..functional.glu import apply_linear_glu
from ..functional.linear import apply_linear
from ..modules import BlockSparseGLU, BlockSparseLinear
from ..modules.digits import pattern_of
from ..modules.layer import BlockSparseLayer
from ..tables import index_of
from .dealing import Deal
from .dealt import Dealt
from .overlap import once, summing_dx, summing_y


@dataclass(frozen=True)
class Part:
    """What one process has of a layer, and how its input and output are divided."""

    op: str  # the style, for messages
    deal: Deal
    layout: Layout  # of the blocks here
    rows: dict[str, Dealt]  # how the rows of parameters are dealt, by name; those of others are replicated
    mesh: DeviceMesh
    input: Placement
    output: Placement
    local_output: bool
    _orders: dict[torch.device, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def features(self) -> npt.NDArray[np.int64]:
        """Those dealt to this process."""
        return self.deal.features_of(self.mesh.get_local_rank())

    @functools.cached_property
    def most(self) -> int:
        """How many features a process has at most."""
        return max(self.deal.features_of(process).size for process in range(self.deal.processes))

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        return self  # processes of a group cannot be copied, and the rest does not change

    def replicated(self, x: Tensor) -> Tensor:
        """All of x, as a tensor whose gradient is the sum of those of all processes."""
        self._need_tokens("input", self.input, x)
        spread = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [self.input], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def whole_input(self, x: Tensor) -> tuple[Tensor, type[Product]]:
        """All of x, and the product whose dx is the sum of those of all processes.

        Tensors that all processes have go to `summing_dx`, what is divided or compiled to DTensor's exchanges.
        """
        if isinstance(x, DTensor) or not self.input.is_replicate() or torch.compiler.is_compiling():
            return self.replicated(x), self.product()
        return x, summing_dx(self.mesh.get_group())

    def product(self) -> type[Product]:
        """Of what DTensors exchange. Programs that are compiled or transformed take derivatives as they need them."""
        return Product if _is_program() else once(self.op)

    def own_columns(self, x: Tensor) -> Tensor:
        """The features of x that this process has."""
        if self.input.is_shard() and cast(Shard, self.input).dim == -1:
            own: Tensor = x.to_local() if isinstance(x, DTensor) else x
            return own
        return self.replicated(x).index_select(-1, self._order(x.device, lambda: self.features))

    def gathered(self, y: Tensor) -> Tensor:
        """y of all processes in the order of one, divided as `output` says; or, as it is dealt, this process's part."""
        if self.output.is_shard() and cast(Shard, self.output).dim == -1:
            return y
        if y.size(-1) < self.most:
            y = pad(y, (0, self.most - y.size(-1)))
        self._need_even(y)
        spread = DTensor.from_local(y, self.mesh, [Shard(y.dim() - 1)], run_check=False)
        ordered = spread.redistribute(placements=[self.output]).to_local()
        return self._given(ordered.index_select(-1, self._order(y.device, self._origins)))

    def sums_alone(self, x: Tensor) -> bool:
        """Whether `summing_y` makes y of x: both are tensors, all processes get y, and nothing transforms the call.

        All else goes to `summed`. Its DTensors take the host 0.8 ms a step (with y of 8 x 64 on a CPU, 2026-11-26).
        """
        return self.output.is_replicate() and self.local_output and not isinstance(x, DTensor) and not _is_program()

    def summed(self, y: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """activation(the sum of y of all processes + bias), divided as `output` says."""
        self._need_even(y)
        spread = DTensor.from_local(y, self.mesh, [Partial()], run_check=False).redistribute(placements=[self.output])
        total: Tensor = spread if bias is None else spread + bias.to(spread.dtype)
        if activation != "none":
            total = ACTIVATE[activation](total)
        return cast(DTensor, total).to_local() if self.local_output else total

    def _given(self, local: Tensor) -> Tensor:
        if self.local_output:
            return local
        return DTensor.from_local(local, self.mesh, [self.output], run_check=False)

    def _need_even(self, y: Tensor) -> None:
        """Raises ValueError if the tokens cannot be divided: DTensors made of uneven parts would be wrong."""
        self._need_tokens("output", self.output, y)
        if self.output.is_shard() and y.size(dim := cast(Shard, self.output).dim) % self.mesh.size():
            raise ValueError(
                f"[{self.op}] dimension {dim} of the output has {y.size(dim)} entries, needs a multiple of the "
                f"{self.mesh.size()} processes that they are divided among"
            )

    def _need_tokens(self, name: str, placement: Placement, tensor: Tensor) -> None:
        """Raises ValueError if what is to be divided is no dimension of tokens."""
        if placement.is_shard() and not -tensor.dim() <= cast(Shard, placement).dim < tensor.dim() - 1:
            raise ValueError(
                f"[{self.op}] the {name} is {list(tensor.shape)} and {placement!r}, needs a dimension before the last"
            )

    def _order(self, device: torch.device, make: Callable[[], npt.NDArray[np.int64]]) -> Tensor:
        if device not in self._orders:
            self._orders[device] = torch.from_numpy(make()).to(device)
        return self._orders[device]

    def _origins(self) -> npt.NDArray[np.int64]:
        """Where each feature is among those of all processes, `most` of each."""
        origins = np.empty(self.deal.features, np.int64)
        for process in range(self.deal.processes):
            own = self.deal.features_of(process)
            origins[own] = process * self.most + np.arange(own.size)
        return origins


class ParallelLayer(BlockSparseLayer):
    """A layer that has become parallel: `layout`, `pattern` and the features are of the whole weight, the tables not.

    `weight`, and what else is dealt, are DTensors of equal shards. State dicts have the whole of them, in the order of
    one process, as DTensors: `full_tensor()` is what one process saves, and all processes have to ask for state dicts
    at once. They load such DTensors, of any number of processes, and the tensors of one process.
    """

    part: Part

    def tables(self, device: torch.device) -> Tensor:
        """`index_of` the blocks here."""
        if self._index.device != device:
            self._index = index_of(self.part.layout, device)
        return self._index

    def place(self, device: torch.device) -> None:
        """Brings the tables and the pattern to a device, where the weight is now."""
        self._index, self.pattern = index_of(self.part.layout, device), pattern_of(self.layout, device)

    def relayout(self, layout: Layout) -> NoReturn:
        """Is refused."""
        raise ValueError(f"[{self.part.op}] a layer that is divided among processes cannot take another layout")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As `BlockSparseLayer`'s, of this process's blocks and outputs."""
        if self.weight.is_meta:
            return
        bound = 1 / self._fan_in().clamp(min=1).sqrt()  # of the whole weight: inputs count that are elsewhere
        places = torch.from_numpy(self.layout.coordinates()[0].astype(np.int64)).to(bound.device)
        own = {"weight": bound[places], "gates": torch.ones_like(places)}
        own["bias"] = bound.repeat_interleave(self.layout.block_size)[: self.layout.out_features]
        for name, parameter in self.named_parameters(recurse=False):
            dealt = self.part.rows.get(name)
            local = cast(DTensor, parameter).to_local()
            scale = own[name] if dealt is None else own[name][torch.from_numpy(dealt.own).to(bound.device)]
            local = local if dealt is None else dealt.own_rows(local)
            if name == "gates":
                local.fill_(1)
            else:
                local.uniform_(-1, 1).mul_(scale.view(-1, *(1,) * (local.dim() - 1)).to(local.dtype))
            if dealt is None:  # replicated: all have what the first process drew
                torch.distributed.broadcast(local, group_src=0, group=self.part.mesh.get_group())

    def _own(self, name: str) -> Tensor | None:
        """This process's rows of a parameter."""
        parameter = getattr(self, name)
        return None if parameter is None else self.part.rows[name].own_rows(parameter.to_local())

    def _fan_in(self) -> Tensor:
        return super()._fan_in().to(self.weight.device)

    def _describe(self) -> str:
        part = self.part
        here = f"process {part.mesh.get_local_rank()} of {part.mesh.size()} has {part.layout.blocks} blocks"
        return f"{super()._describe()}, {part.op}: {here}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._index = index_of(self.part.layout, self.weight.device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, dealt in self.part.rows.items():
            if (saved := destination.get(prefix + name)) is not None:
                destination[prefix + name] = dealt.to_whole(saved)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name, own in self.named_parameters(recurse=False):
            saved, dealt = state_dict.get(prefix + name), self.part.rows.get(name)
            if saved is None:
                continue
            needed = own.shape if dealt is None else (dealt.total, *own.shape[1:])
            if tuple(saved.shape) != tuple(needed):  # all processes see the same, so none waits for another
                errors: list[str] = arguments[-1]
                errors.append(f"{prefix}{name} is {list(saved.shape)}, the whole of it is {list(needed)}")
                return
            if dealt is not None:
                state_dict[prefix + name] = dealt.from_whole(saved, cast(DTensor, own))
            elif not isinstance(saved, DTensor):
                state_dict[prefix + name] = _like(saved, cast(DTensor, own))
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class ColwiseLinear(ParallelLayer, BlockSparseLinear):
    """A `BlockSparseLinear` whose outputs are divided."""

    def forward(self, x: Tensor) -> Tensor:
        """See `blocksparse.torch.parallel.ColwiseParallel`."""
        need_tensor(self.part.op, "x", x)
        (x, product), sizes = self.part.whole_input(x), self.part.layout.sizes
        y = apply_linear(
            x, cast(Tensor, self._own("weight")), self.tables(x.device), sizes, self._transposed,
            self._own("bias"), self._own("gates"), None, self.activation, product,
        )  # fmt: skip
        return self.part.gathered(y)


class ColwiseGLU(ParallelLayer, BlockSparseGLU):
    """A `BlockSparseGLU` whose hidden features are divided."""

    def forward(self, x: Tensor) -> Tensor:
        """See `blocksparse.torch.parallel.ColwiseParallel`."""
        need_tensor(self.part.op, "x", x)
        (x, product), sizes = self.part.whole_input(x), self.part.layout.sizes
        y = apply_linear_glu(
            x, cast(Tensor, self._own("weight")), self.tables(x.device), sizes, self.part.features.size,
            self._own("bias"), self._own("gates"), self.activation, transposed=self._transposed, product=product,
        )  # fmt: skip
        return self.part.gathered(y)


class RowwiseLinear(ParallelLayer, BlockSparseLinear):
    """A `BlockSparseLinear` whose inputs are divided."""

    def forward(self, x: Tensor) -> Tensor:
        """See `blocksparse.torch.parallel.RowwiseParallel`."""
        need_tensor(self.part.op, "x", x)
        alone = self.part.sums_alone(x)
        product = summing_y(self.part.mesh.get_group()) if alone else self.part.product()
        x, sizes = self.part.own_columns(x), self.part.layout.sizes
        weight, gates = cast(Tensor, self._own("weight")), self._own("gates")
        y = apply_linear(x, weight, self.tables(x.device), sizes, self._transposed, None, gates, product=product)
        if not alone:
            return self.part.summed(y, self.bias, self.activation)
        if self.bias is not None:
            y = y + cast(DTensor, self.bias).to_local().to(y.dtype)
        return finish(self.part.op, y, None, self.activation)


def _is_program() -> bool:
    """Whether the call is compiled, traced or transformed."""
    return torch.compiler.is_compiling() or is_tracing() or is_transformed()


def _like(whole: Tensor, parameter: DTensor) -> DTensor:
    """A tensor that all processes have as a DTensor that is divided as a parameter is."""
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
