"""What processes of torch.distributed tell each other about one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed


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
        """Sums over all processes, by one call."""
        together = torch.cat([t.flatten() for t in tensors])
        distributed.all_reduce(together, group=self._group)
        return _split(together, tensors)

    def from_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What rank 0 of the group has, by one call."""
        together = torch.cat([t.flatten() for t in tensors])
        first = 0 if self._group is None else distributed.get_global_rank(self._group, 0)
        distributed.broadcast(together, first, self._group)
        return _split(together, tensors)


def _split(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = together.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
