"""Which rate, warm-up and end of the cosine an arm trains with: one after the other, until the best lies inside.

Every arm gets as many trials. Where the best of one lies at an edge it gets more, and so do the others then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MORE = 4  # trials beyond what was asked for, at most, of an arm whose best stays at an edge


@dataclass(frozen=True)
class Setting:
    """What is swept: a field of TrainConfig, its bounds, and what names a run that has another value of it."""

    field: str
    words: str
    short: str
    least: float = 0.0
    most: float = math.inf
    whole: bool = False

    def is_inside(self, losses: dict[float, float]) -> bool:
        """Whether the best value has tried ones on both sides, or a bound; no where all have diverged."""
        best = min(losses, key=lambda value: losses[value])
        return math.isfinite(losses[best]) and all(best == bound or best != edge for bound, edge in self._edges(losses))

    def next_value(self, losses: dict[float, float]) -> float | None:
        """Half or twice the best one at an edge, else between it and its better neighbour; None: it was tried."""
        values = sorted(losses)
        at = min(range(len(values)), key=lambda i: losses[values[i]])
        best = values[at]
        if at == 0 and best > self.least:
            value = max(best / 2, self.least)
        elif at == len(values) - 1 and best < self.most:
            value = min(best * 2, self.most)
        else:
            beside = [values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)]
            other = min(beside, key=lambda value: losses[value], default=best)
            value = math.sqrt(best * other) if min(best, other) > 0 else (best + other) / 2
        value = round(value) if self.whole else float(f"{value:.3g}")
        return None if value in losses else value

    def _edges(self, losses: dict[float, float]) -> tuple[tuple[float, float], tuple[float, float]]:
        return (self.least, min(losses)), (self.most, max(losses))


SETTINGS = (
    Setting("lr", "rate", "lr"),
    Setting("warmup", "warm-up", "warmup", whole=True),
    Setting("min_lr_ratio", "end of the cosine", "end", most=1.0),
)


def bits(line: dict[str, Any]) -> float:
    """Per byte of the text that chooses, of a line of results; older lines have one text for both."""
    return math.inf if line.get("diverged") else float(line["choose" if "choose" in line else "valid"])


def sweep(
    setting: Setting,
    values: dict[str, list[float]],
    known: dict[str, dict[float, float]],
    trials: int,
    loss: Callable[[str, float], float],
) -> dict[str, float]:
    """The best value of each arm, but of those that have diverged with all that was tried.

    Args:
        setting: what is swept.
        values: of each arm, those to begin with.
        known: of each arm, losses of values that were tried before.
        trials: of each arm, at least; 0: only `values`, whatever else is known.
        loss: of an arm and a value: a short training.
    """
    losses = {
        arm: {value: found for value, found in known[arm].items() if trials or value in first}
        for arm, first in values.items()
    }
    asked = max([trials, *map(len, values.values())]) if trials else 0
    for arm, first in values.items():
        for value in first:
            if value not in losses[arm]:
                losses[arm][value] = loss(arm, value)
    aim, most = 0, asked
    while aim < most:
        aim = most
        for arm, its in losses.items():
            while len(its) < aim or (len(its) < asked + MORE and not setting.is_inside(its)):
                another = setting.next_value(its)
                if another is None:
                    break
                its[another] = loss(arm, another)
        most = max(map(len, losses.values()), default=0)
    best = {arm: min(its.items(), key=lambda item: item[1])[0] for arm, its in losses.items()}
    return {arm: value for arm, value in best.items() if math.isfinite(losses[arm][value])}
