"""Products whose results are summed over processes while others are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd.linear import Product, gradients
from ..autograd.transforms import run

# Fewer tokens than twice this are one chunk. Of 1024 tokens and wide layers, a product has many tiles for each SM.
CHUNK = 1024
# c chunks leave 1/c of the product in front of the network, so a fifth would hide another 1/20, for one more launch.
MOST_CHUNKS = 4
TILE = 128  # of which a chunk has a multiple: no kernel has larger tiles of tokens, and memory stays aligned


def summed(product: Callable[[Tensor], Tensor], x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """product(x), which is made of each token of x by itself, summed over processes; there when it is called for.

    Chunks of tokens are summed while later ones are computed. The network is then busy from the first chunk on, and
    until the call there is time to compute something else.
    """
    tokens = x.shape[:-1].numel()
    chunks = min(tokens // CHUNK, MOST_CHUNKS)
    if chunks < 2 or not x.is_contiguous():  # a features-first matrix is made contiguous as a whole
        total = product(x).contiguous()
        work: Any = dist.all_reduce(total, group=group, async_op=True)

        def one() -> Tensor:
            work.wait()
            return total

        return one
    sent: list[tuple[Tensor, Any]] = []
    for rows in x.flatten(0, -2).split(-(-tokens // (chunks * TILE)) * TILE):
        part = product(rows).contiguous()
        sent.append((part, dist.all_reduce(part, group=group, async_op=True)))

    def all_of_them() -> Tensor:
        total = sent[0][0].new_empty(tokens, sent[0][0].size(-1))
        at = 0
        for part, work in sent:  # each is copied while the next are on their way
            work.wait()
            total[at : at + len(part)] = part
            at += len(part)
        return total.view(*x.shape[:-1], -1)

    return all_of_them


@functools.lru_cache(maxsize=64)
def summing_dx(group: dist.ProcessGroup) -> type[Product]:
    """`Product` of an x that all processes of a group have: each has made a part of y, so dx is the sum of theirs.

    The sum needs the network, dW the processor: both at once take as long as the slower one.
    """

    def send(transposed: Callable[[Tensor], Tensor], dy: Tensor) -> Callable[[], Tensor]:
        _refuse_second("ColwiseParallel")
        return summed(transposed, dy, group)

    class SummingDx(Product):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            return gradients(ctx, dy, send)

    return SummingDx


@functools.lru_cache(maxsize=64)
def summing_y(group: dist.ProcessGroup) -> type[Product]:
    """`Product` of the features of x that a process of a group has: y is the sum of theirs, and dy is what all have."""

    class SummingY(Product):
        exchanges = True

        @staticmethod
        def forward(
            ctx: Any, x: Tensor, values: Tensor, gates: Tensor | None, bias: None, index: Tensor, *fixed: Any
        ) -> Tensor:
            ctx.save_for_backward(x, values, gates, index)
            ctx.fixed = fixed
            narrow = values.to(x.dtype)
            return summed(lambda rows: run(Product, rows, narrow, gates, None, index, *fixed), x, group)()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            _refuse_second("RowwiseParallel")
            return gradients(ctx, dy)

    return SummingY


def _refuse_second(op: str) -> None:
    """Raises NotImplementedError where a gradient is to have gradients itself."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"[{op}] has no second derivative")
