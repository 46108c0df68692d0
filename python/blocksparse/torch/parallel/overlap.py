"""Products whose dx is summed over processes while dW is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd.linear import Product, gradients


@functools.lru_cache(maxsize=64)
def summing(group: dist.ProcessGroup) -> type[Product]:
    """`Product` of an x that all processes of a group have: each has made a part of y, so dx is the sum of theirs.

    The sum needs the network, dW the processor: both at once take as long as the slower one.
    """

    def send(dx: Tensor) -> Callable[[], Tensor]:
        if torch.is_grad_enabled():
            raise NotImplementedError("[ColwiseParallel] has no second derivative")
        total = dx.contiguous()
        work: Any = dist.all_reduce(total, group=group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return total

        return arrived

    class Summing(Product):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            return gradients(ctx, dy, send)

    return Summing
