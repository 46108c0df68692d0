"""`Steps`: what a pruner does at each step of the optimizer, and what a method says of it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....schedules import check_sparsity
from ..conversion.compact import due, move_layers
from ..distributed import World
from ..optimizer.finite import drop_bad_gradients, step_is_over
from ..weights.masked_layer import Layer
from ..weights.masks import Masks, check_masks, choose_blocks, warn_of_empty
from .checkpoint import Saved


class Steps(Saved):
    """The part of a `Pruner` that acts: before and after a step of the optimizer, and when blocks are chosen."""

    scope: str
    compact_at: tuple[float, ...]
    moves: int
    _model: nn.Module | None
    _optimizers: tuple[Optimizer, ...]
    _skips: bool
    _unseen: list[Layer]
    _said: set[str]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._with_gradients(optimizer)
            return None

        def then() -> Any:
            """Gradients are there when the closure has run."""
            loss = closure()
            self._with_gradients(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": then}

    def _with_gradients(self, optimizer: Optimizer) -> None:
        if self._unseen:
            moved, self._unseen = self._unseen, []
            World().check_same_gradients(
                type(self).__name__, {layer.target.name: layer.target.parameter for layer in moved}
            )
        weights = {id(layer.target.parameter) for layer in self.layers.values()}
        apart = {id(p) for p in self._trained().values()} - weights  # gates: processes do not have the same ones yet
        self._skips = drop_bad_gradients(self, self._optimizers, apart)
        if self._skips:
            text = f"step {self.steps + 1} is skipped: a gradient is not finite. Nothing was changed"
            warnings.warn(f"[{type(self).__name__}] {text}", RuntimeWarning, stacklevel=2)
        else:
            self._before_step(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        step_is_over(self, self._optimizers)
        found = getattr(optimizer, "found_inf", None)  # a GradScaler lets fused optimizers themselves skip a step
        if self._skips or (found is not None and bool(found != 0)):
            self._skips = False
            return
        self._step()

    @torch.no_grad()
    def _step(self) -> None:
        self.steps += 1
        for layer in self.layers.values():
            layer.hook(self._on_gradient)
        self._regrown.correct(self.layers, self.steps, self._optimizers)
        self._zero()
        self._adjust()
        if self._due or self.schedule.acts_at(self.steps):
            self._choose()

    def _zero(self) -> None:
        """Dead blocks, which momentum and weight decay have moved."""
        for layer in self.layers.values():
            layer.target.keep_(layer.target.parameter.data, layer.mask)

    @torch.no_grad()
    def _choose(self) -> None:
        scores = {name: self._scores(layer) for name, layer in self.layers.items()}
        grown_by = self._gather()
        finite = {}
        for name, score in scores.items():
            given = [score, self.layers[name].target.parameter.grad, grown_by.get(name)]
            finite[name] = torch.stack([t.isfinite().all() for t in given if t is not None]).all()
        if not bool(torch.stack([f.cpu() for f in finite.values()]).all()):
            self._due = True
            names = [name for name, f in finite.items() if not f]
            self._say(f"step {self.steps}: {', '.join(names)} has a gradient or weight that is not finite: blocks stay")
            return
        self._due, before = False, {name: layer.mask for name, layer in self.layers.items()}
        for name, mask in self._masks_from(scores).items():
            self.layers[name].choose(mask)
        self._regrown.note(before, self.layers, self.steps, self._optimizers)
        self._chosen()
        if self.compact_at and self._optimizers and self._model is not None:
            self._move([layer for layer in self.layers.values() if due(layer, self.compact_at)])
        self._warn_of_emptied(before)

    def _warn_of_emptied(self, before: Masks) -> None:
        """Once for each layer, and not for those of which `prepare` has said so."""
        had_some = [name for name, mask in before.items() if name not in self._said and bool(mask.any())]
        now = {name: self.layers[name].mask for name in had_some}
        self._said |= set(warn_of_empty(type(self).__name__, now, f"step {self.steps}: "))

    def _move(self, layers: list[Layer]) -> None:
        if layers and self._model is not None:
            parameters = {layer: layer.target.parameter for layer in layers}
            move_layers(self._model, layers, self._optimizers, self)
            self._unseen = [layer for layer, old in parameters.items() if layer.target.parameter is not old]
            for layer in self._unseen:  # a step may come before the next one of this pruner
                layer.hook(self._on_gradient)
            self.moves += bool(self._unseen)

    @torch.no_grad()
    def _store(self, stored: dict[str, Tensor]) -> None:
        moving = []
        for name, blocks in check_masks([self.layers[name].target for name in stored], stored).items():
            layer, now = self.layers[name], self.layers[name].stored()
            if now is None or not torch.equal(now, blocks):
                layer.gates.copy_(blocks)
                moving.append(layer)
        self._move(moving)

    def _masks_from(self, scores: Masks) -> Masks:
        """Those with the largest scores, and no others than `allowed`."""
        candidates = {name: self._candidates(layer) for name, layer in self.layers.items()}
        ranked = {name: torch.where(candidates[name], score, -math.inf) for name, score in scores.items()}
        chosen = choose_blocks(ranked, self._sparsity(), self.scope)
        return {name: mask & candidates[name] for name, mask in chosen.items()}

    def _sparsity(self) -> float:
        """What the schedule, which may be the caller's own, says of this step."""
        return check_sparsity(type(self).__name__, "the schedule's sparsity", self.schedule.sparsity(self.steps))

    def _say(self, text: str) -> None:
        if "not finite" not in self._said:
            self._said.add("not finite")
            warnings.warn(f"[{type(self).__name__}] {text}", stacklevel=2)

    # ---- What subclasses say -----------------------------------------------------------------------------------------

    def _scores(self, layer: Layer) -> Tensor:
        """[out_blocks, in_blocks]: the largest stay."""
        raise NotImplementedError

    def _gather(self) -> dict[str, Tensor]:
        """What else is known of blocks, by layer and of all processes: where it is not finite, none are chosen."""
        return {}

    def _candidates(self, layer: Layer) -> Tensor:
        """Which blocks may be live after the next choice."""
        return layer.allowed

    def _trained(self) -> dict[str, nn.Parameter]:
        """What an optimizer has to hold."""
        return {name: layer.target.parameter for name, layer in self.layers.items()}

    def _before_step(self, optimizer: Optimizer) -> None:
        """Called before each step of the optimizer, with the gradients there."""

    def _adjust(self) -> None:
        """Called after each step, before blocks are chosen."""

    def _chosen(self) -> None:
        """Called after blocks were chosen."""

    def _on_gradient(self, layer: Layer, gradient: Tensor) -> Tensor:
        """The gradient that is accumulated."""
        return layer.target.kept(gradient, layer.mask)
