"""Initialisers of block-sparse weights: functions of (key, shape, dtype), as JAX's own, that know the layout.

The fan-in of an output is the number of inputs that it is connected to, times the taps of a filter; it differs from
row to row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..layout import Layout, need_layout

Initializer = Callable[..., jax.Array]


def _fans(layout: Layout) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of each block: the inputs that its outputs have, and the outputs that its inputs have."""
    out, in_ = need_layout("initializers", layout).coordinates()
    b = layout.block_size

    def fan(ends: Any, others: Any, blocks: int, features: int) -> np.ndarray[Any, Any]:
        width = np.minimum(b, features - others.astype(np.int64) * b)
        return np.bincount(ends, width, blocks)[ends]

    return fan(out, in_, layout.grid[0], layout.in_features), fan(in_, out, layout.grid[1], layout.out_features)


def _taps(layout: Layout, shape: Sequence[int]) -> int:
    count, b, _ = layout.values_shape
    if len(shape) not in (3, 4) or (shape[0], *shape[-2:]) != (count, b, b):
        raise ValueError(f"[initializers] shape is {list(shape)}, needs {[count, b, b]} or {[count, 'taps', b, b]}")
    return math.prod(shape[1:-2])


def variance_scaling(layout: Layout, scale: float, mode: str, distribution: str) -> Initializer:
    """As `jax.nn.initializers.variance_scaling`, with variance scale / fan of each block.

    Args:
        layout: which blocks there are.
        scale: see above.
        mode: "fan_in", "fan_out" or "fan_avg".
        distribution: "uniform", "normal" or "truncated_normal".

    Raises:
        ValueError: there is no such mode or distribution.
    """
    ins, outs = _fans(layout)
    fans = {"fan_in": ins, "fan_out": outs, "fan_avg": (ins + outs) / 2}
    draws = {
        "uniform": lambda *how: jax.random.uniform(*how, -math.sqrt(3), math.sqrt(3)),
        "normal": jax.random.normal,
        "truncated_normal": lambda key, shape, dtype: (
            jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) / 0.87962566103423978
        ),  # its deviation
    }
    if mode not in fans or distribution not in draws:
        raise ValueError(
            f"[initializers] mode is {mode!r}, distribution {distribution!r}, needs one of {', '.join(fans)} and one "
            f"of {', '.join(draws)}"
        )

    def init(key: Any, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        taps = _taps(layout, shape)
        deviation = np.sqrt(scale / np.maximum(fans[mode] * taps, 1)).reshape(-1, *(1,) * (len(shape) - 1))
        return draws[distribution](key, tuple(shape), dtype) * jnp.asarray(deviation, dtype)

    return init


def fan_in_uniform(layout: Layout) -> Initializer:
    """Uniform in +-1/sqrt(fan-in): the default of PyTorch's and equinox's layers."""
    return variance_scaling(layout, 1 / 3, "fan_in", "uniform")


def lecun_normal(layout: Layout) -> Initializer:
    """Truncated normal of variance 1 / fan-in: the default of flax's layers."""
    return variance_scaling(layout, 1.0, "fan_in", "truncated_normal")


def he_normal(layout: Layout) -> Initializer:
    """Truncated normal of variance 2 / fan-in, for ReLU."""
    return variance_scaling(layout, 2.0, "fan_in", "truncated_normal")


def glorot_uniform(layout: Layout) -> Initializer:
    """Uniform of variance 2 / (fan-in + fan-out)."""
    return variance_scaling(layout, 1.0, "fan_avg", "uniform")


def identity(layout: Layout) -> Initializer:
    """Block (out, in) is the identity where in mod out_blocks == out mod in_blocks, all else 0.

    A square layer with a full diagonal then passes x on. Source: openai/blocksparse, `identity_init`.
    """
    (out, in_), (out_blocks, in_blocks) = need_layout("initializers", layout).coordinates(), layout.grid
    chosen = in_ % out_blocks == out % in_blocks

    def init(key: Any, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        if _taps(layout, shape) != 1:
            raise ValueError("[initializers] identity is of linear layers, which have one tap")
        eye = chosen[:, None, None] * np.eye(layout.block_size)
        return jnp.asarray(eye.reshape(shape), dtype)

    return init
