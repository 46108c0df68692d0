"""Whether gradients are finite, and what is done where they are not."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are. Reads them once, and waits for their device."""
    values = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    on_card = [t for t in values if t.numel() and t.device.type != "cpu"]
    if on_card and not bool(nn.utils.get_total_norm(on_card, norm_type=math.inf).isfinite()):
        return False
    return all(_finite(t) for t in values if t.device.type == "cpu")


def _finite(tensor: Tensor) -> bool:
    """Of a tensor on the CPU, where a sum takes a tenth of the time. It may overflow, but loses no NaN or Inf."""
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


_dropped_by: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()  # in the step that is made


def drop_bad_gradients(by: object, optimizers: Iterable[Optimizer], apart: set[int]) -> bool:
    """Takes all gradients away, so that a step of the optimizers changes nothing, if one of them is not finite.

    Whoever does it calls `step_is_over` behind the step. Others that ask in between are told of it, too.

    A `torch.amp.GradScaler` that leaves skipping to the optimizer looks by itself; a CUDA graph cannot be asked.

    Args:
        by: who asks.
        optimizers: whose parameters are looked at.
        apart: ids of parameters whose gradients are not looked at, but taken away with the others.

    Returns:
        Whether that was done.
    """
    optimizers = tuple(optimizers)
    step_is_over(by, optimizers)  # a closure asks several times
    if any(_dropped_by.get(optimizer, by) is not by for optimizer in optimizers):
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    if any(getattr(optimizer, "found_inf", None) is not None for optimizer in optimizers):
        return False
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if all_finite(p.grad for p in held if p.grad is not None and id(p) not in apart):
        return False
    for parameter in held:
        parameter.grad = None
    _dropped_by.update(dict.fromkeys(optimizers, by))
    return True


def step_is_over(by: object, optimizers: Iterable[Optimizer]) -> None:
    """The next step of the optimizers will have gradients."""
    for optimizer in optimizers:
        if _dropped_by.get(optimizer) is by:
            del _dropped_by[optimizer]
