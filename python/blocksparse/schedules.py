"""How sparse a model is to be at each step: pure functions of the step, so that a run that is resumed goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

from ._core.arguments import to_int, to_number


class Schedule(Protocol):
    """What sparsifiers ask. Step t is the moment after the t-th step of the optimizer; 0 is that of `prepare`."""

    @property
    def final_sparsity(self) -> float:
        """The sparsity that it ends with, in [0, 1)."""

    @property
    def begin_step(self) -> int:
        """The first step that acts."""

    @property
    def end_step(self) -> int:
        """The last step that acts."""

    def sparsity(self, step: int) -> float:
        """Share of the blocks that are zero at a step."""

    def acts_at(self, step: int) -> bool:
        """Whether blocks are chosen anew at a step."""


def live_blocks(blocks: int, sparsity: float) -> int:
    """How many of so many blocks are live: blocks - floor(blocks sparsity + 1/2)."""
    return blocks - math.floor(blocks * sparsity + 0.5)


def check_sparsity(op: str, name: str, value: object) -> float:
    """The sparsity as a float; raises unless it is a number in [0, 1)."""
    number = to_number(op, name, value)
    if not 0 <= number < 1:
        raise ValueError(f"[{op}] {name} is {value}, needs 0 <= {name} < 1")
    return number


class _Steps:
    """Checks that schedules share, and when they act: every `frequency` steps from `begin_step`, and at `end_step`."""

    begin_step: int
    end_step: int
    frequency: int

    def __post_init__(self) -> None:
        op = type(self).__name__
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if field.name.endswith("sparsity"):
                self._set(field.name, check_sparsity(op, field.name, value))
            elif field.name in ("begin_step", "end_step", "ramp_step", "frequency"):
                self._set(field.name, to_int(field.name, value, op=op))
        if self.begin_step < 0:
            raise ValueError(f"[{op}] begin_step is {self.begin_step}, needs 0 or more")
        if self.end_step < self.begin_step:
            raise ValueError(f"[{op}] end_step is {self.end_step}, needs begin_step ({self.begin_step}) or more")
        if self.frequency < 1:
            raise ValueError(f"[{op}] frequency is {self.frequency}, needs 1 or more")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def acts_at(self, step: int) -> bool:
        """Whether blocks are chosen anew at a step."""
        if not self.begin_step <= step <= self.end_step:
            return False
        return step == self.end_step or (step - self.begin_step) % self.frequency == 0


@dataclass(frozen=True)
class Constant(_Steps):
    """One sparsity from a step on.

    Args:
        final_sparsity: share of blocks that are zero, in [0, 1).
        begin_step: the first step that acts; 0 is `prepare` itself.
        end_step: the last one that acts; by default the first one.
        frequency: steps from one that acts to the next.

    Raises:
        ValueError: the sparsity is outside of [0, 1), it ends before it begins, or the frequency is less than 1.
    """

    final_sparsity: float
    begin_step: int = 0
    end_step: int = -1
    frequency: int = 100

    def __post_init__(self) -> None:
        if self.end_step == -1:
            self._set("end_step", self.begin_step)
        super().__post_init__()

    def sparsity(self, step: int) -> float:
        """0 before `begin_step`, then the final sparsity."""
        return self.final_sparsity if step >= self.begin_step else 0.0


@dataclass(frozen=True)
class PolynomialDecay(_Steps):
    """Sparsity that rises fast at first and slowly at the end. ::

        s(t) = s_final + (s_initial - s_final) (1 - (t - begin) / (end - begin))^power

    Args:
        final_sparsity: share of blocks that are zero from `end_step` on, in [0, 1).
        begin_step: the first step that acts; 0 is `prepare` itself.
        end_step: the last one that acts, whatever the frequency.
        initial_sparsity: the sparsity at `begin_step`.
        power: of the polynomial; 3 is the cubic schedule.
        frequency: steps from one that acts to the next.

    Raises:
        ValueError: a sparsity is outside of [0, 1), the final one is less than the initial one, it ends before it
            begins, or the frequency or the power is not positive.

    Source: Zhu and Gupta, "To prune, or not to prune", arXiv:1710.01878 (2017).
    """

    final_sparsity: float
    begin_step: int
    end_step: int
    initial_sparsity: float = 0.0
    power: float = 3.0
    frequency: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final_sparsity < self.initial_sparsity:
            raise ValueError(
                f"[PolynomialDecay] final_sparsity is {self.final_sparsity}, needs initial_sparsity "
                f"({self.initial_sparsity}) or more"
            )
        self._set("power", to_number("PolynomialDecay", "power", self.power))
        if not self.power > 0 or math.isinf(self.power):
            raise ValueError(f"[PolynomialDecay] power is {self.power}, needs a number above 0")

    def sparsity(self, step: int) -> float:
        """0 before `begin_step`, then as above."""
        if step < self.begin_step:
            return 0.0
        if step >= self.end_step:
            return self.final_sparsity
        left = 1 - (step - self.begin_step) / (self.end_step - self.begin_step)
        return self.final_sparsity + (self.initial_sparsity - self.final_sparsity) * float(left**self.power)


@dataclass(frozen=True)
class ThresholdRamp(_Steps):
    """A threshold on the largest |w| of a block, for `GroupLasso`: it rises slowly, then faster, then stays. ::

        theta = q frequency / ((ramp - begin) + steepening (end - ramp))
        threshold(t) = theta (t - begin) / frequency                           up to ramp
        threshold(t) = (theta (ramp - begin) + steepening theta (t - ramp)) / frequency    up to end, where it is q

    A block whose largest |w| is below the threshold is zero from then on. The sparsity that follows is not given.

    Args:
        final_threshold: q, the threshold at the end. The paper takes the 90th percentile of |w| in a trained dense
            model, times (elements per block)^(1/4) for blocks: see `from_quantile`.
        begin_step: the first step that acts.
        ramp_step: where it becomes steeper: 20 to 25 % of the training.
        end_step: the last step that acts: 40 to 50 % of the training.
        steepening: 1.5 to 2.
        frequency: steps from one that acts to the next.

    Source: Narang, Undersander and Diamos, "Block-sparse recurrent neural networks", arXiv:1711.02782 (2017).
    """

    final_threshold: float
    begin_step: int
    ramp_step: int
    end_step: int
    steepening: float = 1.5
    frequency: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("final_threshold", "steepening"):
            self._set(name, to_number("ThresholdRamp", name, getattr(self, name)))
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"[ThresholdRamp] {name} is {getattr(self, name)}, needs a number above 0")
        if not self.begin_step <= self.ramp_step <= self.end_step or self.begin_step == self.end_step:
            raise ValueError(
                f"[ThresholdRamp] begin_step, ramp_step, end_step are {self.begin_step}, {self.ramp_step}, "
                f"{self.end_step}, needs rising numbers"
            )

    @classmethod
    def from_quantile(cls, quantile: float, block_size: int, **steps: Any) -> ThresholdRamp:
        """With q = quantile (b^2)^(1/4), the quantile being the 90th percentile of |w| in a trained dense model."""
        return cls(to_number("ThresholdRamp", "quantile", quantile) * math.sqrt(block_size), **steps)

    def threshold(self, step: int) -> float:
        """As above; 0 before `begin_step`."""
        before, after = self.ramp_step - self.begin_step, self.end_step - self.ramp_step
        slope = self.final_threshold / (before + self.steepening * after)
        step = min(max(step, self.begin_step), self.end_step)
        return slope * (min(step, self.ramp_step) - self.begin_step + self.steepening * max(0, step - self.ramp_step))
