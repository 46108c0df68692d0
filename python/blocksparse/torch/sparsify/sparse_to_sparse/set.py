"""`SET`: blocks grow at random places."""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import Candidates, random_candidates
from .rewiring import Rewiring


class SET(Rewiring):
    """Sparse evolutionary training: blocks of the lowest norms go, and as many come at random places. See `Rewiring`.

    Source: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity",
    Nature Communications 9:2383 (2018), by blocks and with RigL's schedule.
    """

    def _candidates(self) -> tuple[list[Candidates], Tensor]:
        made = [
            random_candidates(self.seed, i, self._clock, layer.places, layer.grid[0] * layer.grid[1], layer.most)
            for i, layer in enumerate(self._layers)
        ]
        return made, torch.ones(len(made), dtype=torch.bool, device=self._device)
