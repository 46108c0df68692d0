"""What a pruner has: the gates beside a weight, and which pruner that is."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...._core.arguments import shown
from .targets import Target

_owners: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def owner_of(target: Target) -> object | None:
    """The pruner that has a target now."""
    reference = _owners.get(target.module, {}).get(target.parameter_name)
    return None if reference is None else reference()


def need_free(op: str, targets: Iterable[Target], owner: object) -> None:
    """Raises ValueError if a sparsifier other than the owner has one of the targets, and an optimizer calls it."""
    for target in targets:
        other: Any = owner_of(target)
        if other is not None and other is not owner and other.attached:
            raise ValueError(
                f"[{op}] {target.name} has a {type(other).__name__}, which would go on with the old layer: use its own "
                "convert or compact_at if it has them, or call its detach() first"
            )


def blocks_left(targets: Iterable[Target]) -> dict[str, Tensor]:
    """What an earlier pruner has left, or what is not zero in weights that have other blocks, too.

    Raises:
        ValueError: a module has something else of the name that gates have.
    """
    found = {}
    for target in targets:
        name = gates_name(target)
        gates = getattr(target.module, name, None)
        if gates is not None and not (isinstance(gates, Tensor) and tuple(gates.shape) == target.grid):
            what = f"a tensor {list(gates.shape)}" if isinstance(gates, Tensor) else shown(gates)
            raise ValueError(
                f"[sparsify] {target.name} has {what} of the name {name}, where gates {list(target.grid)} would lie: "
                "delete it, or leave the layer out by ignore"
            )
        left = (target.norms(math.inf) if gates is None else gates) != 0
        found[target.name] = left & target.present() if bool(left.any()) else target.present()
    return found


def own(target: Target, pruner: object) -> None:
    """Puts gates of ones beside the weight, in a pruner's name."""
    ones = torch.ones(target.grid, dtype=torch.float32, device=target.parameter.device)
    target.module.register_buffer(gates_name(target), ones)
    claim(target.module, target.parameter_name, pruner)


def claim(module: nn.Module, name: str, owner: object) -> None:
    """Notes who moves a parameter's blocks, as long as it lives."""
    _owners.setdefault(module, {})[name] = weakref.ref(owner)


def release(module: nn.Module, name: str, owner: object) -> None:
    """Ends that, if it is still so."""
    reference = _owners.get(module, {}).get(name)
    if reference is not None and reference() is owner:
        _owners[module].pop(name)


def disown(target: Target) -> None:
    """Takes them away."""
    delattr(target.module, gates_name(target))
    _owners.get(target.module, {}).pop(target.parameter_name, None)


def disown_left(targets: Iterable[Target]) -> None:
    """Takes away gates that no pruner has: those in a copy of its model, or of one that is no more."""
    for target in targets:
        gates = dict(target.module.named_buffers(recurse=False)).get(gates_name(target))
        if gates is not None and tuple(gates.shape) == target.grid and owner_of(target) is None:
            disown(target)


class Layer:
    """A target and what a pruner knows of it."""

    def __init__(self, target: Target, allowed: Tensor) -> None:
        self.target = target
        self._allowed = allowed
        self.dropped = torch.zeros(target.grid, dtype=torch.float32, device=target.parameter.device)
        self.shadow: Tensor | None = None
        self._hooked: nn.Parameter | None = None
        self._handle: RemovableHandle | None = None

    @property
    def gates(self) -> Tensor:
        """The buffer [out_blocks, in_blocks] of zeros and ones beside the weight."""
        gates: Tensor = getattr(self.target.module, gates_name(self.target))
        return gates

    @property
    def allowed(self) -> Tensor:
        """Bool [out_blocks, in_blocks]: blocks that may be live at all, on the device that the model is on now."""
        self._allowed = self._allowed.to(self.gates.device)
        return self._allowed

    @property
    def mask(self) -> Tensor:
        """The gates as booleans."""
        return self.gates != 0

    def hook(self, hook: Callable[[Layer, Tensor], Tensor]) -> None:
        """Lets the parameter that the module has now call a method with this layer and its gradient.

        The method's object is not kept alive: without it, gradients are masked by the gates that it left.
        """
        parameter = self.target.parameter
        if parameter is self._hooked or not parameter.requires_grad:
            return
        self.unhook()
        method = weakref.WeakMethod(hook)

        def call(gradient: Tensor) -> Tensor:
            alive = method()
            return self.target.kept(gradient, self.mask) if alive is None else alive(self, gradient)

        self._hooked, self._handle = parameter, parameter.register_hook(call)

    def unhook(self) -> None:
        """Ends that."""
        if self._handle is not None:
            self._handle.remove()
        self._hooked = self._handle = None

    def move(self, target: Target, shadow: Tensor | None) -> None:
        """Goes on with another module that holds the live blocks alone; the gates go with it."""
        gates, owner = self.gates, _owners.get(self.target.module, {}).get(self.target.parameter_name)
        self.unhook()
        self._allowed = self.allowed & (gates != 0)
        disown(self.target)
        self.target, self.shadow = target, shadow
        target.module.register_buffer(gates_name(target), gates)
        if owner is not None:
            _owners.setdefault(target.module, {})[target.parameter_name] = owner

    def stored(self) -> Tensor | None:
        """Bool [out_blocks, in_blocks]: the blocks that a block-sparse module has memory for; None: it is dense."""
        return None if self.target.layout is None else self.target.present()

    @torch.no_grad()
    def norm_kept(self) -> float:
        """|W live|_F / |W|_F, where W has the dropped blocks as they were when they were dropped."""
        live = self.mask
        kept, lost = self.target.norms()[live].square().sum(), self.dropped[~live].square().sum()
        return math.sqrt(float(kept) / max(float(kept + lost), 1e-30))

    @torch.no_grad()
    def load(self, mask: Tensor, allowed: Tensor, dropped: Tensor, shadow: Tensor | None) -> None:
        """What was saved."""
        self.gates.copy_(mask)
        self._allowed, self.dropped = allowed, dropped.to(self.gates.device, copy=True)
        if self.shadow is not None and shadow is not None:
            self.shadow.copy_(shadow)
        self.target.keep_(self.target.parameter.data, mask)

    @torch.no_grad()
    def choose(self, mask: Tensor) -> None:
        """Makes these blocks live: others become zero, and those that come back are what they were, if that is kept."""
        target, before = self.target, self.mask
        lost, found = before & ~mask, mask & ~before
        self.dropped = torch.where(lost, target.norms().to(self.dropped.dtype), self.dropped.to(mask.device))
        if self.shadow is not None:
            self.shadow = self.shadow.to(target.parameter.device)
            target.copy_(self.shadow, target.parameter.data, lost)
            target.copy_(target.parameter.data, self.shadow, found)
        self.gates.copy_(mask)
        target.keep_(target.parameter.data, mask)


def gates_name(target: Target) -> str:
    """The buffer's name in the target's module."""
    return f"{target.parameter_name}_gates"
