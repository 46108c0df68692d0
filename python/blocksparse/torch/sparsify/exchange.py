"""Which blocks go and which come: pure functions of tensors, of fixed shapes, that wait for no card.

Blocks are known by their places, row * columns + column, in rising order: the order of a layout's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..._core.arguments import to_int
from ...schedules import check_sparsity

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True)
class CosineDrop:
    """The share of a layer's blocks that are exchanged: f(t) = alpha / 2 (1 + cos(pi t / end_step)).

    Args:
        end_step: none are from here on. RigL's paper takes 75 % of the training.
        alpha: the share at the beginning, in [0, 1).
        frequency: steps from one exchange to the next; the first is at step `frequency`.

    Raises:
        ValueError: a number is out of range.

    Source: Evci et al., "Rigging the lottery", arXiv:1911.11134 (2019).
    """

    end_step: int
    alpha: float = 0.3
    frequency: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", check_sparsity("CosineDrop", "alpha", self.alpha))
        for name in ("end_step", "frequency"):
            if to_int(name, getattr(self, name), op="CosineDrop") < 1:
                raise ValueError(f"[CosineDrop] {name} is {getattr(self, name)}, needs 1 or more")

    def acts_at(self, step: int) -> bool:
        """Whether blocks are exchanged after a step of the optimizer; the first step is 1."""
        return 0 < step < self.end_step and step % self.frequency == 0

    def share(self, step: int) -> float:
        """f(step), 0 from `end_step` on."""
        return self.alpha / 2 * (1 + math.cos(math.pi * min(step / self.end_step, 1)))

    def count(self, step: Tensor, blocks: int) -> Tensor:
        """floor(f(step) blocks + 1/2), int64, where step is: what a captured graph reads at each replay."""
        part = (step.to(torch.float64) / self.end_step).clamp(max=1)
        share = ((part * math.pi).cos() + 1) * (self.alpha / 2)
        return (share * blocks + 0.5).floor().to(torch.int64)


class Exchange(NamedTuple):
    """What becomes of a layer's blocks."""

    places: Tensor
    """int64 [blocks], rising: where the blocks are now."""
    source: Tensor
    """int64 [blocks]: which block each of them was."""
    kept: Tensor
    """bool [blocks]; the others are new, and their source means nothing."""
    mask: Tensor
    """bool [grid]: where blocks are."""


def exchange(places: Tensor, norms: Tensor, priorities: Tensor, count: Tensor, most: int) -> Exchange:
    """The blocks of the lowest norms go, and as many come where nothing was, at the highest priorities.

    Of equal norms or priorities, the lowest places are taken.

    Args:
        places: int64 [blocks], rising.
        norms: [blocks].
        priorities: [grid], of all places; those that have a block do not count.
        count: int64 [], how many are exchanged, 0 to `most`.
        most: of any count: at most the blocks, and the places that are empty.
    """
    blocks, grid = places.numel(), priorities.numel()
    moves = torch.arange(most, device=places.device) < count
    was = torch.zeros(grid, dtype=torch.bool, device=places.device).index_fill_(0, places, True)
    going = places[norms.argsort(stable=True)[:most]]
    coming = priorities.masked_fill(was, -math.inf).argsort(descending=True, stable=True)[:most]
    mask = was.scatter(0, going, moves.logical_not()).scatter_(0, coming, moves)
    ranks = torch.arange(1, blocks + 1, device=places.device)
    now = torch.searchsorted(mask.cumsum(0), ranks)  # the first place with so many blocks up to it
    source = (was.cumsum(0) - 1).index_select(0, now).clamp_min_(0)
    return Exchange(now, source, was.index_select(0, now), mask)


def random_priorities(seed: int, layer: int, step: Tensor, grid: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [grid], a pure function of seed, layer, step and place.

    The same on all devices, and in all replays of a graph with the same step: no generator has a state to save.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): SplitMix64.
    """
    key = _mixed((seed + _STEP) & _MASK)
    key = _mixed((key + layer) & _MASK)
    base = _scramble(step.to(torch.int64) * _signed(_STEP) + _signed(key))
    place = torch.arange(1, grid + 1, device=step.device, dtype=torch.int64)
    bits = _scramble(place * _signed(_STEP) + base)
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def _signed(word: int) -> int:
    """The number of the same 64 bits that int64 has."""
    return word - (1 << 64) if word >> 63 else word


def _mixed(word: int) -> int:
    for bits, factor in _FACTORS:
        word = ((word ^ (word >> bits)) * factor) & _MASK
    return word ^ (word >> 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(words: Tensor) -> Tensor:
    """`_mixed` of int64, whose products wrap."""
    for bits, factor in _FACTORS:
        words = (words ^ _shifted(words, bits)) * _signed(factor)
    return words ^ _shifted(words, 31)
