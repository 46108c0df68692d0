"""`GroupLasso`: blocks are shrunk at each step, and those that have become small are dropped."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from ...._core.arguments import shown, to_number
from ....schedules import Schedule, ThresholdRamp
from ..weights.masked_layer import Layer
from ..weights.masks import Masks
from ..weights.targets import Target
from .pruner import Pruner

_LEAST = 1e-12  # under the root of a norm


def shrink_(target: Target, rate: float | Tensor) -> None:
    """The proximal step of group lasso on the blocks B of a weight: W_B <- W_B (1 - min(rate / |W_B|_2, 1)).

    |W_B|_2 is the root of the sum of squares + 1e-12.

    Raises:
        ValueError: the rate is negative or not finite.

    Source: Yuan and Lin, "Model selection and estimation in regression with grouped variables" (2006).
    """
    if not 0 <= (float(rate) if isinstance(rate, Tensor) else to_number("shrink_", "rate", rate)) < math.inf:
        raise ValueError(f"[shrink_] rate is {shown(rate)}, needs 0 or more")
    _shrink(target, rate)


@torch.no_grad()
def _shrink(target: Target, rate: float | Tensor) -> None:
    """`shrink_` with a rate that was checked, or comes from a card, for which it does not wait."""
    norms = target.norms().square().add_(_LEAST).sqrt_()
    target.scale_(target.parameter.data, 1 - (rate / norms).clamp(max=1))


class GroupLasso(Pruner):
    """Group lasso by a proximal step after each step of the optimizer, then pruning. ::

        W_B <- W_B (1 - min(rate / |W_B|_2, 1)),  rate = strength x the weight's learning rate

    The penalty strength x sum over blocks |W_B|_2 never goes through the optimizer, whose moments would scale it away.
    With a schedule of sparsities the blocks with the largest norms stay, an exact number of them. With a
    `ThresholdRamp` those stay whose largest |w| is not below the threshold, however many these are. What was dropped
    stays zero. Shrinking ends with the schedule.

    Args:
        schedule: of sparsities, or a `ThresholdRamp`.
        strength: of the penalty.
        rate: in place of strength x learning rate.
        options: `block_size`, `targets`, `ignore`, `scope`: see `Pruner`.

    Raises:
        ValueError: strength or rate is negative or not finite.

    Source: Narang, Undersander and Diamos, "Block-sparse recurrent neural networks", arXiv:1711.02782 (2017); the
    proximal step: Yuan and Lin (2006).
    """

    def __init__(
        self, schedule: Schedule | ThresholdRamp, *, strength: float = 1.0, rate: float | None = None, **options: Any
    ) -> None:
        self.ramp = schedule if isinstance(schedule, ThresholdRamp) else None
        if self.ramp is not None:
            self._schedule_method = "threshold"
        super().__init__(cast(Schedule, schedule), **options)
        for name, value in (("strength", strength), ("rate", rate)):
            if value is not None and not 0 <= to_number("GroupLasso", name, value) < math.inf:
                raise ValueError(f"[GroupLasso] {name} is {shown(value)}, needs 0 or more")
        self.strength, self.rate = strength, rate

    def step(self) -> None:
        """See `Pruner.step`; needs `rate`, since no optimizer tells one."""
        if self.rate is None and self.layers and not self._optimizers:
            raise RuntimeError("[GroupLasso] is not attached to an optimizer, so needs rate=")
        super().step()

    def _adjust(self) -> None:
        if self.steps > self.schedule.end_step:
            return
        for layer in self.layers.values():
            _shrink(layer.target, self._rate_of(layer))

    def _rate_of(self, layer: Layer) -> float | Tensor:
        if self.rate is not None:
            return self.rate
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if any(p is layer.target.parameter for p in group["params"]):
                    return self.strength * group["lr"]
        raise RuntimeError("[GroupLasso] is not attached to an optimizer, so needs rate=")

    def _scores(self, layer: Layer) -> Tensor:
        return layer.target.norms(2 if self.ramp is None else math.inf)

    def _masks_from(self, scores: Masks) -> Masks:
        if self.ramp is None:
            return super()._masks_from(scores)
        threshold = self.ramp.threshold(self.steps)
        return {name: layer.mask & (scores[name] >= threshold) for name, layer in self.layers.items()}

    def _candidates(self, layer: Layer) -> Tensor:
        return layer.mask
