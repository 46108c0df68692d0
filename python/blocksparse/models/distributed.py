"""Processes that train one model together, as `torchrun` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class World:
    """This process, of `size`. Alone by default."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether it is this process that writes and reports."""
        return self.rank == 0

    def part(self, count: int, what: str) -> slice:
        """This process's share of so many things.

        Raises:
            ValueError: it is not the same for all.
        """
        if count % self.size != 0:
            raise ValueError(f"[models] {what} is {count}, needs a multiple of the {self.size} processes")
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether it is set in one of the processes."""
        return bool(self.sum(torch.tensor(float(flag), device=device))) if self.size > 1 else flag

    def average(self, tensors: list[Tensor]) -> None:
        """Each over all processes, in place, by one message.

        DistributedDataParallel would send while backward still runs. But backward is a CUDA graph here, so NCCL would
        have to be captured, too, after eleven updates without a graph, and the model wrapped. All that it could hide
        is 8 %: 512 streams take two cards 6.52 s, 256 one card 6.03 (docs/performance/recurrent.md).
        """
        if self.size == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        parts = (flat / self.size).split([t.numel() for t in tensors])
        torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    def gather(self, values: Tensor, dim: int) -> Tensor:
        """All processes' parts, one behind the other."""
        if self.size == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts, dim)


ALONE = World()


def device_of(name: torch.device | str) -> torch.device:
    """The device of that name, if models can run on it here.

    Raises:
        ValueError: they cannot.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"[models] device is {name}, needs cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"[models] device is {name}, needs cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"[models] device is {name}, but PyTorch sees {torch.cuda.device_count()} GPUs here")
    return device


@contextmanager
def joined(device: str) -> Iterator[tuple[World, torch.device]]:
    """The processes that `torchrun` has started, and this one's device: of its own each on CUDA.

    NCCL joins those on CUDA, Gloo those on CPUs. Without `torchrun` the process is alone.

    Raises:
        ValueError: there is no such device, or there are not as many as processes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = device_of(device)
    if size == 1:
        yield ALONE, place
        return
    if place.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ValueError(f"[models] process {local} needs a GPU of its own, of {torch.cuda.device_count()} here")
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size()), place
    finally:
        dist.destroy_process_group()
