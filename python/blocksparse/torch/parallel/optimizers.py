"""What optimizers save of layers that are divided among processes: the whole of it, as the layers themselves do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .dealt import Dealt
from .layers import ParallelLayer

_layers: WeakSet[ParallelLayer] = WeakSet()
_optimizers: WeakSet[Optimizer] = WeakSet()  # that have been looked at


def follow(layer: ParallelLayer) -> None:
    """Has every optimizer that steps the layer's parameters save the whole of what it keeps for each, and load it.

    The dealt form depends on the number of processes, so no optimizer may save it. `torch.distributed.checkpoint` asks
    optimizers only after a step: it makes one of its own, of zero gradients, where there was none.
    """
    if not _layers:
        register_optimizer_step_pre_hook(_look)
    _layers.add(layer)


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _optimizers:
        return
    _optimizers.add(optimizer)
    if any(True for _ in _dealt_parameters(optimizer)):
        optimizer.register_state_dict_post_hook(_to_whole)
        optimizer.register_load_state_dict_pre_hook(_from_whole)


def _dealt_parameters(optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter, Dealt]]:
    """(place among the optimizer's, parameter, how it is dealt)."""
    known = {
        id(parameter): layer.part.rows[name]
        for layer in _layers
        for name, parameter in layer.named_parameters(recurse=False)
        if name in layer.part.rows
    }
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for place, parameter in enumerate(parameters):
        if (dealt := known.get(id(parameter))) is not None:
            yield place, parameter, dealt


def _change(
    optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[Tensor, nn.Parameter, Dealt], Tensor]
) -> dict[str, Any]:
    """A state dict with other tensors in the place of those that have a row for each of a parameter's."""
    state = dict(state_dict["state"])
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]  # numbers, or names of parameters
    for place, parameter, dealt in _dealt_parameters(optimizer):
        if place < len(keys) and (key := keys[place]) in state:
            entries = state[key].items()
            state[key] = {k: change(v, parameter, dealt) if isinstance(v, Tensor) else v for k, v in entries}
    return {**state_dict, "state": state}


def _to_whole(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def whole(kept: Tensor, parameter: nn.Parameter, dealt: Dealt) -> Tensor:
        mine = isinstance(kept, DTensor) and kept.shape == parameter.shape
        return dealt.to_whole(kept) if mine else kept  # type: ignore[arg-type]

    return _change(optimizer, state_dict, whole)


def _from_whole(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def own(kept: Tensor, parameter: nn.Parameter, dealt: Dealt) -> Tensor:
        if kept.dim() == 0:
            return kept
        if tuple(kept.shape) != (needed := (dealt.total, *parameter.shape[1:])):
            raise ValueError(f"[parallel] a saved moment is {list(kept.shape)}, the whole of it is {list(needed)}")
        return dealt.from_whole(kept, parameter)  # type: ignore[arg-type]

    return _change(optimizer, state_dict, own)
