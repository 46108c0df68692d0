"""Gate and up of a gated linear unit as one weight, on arrays of JAX: see `blocksparse.interleave`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..interleave import GROUP, interleaved_features, interleaved_order
from ..layout import Layout, need_layout
from .arguments import need_array, need_like


def interleave(gate: Any, up: Any, layout: Layout) -> jax.Array:
    """The values of `interleaved_layout(layout)` from those of gate and of up, [blocks, b, b]. Differentiable.

    Raises:
        ValueError: values do not have the layout's shape, or are of two dtypes.
    """
    need_layout("interleave", layout)
    gate = need_array("interleave", "gate", gate)
    gate, up = (
        need_like("interleave", name, part, layout.values_shape, gate.dtype)
        for name, part in (("gate", gate), ("up", up))
    )
    if layout.transposed:
        gate, up = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    b = layout.block_size
    both = jnp.stack([part.reshape(-1, b // GROUP, GROUP, b) for part in (gate, up)], 2)  # [blocks, b / 8, 2, 8, b]
    return both.reshape(2 * layout.blocks, b, b)[interleaved_order(layout)]


def separate(values: Any, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Values of gate and of up, [blocks, b, b] each, from those of `interleaved_layout(layout)`. Differentiable.

    Raises:
        ValueError: there are not as many values as that layout has blocks.
    """
    need_layout("separate", layout)
    values, b, order = need_array("separate", "values", values), layout.block_size, interleaved_order(layout)
    values = need_like("separate", "values", values, (order.size, b, b), values.dtype)
    both = jnp.zeros((2 * layout.blocks, b, b), values.dtype).at[order].set(values)
    both = both.reshape(layout.blocks, b // GROUP, 2, GROUP, b)
    gate, up = (both[:, :, part].reshape(layout.values_shape) for part in range(2))
    return (gate.swapaxes(1, 2), up.swapaxes(1, 2)) if layout.transposed else (gate, up)


def interleave_rows(gate: Any, up: Any) -> jax.Array:
    """Dense weights or biases [hidden, ...] as one [2 round_up(hidden, 8), ...], zeros where there is nothing.

    Raises:
        ValueError: they have no rows, or two shapes or dtypes.
    """
    gate = need_array("interleave_rows", "gate", gate)
    if gate.ndim == 0:
        raise ValueError("[interleave_rows] gate is a scalar, needs [hidden, ...]")
    up = need_like("interleave_rows", "up", up, gate.shape, gate.dtype)
    features = interleaved_features(gate.shape[0])
    below = ((0, features // 2 - gate.shape[0]), *((0, 0),) * (gate.ndim - 1))
    parts = [jnp.pad(part, below).reshape(-1, GROUP, *gate.shape[1:]) for part in (gate, up)]
    return jnp.stack(parts, 1).reshape(features, *gate.shape[1:])


def separate_rows(both: Any, hidden: int) -> tuple[jax.Array, jax.Array]:
    """The other way: (gate, up) [hidden, ...].

    Raises:
        ValueError: there are not as many rows as so many hidden features have.
    """
    both = need_array("separate_rows", "both", both)
    if both.ndim == 0 or both.shape[0] != interleaved_features(hidden):
        raise ValueError(f"[separate_rows] both is {list(both.shape)}, needs [{interleaved_features(hidden)}, ...]")
    parts = both.reshape(-1, 2, GROUP, *both.shape[1:])
    gate, up = (parts[:, part].reshape(-1, *both.shape[1:])[:hidden] for part in range(2))
    return gate, up
