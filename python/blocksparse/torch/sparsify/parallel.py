"""What processes that train in parallel have to agree on, through `torch.distributed`'s default group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def _together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_processes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums over all processes, in one call; the tensors themselves where there is one process."""
    if not _together() or not tensors:
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients become their averages over all processes, as DistributedDataParallel does for a model's own."""
    if not _together():
        return
    held = list(parameters)
    summed = sum_over_processes(
        {str(i): p.grad if p.grad is not None else torch.zeros_like(p) for i, p in enumerate(held)}
    )
    for parameter, gradient in zip(held, summed.values(), strict=True):
        parameter.grad = gradient / dist.get_world_size()
