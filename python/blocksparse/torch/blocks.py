"""Weights in blocks: what recurrent networks ask of a block-sparse layer, and dense weights put into blocks."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor, nn

from ..layout import Layout
from .convert import grid_of
from .tables import index_of


class Blocks(Protocol):
    """A weight in blocks, as a `BlockSparseLinear` has it."""

    @property
    def weight(self) -> Tensor:
        """[blocks, b, b]."""

    @property
    def layout(self) -> Layout:
        """Which there are."""

    def tables(self, device: torch.device) -> Tensor:
        """`index_of` the layout."""


class LooseBlocks:
    """A weight in blocks that is no layer's own."""

    def __init__(self, weight: Tensor, layout: Layout) -> None:
        self.weight, self.layout = weight, layout

    def tables(self, device: torch.device) -> Tensor:
        """See `Blocks`."""
        return index_of(self.layout, device)


class FullBlocks(LooseBlocks):
    """A dense weight whose sizes are multiples of 8, in the largest blocks that divide it: all of them are there."""

    def __init__(self, layer: nn.Linear) -> None:
        out, in_ = layer.weight.shape
        b = next(b for b in (128, 64, 32, 16, 8) if out % b == 0 and in_ % b == 0)
        super().__init__(grid_of(layer.weight, b).flatten(0, 1), _full(out // b, in_ // b, b))


@functools.lru_cache
def _full(out_blocks: int, in_blocks: int, b: int) -> Layout:
    return Layout.from_graph(f"dense({out_blocks},{in_blocks})", b)
