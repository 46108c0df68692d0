"""What processes of torch.distributed that train one model tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn


class World:
    """The processes that train one model; false where there is one alone.

    Args:
        group: of processes; None: all, if torch.distributed is initialised when it is asked.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __bool__(self) -> bool:
        there = distributed.is_available() and distributed.is_initialized()
        return there and distributed.get_world_size(self._group) > 1

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all processes, by one call; the tensors themselves where there is one process."""
        if not self or not tensors:
            return list(tensors)
        together = torch.cat([t.flatten() for t in tensors])
        distributed.all_reduce(together, group=self._group)
        return _split(together, tensors)

    def from_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What rank 0 of the group has, by one call; the tensors themselves where there is one process."""
        if not self or not tensors:
            return list(tensors)
        together = torch.cat([t.flatten() for t in tensors])
        first = 0 if self._group is None else distributed.get_global_rank(self._group, 0)
        distributed.broadcast(together, first, self._group)
        return _split(together, tensors)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients become their averages over all processes, as DistributedDataParallel does for a model's own."""
        if not self:
            return
        held = list(parameters)
        summed = self.sum([p.grad if p.grad is not None else torch.zeros_like(p) for p in held])
        for parameter, gradient in zip(held, summed, strict=True):
            parameter.grad = gradient / distributed.get_world_size(self._group)

    @torch.no_grad()
    def check_same_gradients(self, op: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Makes sure that somebody averages the gradients of parameters that have just taken the place of others.

        Raises:
            RuntimeError: they differ between processes. It is raised in all of them, and names those that differ.
        """
        if not self or not parameters:
            return
        device = next(iter(parameters.values())).device
        sums = [0.0 if p.grad is None else p.grad.double().sum() for p in parameters.values()]
        mine = torch.stack([torch.as_tensor(s, dtype=torch.float64, device=device) for s in sums]).nan_to_num()
        most, least = mine.clone(), mine.clone()
        distributed.all_reduce(most, distributed.ReduceOp.MAX, self._group)
        distributed.all_reduce(least, distributed.ReduceOp.MIN, self._group)
        differ = (most != least).tolist()
        if names := [name for name, wrong in zip(parameters, differ, strict=True) if wrong]:
            raise RuntimeError(
                f"[{op}] processes have different gradients of {', '.join(names)}, which have moved to block-sparse "
                "storage: wrap the model in DistributedDataParallel anew when pruner.moves has grown"
            )


def _split(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = together.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
