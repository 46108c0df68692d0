"""How a pruner is saved, and goes on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..._core.arguments import need
from ...schedules import Schedule
from .masks import check_masks
from .owned import Layer
from .targets import Target

_FORMAT = 1


class Saved:
    """The part of a `Pruner` that knows its state dict."""

    layers: dict[str, Layer]
    schedule: Schedule
    steps: int
    _due: bool

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
        own = {"format": _FORMAT, "class": type(self).__name__, "schedule": repr(self.schedule)}
        return {**own, "steps": self.steps, "due": self._due, "layers": layers, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Call `prepare` first; all is checked before anything is changed.

        A pruner with `compact_at` first moves the layers that were moved, whose parameters are then others: load its
        state before the model's and the optimizer's, once it is attached. Another schedule than the saved one is taken,
        with a warning.

        Raises:
            ValueError: the state is another class's or another model's (the message has both shapes and hashes).
            RuntimeError: `prepare` was not called before.
        """
        op = type(self).__name__
        if not self.layers:
            raise RuntimeError(f"[{op}] call prepare(model) before load_state_dict")
        need(op, "state", state, Mapping, "what state_dict() returned")
        if state.get("format") != _FORMAT or state.get("class") != op:
            what = f"{state.get('class', 'nothing')} in format {state.get('format')}"
            raise ValueError(f"[{op}] the state is of {what}, needs {op} in format {_FORMAT}")
        saved = state["layers"]
        masks, allowed = (
            check_masks(self.targets, {name: entry[key] for name, entry in saved.items()})
            for key in ("mask", "allowed")
        )
        for name, layer in self.layers.items():
            if ("shadow" in saved[name]) != (layer.shadow is not None):
                raise ValueError(f"[{op}] the state of {name} was saved with another `regrow`")
        if state["schedule"] != repr(self.schedule):
            warnings.warn(f"[{op}] was saved with {state['schedule']}, goes on with {self.schedule!r}", stacklevel=2)
        self._load_state(dict(state))
        self._store({name: entry["stored"] for name, entry in saved.items() if entry["stored"] is not None})
        self.steps, self._due = state["steps"], state["due"]
        for name, layer in self.layers.items():
            layer.load(masks[name], allowed[name], saved[name]["dropped"], saved[name].get("shadow"))

    def _state(self) -> dict[str, Any]:
        """What a subclass has besides, as tensors and plain values."""
        return {}

    def _load_state(self, state: dict[str, Any]) -> None:
        """Takes that back; it was checked to be of this class and model."""

    def _store(self, stored: dict[str, Tensor]) -> None:
        """Has the layers hold the blocks of these masks alone, where they do not yet."""
        raise NotImplementedError
