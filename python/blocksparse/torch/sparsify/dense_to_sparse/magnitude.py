"""`MagnitudePruner`: gradual pruning by the norms of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....schedules import Schedule
from ..weights.masked_layer import Layer
from .pruner import Pruner


class MagnitudePruner(Pruner):
    """Keeps the blocks with the largest Frobenius norms, ever fewer of them. ::

        pruner = bss.MagnitudePruner(
            bss.PolynomialDecay(final_sparsity=0.9, begin_step=200, end_step=2000, frequency=50), block_size=32)

    With `regrow` the values of blocks that are dropped are kept aside. Such a block comes back, as it was, when live
    blocks have become smaller than it: blocks are chosen among all of them each time, as in the paper, where masked
    weights keep their values. Without it what was dropped stays zero.

    Args:
        schedule: how sparse at which step.
        regrow: whether blocks can come back, for which memory of the weight's size is held.
        options: `block_size`, `targets`, `ignore`, `scope`: see `Pruner`.

    Source: Zhu and Gupta, "To prune, or not to prune", arXiv:1710.01878 (2017), by blocks.
    """

    def __init__(self, schedule: Schedule, *, regrow: bool = True, **options: Any) -> None:
        super().__init__(schedule, **options)
        self.regrow = bool(regrow)

    def _prepared(self, model: nn.Module) -> None:
        if self.regrow:
            for layer in self.layers.values():
                layer.shadow = torch.zeros_like(layer.target.parameter)

    def _scores(self, layer: Layer) -> Tensor:
        norms = layer.target.norms()
        return torch.where(layer.mask, norms, layer.dropped.to(norms)) if self.regrow else norms

    def _candidates(self, layer: Layer) -> Tensor:
        return layer.allowed if self.regrow else layer.mask
