"""How a pruner is saved, and goes on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...._core.arguments import need, to_count
from ....schedules import Schedule
from ..weights.masked_layer import Layer
from ..weights.masks import Masks, check_masks
from ..weights.targets import Target
from .regrowth import Regrown

_FORMAT = 1


def check_shape(op: str, name: str, saved: Tensor, needed: Sequence[int]) -> None:
    """Raises ValueError unless a tensor of a state has the shape that is needed: other ones might broadcast."""
    need(op, name, saved, Tensor, "a tensor")
    if tuple(saved.shape) != tuple(needed):
        raise ValueError(f"[{op}] the state's {name} is {list(saved.shape)}, needs {list(needed)}")


class Saved:
    """The part of a `Pruner` that knows its state dict."""

    layers: dict[str, Layer]
    schedule: Schedule
    steps: int
    _due: bool
    _regrown: Regrown

    @property
    def targets(self) -> list[Target]:
        """What is made sparse; empty before `prepare`."""
        return [layer.target for layer in self.layers.values()]

    def state_dict(self) -> dict[str, Any]:
        """All that a training needs, beside the model's and the optimizer's state dicts, to go on bit for bit."""
        layers: dict[str, dict[str, Any]] = {}
        for name, layer in self.layers.items():
            layers[name] = {"mask": layer.mask, "allowed": layer.allowed, "dropped": layer.dropped}
            layers[name]["stored"] = layer.stored()
            if layer.shadow is not None:
                layers[name]["shadow"] = layer.shadow
        own: dict[str, Any] = {"format": _FORMAT, "class": type(self).__name__, "schedule": repr(self.schedule)}
        own |= {"steps": self.steps, "due": self._due, "regrown": self._regrown.state()}
        return {**own, "layers": layers, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Call `prepare` first; all is checked before anything is changed.

        A pruner with `compact_at` first moves the layers that were moved, whose parameters are then others: load its
        state before the model's and the optimizer's, once it is attached. Another schedule than the saved one is taken,
        with a warning.

        Raises:
            ValueError: the state is another class's or another model's (the message has both shapes and hashes), or is
                damaged.
            RuntimeError: `prepare` was not called before.
        """
        op = type(self).__name__
        if not self.layers:
            raise RuntimeError(f"[{op}] call prepare(model) before load_state_dict")
        need(op, "state", state, Mapping, "what state_dict() returned")
        if state.get("format") != _FORMAT or state.get("class") != op:
            what = f"{state.get('class', 'nothing')} in format {state.get('format')}"
            raise ValueError(f"[{op}] the state is of {what}, needs {op} in format {_FORMAT}")
        try:
            masks, allowed = self._check_layers(state["layers"])
            self._check_state(state)
            regrown, steps, due = state["regrown"], to_count("steps", state["steps"], op), bool(state["due"])
            for name, born in regrown.items():
                for birth, blocks in born.items():
                    to_count("a birth", birth, op)
                    check_shape(op, f"regrown of {name}", blocks, self.layers[name].gates.shape)
            schedule = state["schedule"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"[{op}] the state is damaged: {type(error).__name__}: {error}") from error
        saved = state["layers"]
        if schedule != repr(self.schedule):
            warnings.warn(f"[{op}] was saved with {schedule}, goes on with {self.schedule!r}", stacklevel=2)
        self._load_state(dict(state))
        self._store({name: entry["stored"] for name, entry in saved.items() if entry["stored"] is not None})
        self.steps, self._due = steps, due
        self._regrown.load(regrown, self.layers)
        for name, layer in self.layers.items():
            layer.load(masks[name], allowed[name], saved[name]["dropped"], saved[name].get("shadow"))

    def _check_layers(self, saved: Mapping[str, Mapping[str, Any]]) -> tuple[Masks, Masks]:
        """(masks, allowed blocks) of a state's layers, all of which is of this model's shapes."""
        op = type(self).__name__
        masks, allowed = (
            check_masks(self.targets, {name: entry[key] for name, entry in saved.items()})
            for key in ("mask", "allowed")
        )
        for name, layer in self.layers.items():
            entry, stored = saved[name], saved[name]["stored"]
            if ("shadow" in entry) != (layer.shadow is not None):
                raise ValueError(f"[{op}] the state of {name} was saved with another `regrow`")
            check_shape(op, f"dropped of {name}", entry["dropped"], layer.dropped.shape)
            check_shape(op, f"stored of {name}", masks[name] if stored is None else stored, layer.gates.shape)
            if layer.shadow is not None and stored is None:
                check_shape(op, f"shadow of {name}", entry["shadow"], layer.shadow.shape)
            elif layer.shadow is not None:
                b, taps = layer.target.block_size, entry["shadow"].shape[1:-2]
                check_shape(op, f"shadow of {name}", entry["shadow"], (int(stored.sum()), *taps, b, b))
        return masks, allowed

    def _state(self) -> dict[str, Any]:
        """What a subclass has besides, as tensors and plain values."""
        return {}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError if what a subclass has besides is not as it should be."""

    def _load_state(self, state: dict[str, Any]) -> None:
        """Takes that back; it was checked."""

    def _store(self, stored: dict[str, Tensor]) -> None:
        """Has the layers hold the blocks of these masks alone, where they do not yet."""
        raise NotImplementedError
