"""Listening to the backward pass: a weight's x and dy, where they meet.

What regrows blocks needs dy in front of the layer's activation, and h and dz of all steps of an LSTM: no module's hook
sees these. So the passes that make dW tell whoever listens to the weight, which costs others nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .transforms import is_wrapped

Listener = Callable[[Tensor, Tensor], None]  # of x and dy, as dW is made of them

# By the address of the weight, which all views of it share; with the weight, which may have moved or gone since.
_listeners: dict[int, tuple[weakref.ref[Tensor], Listener]] = {}


def listen(values: Tensor, listener: Listener | None) -> None:
    """From now on the listener is called with x and dy whenever a backward pass makes dW of a weight. None: no more.

    Compiled graphs, torch.func's transforms and forward passes without gradients tell nothing. The weight is not kept
    alive.
    """
    if listener is None:
        _listeners.pop(values.data_ptr(), None)
    else:
        _listeners[values.data_ptr()] = weakref.ref(values), listener


def listener_of(values: Tensor) -> Listener | None:
    """Who listens to a weight."""
    if not _listeners or torch.compiler.is_compiling() or is_wrapped(values):  # the last has no address
        return None
    address = values.data_ptr()
    weight, listener = _listeners.get(address, (None, None))
    owner = None if weight is None else weight()
    if owner is None or owner.data_ptr() != address:  # another tensor lies there now
        _listeners.pop(address, None)
        return None
    return listener
