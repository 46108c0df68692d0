"""The products of the backend that Keras runs on: PyTorch, JAX or TensorFlow.

Each takes images with channels last, sequences with steps first, and answers a tensor of the backend.
"""

from __future__ import annotations

from typing import Any

import keras

from ..layout import Layout

BACKEND: str = keras.backend.backend()
JITS = BACKEND != "tensorflow"  # whether keras may compile with XLA: TensorFlow's C interface gives XLA no kernel


def _front() -> Any:
    if BACKEND == "torch":
        from .. import torch as torch_front

        return torch_front
    if BACKEND == "jax":
        from .. import jax as jax_front

        return jax_front
    from .. import tensorflow as tensorflow_front

    return tensorflow_front


_FRONT = _front()


def linear(x: Any, values: Any, layout: Layout, bias: Any, gates: Any) -> Any:
    """The product x W^T + bias."""
    return _FRONT.linear(x, values, layout, bias, gates=gates)


def conv(rank: int, x: Any, values: Any, layout: Layout, bias: Any, **options: Any) -> Any:
    """The convolution of x [n, size..., channels]: `conv2d` of the front end, or what the rank asks for."""
    function = getattr(_FRONT, f"conv{rank}d")
    if BACKEND != "torch":
        return function(x, values, layout, bias, **options)
    channels_first = x.permute(0, rank + 1, *range(1, rank + 1))  # a view, which is taken as it is
    return function(channels_first, values, layout, bias, **options).permute(0, *range(2, rank + 2), 1)


def lstm(pre: Any, values: Any, layout: Layout, state: Any, lengths: Any) -> tuple[Any, tuple[Any, Any]]:
    """Y [steps, n, hidden] and (h, c) of pre [steps, n, 4 hidden]."""
    made: tuple[Any, tuple[Any, Any]] = _FRONT.lstm(pre, values, layout, state, lengths)
    return made
