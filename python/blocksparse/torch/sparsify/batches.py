"""Feeding a model what a loader gives, and watching its layers meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any] | None


def feed(model: nn.Module, batch: Any, forward: Forward = None) -> Any:
    """What the model makes of a batch: `forward(model, batch)`, or model(**mapping), model(*sequence), model(batch).

    Tensors are brought to the device of the model's first parameter, unless `forward` is given. Layers of
    `torch.nn.TransformerEncoder` are fed padded tokens, too, as in training.
    """
    with _no_shortcut():
        return _fed(model, batch, forward)


def _fed(model: nn.Module, batch: Any, forward: Forward) -> Any:
    if forward is not None:
        return forward(model, batch)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Mapping):
        return model(**{key: _moved(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple | list):
        return model(*(_moved(value, device) for value in batch))
    return model(_moved(batch, device))


@contextmanager
def _no_shortcut() -> Iterator[None]:
    """Without PyTorch's shortcut for transformers, whose layers see nested tensors, which have no shape, or nothing."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@contextmanager
def hooked(modules: Mapping[str, nn.Module], hook: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Meanwhile hook(name, inputs, output) is called behind each call of a module."""

    def of(name: str) -> Any:
        return lambda module, inputs, output: hook(name, inputs, output)

    handles = [module.register_forward_hook(of(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
