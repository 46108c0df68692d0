"""`Dealt`: tensors of one row a block (or a feature), whose rows are dealt to the processes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

Int64 = npt.NDArray[np.int64]


class Dealt:
    """How rows [total, ...] are dealt, and two forms of them as DTensors.

    Dealt rows are what parameters are: `Shard(0)` of [processes * most, ...], where each process has its own rows in
    rising order and then zeros, up to `most` rows. All shards are equal, as optimizers, clipping and FSDP2 like them.
    Whole rows are what state dicts have: `Shard(0)` of [total, ...] in the order of one process, whatever the deal was.

    Args:
        mesh: of one dimension.
        rows: of each process, rising; together each of 0 ... total - 1 once.
    """

    def __init__(self, mesh: DeviceMesh, rows: Sequence[Int64]) -> None:
        self.mesh, self.rows = mesh, tuple(rows)
        self.total = sum(r.size for r in self.rows)
        self.most = max(r.size for r in self.rows)
        self.rank, self.own = mesh.get_local_rank(), self.rows[mesh.get_local_rank()]
        chunk = -(-self.total // len(self.rows))
        edges = np.minimum(np.arange(len(self.rows) + 1) * chunk, self.total)  # of the shards of whole rows
        self._held = (int(edges[self.rank]), int(edges[self.rank + 1]))
        self._sent = np.diff(np.searchsorted(self.own, edges)).tolist()
        ranges = [np.searchsorted(r, self._held) for r in self.rows]
        self._received = [int(stop - start) for start, stop in ranges]
        parts = [r[start:stop] for r, (start, stop) in zip(self.rows, ranges, strict=True)]
        self._places = torch.from_numpy(np.concatenate(parts) - self._held[0])

    def deal(self, whole: Tensor, source: int | None) -> DTensor:
        """Dealt rows of whole ones [total, ...] that every process has, those of rank `source`, or (None) its own."""
        return distribute_tensor(self._with_padding(whole.detach()), self.mesh, [Shard(0)], src_data_rank=source)

    def own_rows(self, dealt: Tensor) -> Tensor:
        """This process's rows of its shard [most, ...], without the padding."""
        return dealt if self.own.size == self.most else dealt[: self.own.size]

    @torch.no_grad()
    def to_whole(self, dealt: DTensor) -> DTensor:
        """Whole rows of dealt ones. All processes of the mesh have to call it."""
        shape = torch.Size((self.total, *dealt.shape[1:]))
        if dealt.device_mesh.ndim > 1:  # FSDP2 has divided them, too
            full = dealt.full_tensor()
            rows = full.new_empty(shape)
            for process, own in enumerate(self.rows):
                start = process * self.most
                rows[torch.from_numpy(own).to(full.device)] = full[start : start + own.size]
            places = [Replicate()] * (dealt.device_mesh.ndim - 1) + [Shard(0)]
            return distribute_tensor(rows, dealt.device_mesh, places, src_data_rank=None)
        mine = self.own_rows(dealt.to_local()).contiguous()
        held = mine.new_empty(self._held[1] - self._held[0], *mine.shape[1:])
        if not mine.is_meta:
            arrived = torch.empty_like(held)
            dist.all_to_all_single(arrived, mine, self._received, self._sent, group=self.mesh.get_group())
            held[self._places.to(mine.device)] = arrived
        return _sharded(held, self.mesh, shape)

    @torch.no_grad()
    def from_whole(self, whole: Tensor, like: DTensor) -> DTensor:
        """Dealt rows, divided as `like` is, of whole ones: a DTensor of all processes, or a tensor of all rows."""
        if like.device_mesh.ndim > 1:
            rows = whole.full_tensor() if isinstance(whole, DTensor) else whole
            return distribute_tensor(self._with_padding(rows), like.device_mesh, like.placements, src_data_rank=None)
        if not isinstance(whole, DTensor):
            mine = whole[torch.from_numpy(self.own).to(whole.device)]
        else:
            held = whole.redistribute(self.mesh, [Shard(0)]).to_local()
            mine = held.new_empty(self.own.size, *held.shape[1:])
            if not held.is_meta:
                sent = held[self._places.to(held.device)]
                dist.all_to_all_single(mine, sent, self._sent, self._received, group=self.mesh.get_group())
        shard = mine.new_zeros(self.most, *mine.shape[1:])
        shard[: self.own.size] = mine
        return _sharded(shard, self.mesh, torch.Size((self.most * len(self.rows), *shard.shape[1:])))

    def _with_padding(self, whole: Tensor) -> Tensor:
        dealt = whole.new_zeros(len(self.rows) * self.most, *whole.shape[1:])
        for process, own in enumerate(self.rows):
            start = process * self.most
            dealt[start : start + own.size] = whole[torch.from_numpy(own).to(whole.device)]
        return dealt


def _sharded(local: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
