"""Which blocks go and which come: pure functions of tensors, of fixed shapes, that wait for no card.

Blocks are known by their places, row * columns + column, in rising order: the order of a layout's values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...._core.arguments import to_int
from ....schedules import check_sparsity

FEW_PLACES = 1 << 22  # of a grid whose places are all looked at: 32 MB of random numbers
DENSE = 16  # a grid of so many places a block, or fewer, is looked at as a whole: few of the empty ones may be left
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


class Candidates(NamedTuple):
    """Empty places of a layer where blocks may come."""

    places: Tensor
    """int64 [most], the best first."""
    there: Tensor
    """int64 [], how many there are; what follows them means nothing."""
    finite: Tensor
    """bool [], whether all that they were chosen by is finite."""


class Exchange(NamedTuple):
    """What becomes of a layer's blocks."""

    places: Tensor
    """int64 [blocks], rising: where the blocks are now."""
    source: Tensor
    """int64 [blocks]: which block each of them was."""
    kept: Tensor
    """bool [blocks]; the others are new, and their source means nothing."""


def exchange(places: Tensor, norms: Tensor, coming: Tensor, count: Tensor, most: int) -> Exchange:
    """The blocks of the lowest norms go, and as many come: at equal norms, those of the lowest places go.

    Args:
        places: int64 [blocks], rising.
        norms: [blocks].
        coming: int64 [most], where nothing is; the first `count` of them are taken.
        count: int64 [], how many are exchanged, 0 to `most`.
        most: of any count: at most the blocks, and the places that are empty.
    """
    blocks, nowhere = places.numel(), torch.iinfo(torch.int64).max
    moves = torch.arange(most, device=places.device) < count
    going = norms.argsort(stable=True)[:most]
    staying = places.scatter(0, going, places[going].masked_fill(moves, nowhere))
    now, source = torch.cat([staying, coming.masked_fill(moves.logical_not(), nowhere)]).sort()
    now, source = now[:blocks], source[:blocks]
    kept = source < blocks
    return Exchange(now, source.where(kept, 0), kept)


# ---- Where blocks may come -----------------------------------------------------------------------------------------


def best_candidates(priorities: Tensor, places: Tensor, most: int) -> Candidates:
    """The empty places of the highest priorities [grid]; of equal ones, the lowest places."""
    was = torch.zeros(priorities.numel(), dtype=torch.bool, device=places.device).index_fill_(0, places, True)
    best = priorities.masked_fill(was, -math.inf).argsort(descending=True, stable=True)[:most]
    return Candidates(best, torch.full((), most, device=places.device), priorities.isfinite().all())


def best_of_strips(strips: Iterable[Tensor], places: Tensor, most: int) -> Candidates:
    """`best_candidates` of priorities that come strip by strip, of which one is in memory at a time.

    Priorities are 0 or more. In float32 they are in the order of their bits, so that bits and the place make a key by
    which a selection is as exact as a sort.
    """
    empty, low = -1, (1 << 32) - 1
    values = torch.full((most,), empty, device=places.device)
    best, begin = torch.zeros_like(values), 0
    finite = torch.ones((), dtype=torch.bool, device=places.device)
    for strip in strips:
        finite &= strip.isfinite().all()  # a list of them kept the heap from using the memory of strips again: 4 GB
        size, bits = strip.numel(), strip.float().view(torch.int32).long()
        keys = (bits << 32) | (low - torch.arange(size, device=bits.device))
        inside = torch.where((places >= begin) & (places < begin + size), places - begin, size)
        keys = torch.cat([keys, keys[:1]]).index_fill_(0, inside, empty)[:size]
        found = keys.topk(min(most, size)).values
        # Those of former strips come first, as they do where all are sorted at once.
        values, order = torch.cat([values, found >> 32]).sort(descending=True, stable=True)
        best = torch.cat([best, low - (found & low) + begin])[order[:most]]
        values, begin = values[:most], begin + size
    return Candidates(best, torch.full((), most, device=places.device), finite)


def random_candidates(seed: int, layer: int, step: Tensor, places: Tensor, grid: int, most: int) -> Candidates:
    """Empty places at random, every set of `most` of them equally likely: see `random_priorities`.

    Of a grid that is large and nearly empty, places are drawn one by one, and drawn again where something is: time and
    memory are proportional to the blocks. So many are drawn that the count falls short of `most` in no run of a life.
    """
    if grid <= max(FEW_PLACES, DENSE * places.numel()):
        return best_candidates(random_priorities(seed, layer, step, grid), places, most)
    drawn = random_priorities(seed, layer, step, 2 * most + 64).mul_(grid).to(torch.int64).clamp_(max=grid - 1)
    rising, order = drawn.sort(stable=True)
    unfit = places[torch.searchsorted(places, rising).clamp_(max=places.numel() - 1)] == rising
    unfit[1:] |= rising[1:] == rising[:-1]
    unfit = torch.zeros_like(unfit).scatter_(0, order, unfit)  # in the order in which they were drawn
    chosen = unfit.to(torch.uint8).argsort(stable=True)[:most]
    return Candidates(drawn[chosen], (~unfit).sum().clamp(max=most), torch.ones_like(unfit[0]))


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
