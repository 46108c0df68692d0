"""Weight normalisation over the live blocks of each output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..layout import Layout
from . import convert
from .modules.layer import BlockSparseLayer

_Layer = TypeVar("_Layer", bound=BlockSparseLayer)
_LEAST = 1e-12  # of a sum of squares: outputs without blocks have no norm


def weight_norm(layer: _Layer) -> _Layer:
    """Gives the weight of each output a length of its own, over all of its blocks: ``W[o] = g[o] V[o] / |V[o]|``.

    `torch.nn.utils.parametrizations.weight_norm` is the same for dense layers; on blocks, its `dim=0` normalises each
    block by itself. `g` and `V` are `layer.parametrizations.weight.original0` and `.original1`;
    `torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")` makes an ordinary weight of them.

    Returns:
        The layer, which was changed.

    Raises:
        TypeError: the layer is not block-sparse.
        ValueError: its weight is parametrized already.

    Source: Salimans and Kingma, arXiv:1602.07868.
    """
    if not isinstance(layer, BlockSparseLayer):
        raise TypeError(f"[weight_norm] a {type(layer).__name__}, needs a block-sparse layer")
    if parametrize.is_parametrized(layer, "weight"):
        raise ValueError("[weight_norm] the layer's weight is parametrized already, needs one that is not")
    parametrize.register_parametrization(layer, "weight", _LiveNorm(layer.layout, layer.weight))
    return layer


class _LiveNorm(nn.Module):
    """Its tables are no buffers, whose averages would be of no use."""

    def __init__(self, layout: Layout, weight: Tensor) -> None:
        super().__init__()
        self.outputs, self.transposed = layout.out_features, layout.transposed
        out, _ = layout.coordinates()
        degrees = np.bincount(out, minlength=layout.grid[0])
        # Blocks of each row, filled up with one that does not exist: sums in a fixed order, on any device.
        rows = np.full((layout.grid[0], int(degrees.max(initial=0))), layout.blocks)
        order = np.argsort(out, kind="stable")
        first = np.cumsum(degrees) - degrees
        rows[out[order], np.arange(layout.blocks) - first[out[order]]] = order
        ragged = layout.out_features % layout.block_size or layout.in_features % layout.block_size
        live = convert.from_dense(torch.ones(layout.sizes, dtype=torch.bool, device="cpu"), layout) if ragged else None
        if live is not None:
            live = live.view(-1, *(1,) * (weight.dim() - 3), *live.shape[1:])
        self._on_host = (torch.from_numpy(rows), torch.from_numpy(out).to(torch.int64), live)
        self._placed = self._on_host
        self._place(weight.device)

    def _place(self, device: torch.device) -> None:
        rows, out, live = self._on_host
        self._placed = (rows.to(device), out.to(device), None if live is None else live.to(device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _LiveNorm:
        super()._apply(fn, recurse)
        self._place(fn(self._placed[0][:0]).device)
        return self

    def norms(self, v: Tensor) -> Tensor:
        """[out_blocks, b]: the norm of each output."""
        if v.device != self._placed[0].device:  # weights were assigned from elsewhere
            self._place(v.device)
        rows, _, live = self._placed
        v = v if v.dtype == torch.float64 else v.float()
        if live is not None:
            v = v * live
        squares = v.square().sum((*range(1, v.dim() - 2), -2 if self.transposed else -1))  # [blocks, b]
        squares = torch.cat([squares, squares.new_zeros(1, squares.size(1))])
        return squares[rows].sum(1).clamp(min=_LEAST).sqrt()

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        norms = self.norms(v)
        scale = nn.functional.pad(g.to(norms.dtype), (0, norms.numel() - self.outputs)).view_as(norms) / norms
        by_block = scale[self._placed[1]].view(-1, *(1,) * (v.dim() - 2), v.size(-1))
        return (v * (by_block if self.transposed else by_block.transpose(-1, -2))).to(v.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.norms(weight).flatten()[: self.outputs].to(weight.dtype), weight
