"""The feed-forward layers of byte_lm.py: dense ones, and ones whose blocks are drawn beforehand."""

from __future__ import annotations

import itertools
import math

import torch
from byte_llama import Make
from torch import nn

import blocksparse
import blocksparse.torch as bst


def dense(n: int, m: int) -> nn.Module:
    """A dense layer."""
    return nn.Linear(n, m, bias=False)


def sparse(density: float, block: int, first: int = 0) -> Make:
    """One with random blocks, an exact number of them, initialised by its true fan-in; seeds from `first` on."""
    seeds = itertools.count(first)

    def make(n: int, m: int) -> nn.Module:
        grid = (m // block, n // block)
        blocks, generator = grid[0] * grid[1], torch.Generator().manual_seed(next(seeds))
        mask = torch.zeros(blocks, dtype=torch.bool)
        mask[torch.randperm(blocks, generator=generator)[: blocks - math.floor(blocks * (1 - density) + 0.5)]] = True
        return with_blocks(n, m, blocksparse.Layout.from_mask(mask.view(grid).numpy(), block))

    return make


def balanced(density: float, block: int, first: int = 0) -> Make:
    """Like `sparse`, but no hidden feature starves: gate and up have the same blocks, down the same transposed.

    A hidden feature is 0 where gate or up has no block. Rows of hidden features have as many blocks, within one: the
    graph `balanced` has the same number in all, which may be none or too many for an exact density.
    """
    calls, made = itertools.count(), {}

    def make(n: int, m: int) -> nn.Module:
        layer, part = divmod(next(calls), 3)  # gate, up, down
        if part == 0:
            rows, columns = m // block, n // block
            count = rows * columns - math.floor(rows * columns * (1 - density) + 0.5)
            generator = torch.Generator().manual_seed(first + layer)
            places = [torch.randperm(columns, generator=generator) for _ in range(rows)]
            order, mask = torch.randperm(rows, generator=generator), torch.zeros(rows, columns, dtype=torch.bool)
            for i in range(count):
                row = int(order[i % rows])
                mask[row, places[row][i // rows]] = True
            made[layer] = mask.numpy()
        mask_of_part = made[layer].T if part == 2 else made[layer]
        return with_blocks(n, m, blocksparse.Layout.from_mask(mask_of_part, block))

    return make


@torch.no_grad()
def with_blocks(n: int, m: int, layout: blocksparse.Layout) -> bst.BlockSparseLinear:
    """A layer initialised by its true fan-in: N(0, 1 / fan-in)."""
    layer = bst.BlockSparseLinear(n, m, layout, bias=False)
    out = torch.from_numpy(layout.coordinates()[0]).long()
    fan_in = (torch.bincount(out, minlength=layout.grid[0]).float() * layout.block_size).clamp(min=1)
    layer.weight.normal_().mul_(fan_in.rsqrt()[out].view(-1, 1, 1))
    return layer
