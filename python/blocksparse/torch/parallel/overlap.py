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
TILE = 128  # of which a chunk is a multiple, so that it is whole tiles of a kernel, and its memory aligned as that of x


def summed(product: Callable[[Tensor], Tensor], x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """product(x), which is made of each token of x by itself, summed over processes; there when it is called for.

    Chunks of tokens are summed while later ones are computed. So the network is busy from the first chunk on, and the
    caller may compute something else until it needs the sum.
    """

    def send(part: Tensor) -> Any:
        return dist.all_reduce(part, group=group, async_op=True)

    tokens = x.shape[:-1].numel()
    chunks = min(tokens // CHUNK, MOST_CHUNKS)
    if chunks < 2 or not x.is_contiguous():  # a features-first matrix is made contiguous as a whole
        total = product(x).contiguous()
        works = [send(total)]
    else:
        size = -(-tokens // (chunks * TILE)) * TILE
        first, *others = x.flatten(0, -2).split(size)
        part = product(first)
        total = part.new_empty(*x.shape[:-1], part.size(-1))  # no view, so that it may be changed in place
        places = total.flatten(0, -2).split(size)
        works = [send(places[0].copy_(part))]
        works += [send(place.copy_(product(rows))) for rows, place in zip(others, places[1:], strict=True)]

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return total

    return arrived


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
            ctx: Any,
            x: Tensor,
            values: Tensor,
            gates: Tensor | None,
            bias: Tensor | None,
            index: Tensor,
            sizes: tuple[int, int],
            transposed: bool,
            tf32: bool,
        ) -> Tensor:
            assert bias is None  # every process would add it
            ctx.save_for_backward(x, values, gates, index)
            ctx.fixed = fixed = (sizes, transposed, tf32)
            narrow = values.to(x.dtype)
            return summed(lambda rows: run(Product, rows, narrow, gates, None, index, *fixed), x, group)()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            _refuse_second("RowwiseParallel")
            return gradients(ctx, dy)

    return SummingY


@functools.cache
def once(op: str) -> type[Product]:
    """`Product` without second derivatives, for x and y that DTensors exchange: theirs would miss what others have."""

    class Once(Product):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            _refuse_second(op)
            return gradients(ctx, dy)

    return Once


def _refuse_second(op: str) -> None:
    """Raises NotImplementedError where a gradient is to have gradients itself."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"[{op}] has no second derivative")
