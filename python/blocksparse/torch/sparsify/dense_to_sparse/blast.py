"""`Blast`: prunes by norm and grows by gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...._core.arguments import to_number
from ....schedules import Schedule, live_blocks
from ..distributed import World
from ..weights.masked_layer import Layer
from ..weights.masks import Masks, in_pools, top_blocks
from .pruner import Pruner


class Blast(Pruner):
    """Keeps the blocks with the largest norms, and lets some come back where the gradient is largest. ::

        k(t) = blocks - floor(blocks s(t) + 1/2)                      live blocks
        g(t) = floor(k(t) grow (1 + cos(pi (t - begin) / (end - begin))) / 2 + 1/2)      of these grown

    At a step that acts, the k - g blocks with the largest |W_B|_F stay, and of the others the g with the largest
    |dW_B|_F are live, too; those of them that were dead start at zero. dW is that of the step before which the choice
    is made: the sum over micro-batches and processes of their norms. At the end of the schedule nothing is grown.

    Args:
        schedule: how sparse at which step.
        grow: share of the live blocks that are chosen by gradient at the beginning, 0 to 1.
        options: `block_size`, `targets`, `ignore`, `scope`: see `Pruner`.

    Raises:
        ValueError: grow is outside of [0, 1].

    Source: "BLaST: high performance inference and pretraining using block sparse transformers", arXiv:2507.03117
    (2025). The share that shrinks by a cosine is RigL's, arXiv:1911.11134 (2019): the number of live blocks is exact.
    """

    def __init__(self, schedule: Schedule, *, grow: float = 0.1, **options: Any) -> None:
        super().__init__(schedule, **options)
        if not 0 <= to_number("Blast", "grow", grow) <= 1:
            raise ValueError(f"[Blast] grow is {grow}, needs 0 to 1")
        self.grow = grow
        self._gradients: dict[str, Tensor] = {}

    def _on_gradient(self, layer: Layer, gradient: Tensor) -> Tensor:
        if self._due or self.schedule.acts_at(self.steps + 1):
            norms, name = layer.target.norms(tensor=gradient.detach()), layer.target.name
            first = name not in self._gradients or layer.target.parameter.grad is None  # of several micro-batches
            self._gradients[name] = norms if first else self._gradients[name] + norms
        return super()._on_gradient(layer, gradient)

    def _scores(self, layer: Layer) -> Tensor:
        return layer.target.norms()

    def _gather(self) -> dict[str, Tensor]:
        local = {
            name: self._gradients.get(name, torch.zeros_like(layer.dropped)) for name, layer in self.layers.items()
        }
        self._gradients = dict(zip(local, World().sum(list(local.values())), strict=True))
        return self._gradients

    def _masks_from(self, scores: Masks) -> Masks:
        by_gradient, self._gradients = self._gradients, {}
        schedule = self.schedule
        length = max(schedule.end_step - schedule.begin_step, 1)
        passed = min(max(self.steps - schedule.begin_step, 0) / length, 1)
        share = self.grow * (1 + math.cos(math.pi * passed)) / 2
        sparsity = self._sparsity()

        def pick(norms: Tensor, gradients: Tensor, allowed: Tensor) -> Tensor:
            live = live_blocks(norms.numel(), sparsity)
            grown = math.floor(live * share + 0.5) if self.steps else 0
            stay = top_blocks(torch.where(allowed, norms, -math.inf), live - grown) & allowed
            return stay | top_blocks(torch.where(allowed & ~stay, gradients, -math.inf), grown) & allowed

        allowed = {name: layer.allowed for name, layer in self.layers.items()}
        return in_pools(pick, self.scope, scores, by_gradient, allowed)
