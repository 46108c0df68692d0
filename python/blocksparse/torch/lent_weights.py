"""Modules that compute with other weights than their parameters, such as those whose gates an `L0` is learning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import nn

_SHOWN = 3  # names in a message


class WeightLender(ABC):
    """Lends a module other weights than its parameters while it runs; a method of it is the module's pre-hook.

    Copies of a module have copies of its hooks, and so of its lenders.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the weight."""

    @property
    @abstractmethod
    def lends(self) -> bool:
        """Whether the next run is with other weights."""

    @abstractmethod
    def remove(self) -> None:
        """Takes the hooks away."""


def lenders_of(model: nn.Module) -> Iterator[WeightLender]:
    """All that lend weights to a model's modules, or did so once."""
    for module in model.modules():
        for hook in list(vars(module)["_forward_pre_hooks"].values()):  # for which PyTorch has no public name
            lender = getattr(hook, "__self__", None)
            if isinstance(lender, WeightLender):
                yield lender


def need_own_weights(op: str, model: nn.Module) -> None:
    """Raises ValueError if a model computes with other weights than its parameters."""
    names = [lender.name for lender in lenders_of(model) if lender.lends]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(
            f"[{op}] the model multiplies {', '.join(names[:_SHOWN])}{more} by gates that an L0 is still learning, "
            "needs parameters that are what it computes with: finish the L0's schedule, or call its convert or "
            "squash_mask, and make copies after that"
        )
