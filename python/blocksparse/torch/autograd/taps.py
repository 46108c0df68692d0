"""Listening to the backward pass: a weight's x and dy, where they meet.

What regrows blocks needs dy in front of the layer's activation, and h and dz of all steps of an LSTM: no module's hook
sees these. So the passes that make dW tell whoever listens to the weight, which costs others nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Listener = Callable[[Tensor, Tensor], None]  # of x and dy, as dW is made of them

_listeners: dict[int, Listener] = {}  # by the address of the weight, which all views of it share


def listen(values: Tensor, listener: Listener | None) -> None:
    """From now on the listener is called with x and dy whenever a backward pass makes dW of a weight. None: no more.

    Compiled graphs and forward passes without gradients tell nothing.
    """
    if listener is None:
        _listeners.pop(values.data_ptr(), None)
    else:
        _listeners[values.data_ptr()] = listener


def listener_of(values: Tensor) -> Listener | None:
    """Who listens to a weight."""
    if torch.compiler.is_compiling() or not _listeners:
        return None
    return _listeners.get(values.data_ptr())
