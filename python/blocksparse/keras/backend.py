"""The products of the backend that Keras runs on: PyTorch, JAX or TensorFlow.

Each takes images with channels last, sequences with steps first, and answers a tensor of the backend.
"""

from __future__ import annotations

from typing import Any

import keras

from ..layout import Layout

BACKEND: str = keras.backend.backend()
JITS = BACKEND != "tensorflow"  # whether keras may compile with XLA: TensorFlow's C interface gives XLA no kernel


def linear(x: Any, values: Any, layout: Layout, bias: Any, gates: Any) -> Any:
    """x W^T + bias."""
    if BACKEND == "torch":
        from ..torch import linear as product
    elif BACKEND == "jax":
        from ..jax import linear as product
    else:
        from ..tensorflow import linear as product
    return product(x, values, layout, bias, gates=gates)


def conv(rank: int, x: Any, values: Any, layout: Layout, bias: Any, **options: Any) -> Any:
    """The convolution of x [n, size..., channels]: `conv2d` of the backend's front end, or what the rank asks for."""
    name = f"conv{rank}d"
    if BACKEND == "torch":
        from .. import torch as front

        channels_first = x.permute(0, rank + 1, *range(1, rank + 1))  # a view, which is taken as it is
        return getattr(front, name)(channels_first, values, layout, bias, **options).permute(0, *range(2, rank + 2), 1)
    if BACKEND == "jax":
        from .. import jax as jax_front

        return getattr(jax_front, name)(x, values, layout, bias, **options)
    from .. import tensorflow as tensorflow_front

    return getattr(tensorflow_front, name)(x, values, layout, bias, **options)


def lstm(pre: Any, values: Any, layout: Layout, state: Any, lengths: Any) -> tuple[Any, tuple[Any, Any]]:
    """Y [steps, n, hidden] and (h, c) of pre [steps, n, 4 hidden]."""
    if BACKEND == "torch":
        from ..torch import lstm as run
    elif BACKEND == "jax":
        from ..jax import lstm as run
    else:
        from ..tensorflow import lstm as run
    made: tuple[Any, tuple[Any, Any]] = run(pre, values, layout, state, lengths)
    return made
