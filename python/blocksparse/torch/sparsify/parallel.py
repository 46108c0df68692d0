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


@torch.no_grad()
def check_same_gradients(op: str, parameters: dict[str, nn.Parameter]) -> None:
    """Makes sure that somebody averages the gradients of parameters that have just taken the place of others.

    Raises:
        RuntimeError: they differ between processes. It is raised in all of them, and names those that differ.
    """
    if not _together() or not parameters:
        return
    device = next(iter(parameters.values())).device
    sums = [0.0 if p.grad is None else p.grad.double().sum() for p in parameters.values()]
    mine = torch.stack([torch.as_tensor(s, dtype=torch.float64, device=device) for s in sums]).nan_to_num()
    most, least = mine.clone(), mine.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    differ = (most != least).tolist()
    if names := [name for name, wrong in zip(parameters, differ, strict=True) if wrong]:
        raise RuntimeError(
            f"[{op}] processes have different gradients of {', '.join(names)}, which have moved to block-sparse "
            "storage: wrap the model in DistributedDataParallel anew when pruner.moves has grown"
        )
