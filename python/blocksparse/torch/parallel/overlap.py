"""Products whose results are summed over processes while others are computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd.linear import Product, gradients
from ..autograd.transforms import run
from ..multiprocessors import leave_multiprocessors
from ..ops import linear as ops

# y of at least as many tokens is summed in two halves, the first while the second is made. 4096 tokens of 12288
# features, forward and backward of two layers: 2.51 ms, at once 2.58 (2 x H100, 2026-11-26). Four parts were slower.
# Parts of 1536 and 2560 tokens take as long as halves, 2.35 ms; 1024 and 3072 take 2.41 (2 x H200).
IN_HALVES = 2048
TILE = 128  # of which a half is a multiple, so that it is whole tiles of a kernel, and its memory aligned as that of x
# NCCL's kernels wait for free multiprocessors, and kernels here take all of them until they end. By default NCCL's come
# in clusters of 4 thread blocks, which need 4 free multiprocessors side by side. ms of that step on the H100s:
#   left to the network         0    16    24    32
#   NCCL_CGA_CLUSTER_SIZE=1        2.60  2.51  2.64
#   by default               2.80  2.82  2.80  2.72
# On the H200s 16, 24 and 32 take 2.43, 2.35 and 2.33 with NCCL_CGA_CLUSTER_SIZE=1.
LEFT_TO_NETWORK = 24


def beside_network(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Block-sparse ops meanwhile leave multiprocessors to the network's kernels, on a card."""
    return leave_multiprocessors(LEFT_TO_NETWORK) if x.is_cuda else contextlib.nullcontext()


def send(part: Tensor, group: dist.ProcessGroup) -> Any:
    """Begins to sum a tensor over processes, in place. Call `wait` of the result before the tensor is read."""
    return dist.all_reduce(part, group=group, async_op=True)


@functools.lru_cache(maxsize=64)
def summing_dx(group: dist.ProcessGroup) -> type[Product]:
    """`Product` of an x that all processes of a group have: each has made a part of y, so dx is the sum of theirs.

    The sum needs the network, dW the processor: both at once take as long as the slower one.
    """

    def sent(transposed: Callable[[Tensor], Tensor], dy: Tensor) -> Callable[[], Tensor]:
        _refuse_second("ColwiseParallel")
        dx = transposed(dy).contiguous()  # a features-first matrix is not
        work = send(dx, group)

        def arrived() -> Tensor:
            work.wait()
            return dx

        return arrived

    class SummingDx(Product):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            return gradients(ctx, dy, sent, beside_network)

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
            ctx.fixed = (sizes, transposed, tf32)
            values = values.to(x.dtype)
            tokens = x.shape[:-1].numel()
            if tokens < IN_HALVES:
                y = run(Product, x, values, gates, None, index, *ctx.fixed).contiguous()
                send(y, group).wait()
                return y
            x = x.contiguous()  # may be features-first, which a process with one feature could not tell
            y = x.new_empty(*x.shape[:-1], sizes[0])
            half = -(-tokens // (2 * TILE)) * TILE
            places, rows = (t.flatten(0, -2).split(half) for t in (y, x))
            works: list[Any] = []
            for place, part in zip(places, rows, strict=True):
                with beside_network(x) if works else contextlib.nullcontext():
                    ops.fprop_into(place, part, values, index, transposed, gates=gates, tf32=tf32)
                works.append(send(place, group))
            for work in works:
                work.wait()
            return y

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
