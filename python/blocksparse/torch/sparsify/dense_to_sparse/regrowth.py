"""Moments of blocks that come back in dense training: they begin at zero, with a bias correction of their own.

While a block is dead its gradient is zero. Adam's exp_avg then fades away, but exp_avg_sq remembers for long what the
block was before. `Regrown` makes both zero when a block comes back. Adam divides them by 1 - beta^t of the whole
parameter, which is wrong for a block of age a; `moments` says how that is put right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optimizer.moments import YOUNG, corrected_lack, settling_factors
from ..weights.masked_layer import Layer
from ..weights.masks import Masks


class Regrown:
    """Which blocks of which layer have come back after which step, while they are young."""

    def __init__(self) -> None:
        self._born: dict[str, dict[int, Tensor]] = {}  # {layer: {step: bool [out_blocks, in_blocks]}}
        self._places: dict[tuple[str, int], list[Any]] = {}  # where those are in each of `Target.views`

    @torch.no_grad()
    def note(self, before: Masks, layers: Mapping[str, Layer], step: int, optimizers: Sequence[Optimizer]) -> None:
        """To be called after blocks were chosen: moments of those that have come back become zero."""
        self._places = {}
        for name, layer in layers.items():
            mask = layer.mask
            born = {s: blocks & mask for s, blocks in self._born.get(name, {}).items()}
            found = mask & ~before[name].to(mask.device)
            states = _states(layer, optimizers)
            if states and bool(found.any()):
                born[step] = found
                for _, state in states:
                    for value in _whole(state, layer).values():
                        layer.target.keep_(value, ~found)
            self._born[name] = {s: blocks for s, blocks in born.items() if bool(blocks.any())}

    @torch.no_grad()
    def correct(self, layers: Mapping[str, Layer], step: int, optimizers: Sequence[Optimizer]) -> None:
        """To be called after each step of the optimizers, with the count of steps with this one."""
        for name, born in self._born.items():
            if not born:
                continue
            layer = layers[name]
            for optimizer, state in _states(layer, optimizers):
                group = next(g for g in optimizer.param_groups if any(p is layer.target.parameter for p in g["params"]))
                for birth, blocks in born.items():
                    self._correct(layer, (name, birth), optimizer, group, state, step - birth)
                    if step - birth >= YOUNG:
                        for key, factor in settling_factors(optimizer, group, state, step - birth).items():
                            state[key].copy_(layer.target.times(state[key], torch.where(blocks, factor, 1.0)))
            self._born[name] = {birth: blocks for birth, blocks in born.items() if step - birth < YOUNG}

    def _correct(
        self, layer: Layer, key: tuple[str, int], optimizer: Optimizer, group: Any, state: dict[str, Any], age: int
    ) -> None:
        """Of the blocks of one age, and of no others: few come back, and ten passes over all would cost a step."""
        target, views = layer.target, list(layer.target.views(layer.target.parameter.data))
        if key not in self._places:  # asked once: to find them waits for a card
            found = [self._born[key[0]][key[1]][place].nonzero(as_tuple=True) for _, place in views]
            self._places[key] = [f if len(f) == 1 else (f[0], slice(None), f[1]) for f in found]
        moments = {name: [part for part, _ in target.views(value)] for name, value in _whole(state, layer).items()}
        for i, ((view, _), place) in enumerate(zip(views, self._places[key], strict=True)):
            if place[0].numel() == 0:
                continue
            those = {**state, **{name: parts[i][place] for name, parts in moments.items()}}
            if (lack := corrected_lack(optimizer, group, those, age)) is not None:
                view[place] += lack.to(view.dtype)

    def state(self) -> dict[str, dict[int, Tensor]]:
        """For a state dict."""
        return {name: dict(born) for name, born in self._born.items() if born}

    def load(self, state: Mapping[str, Mapping[int, Tensor]], layers: Mapping[str, Layer]) -> None:
        """What was saved."""
        self._places = {}
        self._born = {
            name: {birth: blocks.to(layers[name].gates.device) for birth, blocks in born.items()}
            for name, born in state.items()
        }


def _states(layer: Layer, optimizers: Iterable[Optimizer]) -> list[tuple[Optimizer, dict[str, Any]]]:
    parameter = layer.target.parameter
    return [(optimizer, optimizer.state[parameter]) for optimizer in optimizers if optimizer.state.get(parameter)]


def _whole(state: Mapping[str, Any], layer: Layer) -> dict[str, Tensor]:
    """The moments: what has the weight's shape."""
    shape = layer.target.parameter.shape
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
