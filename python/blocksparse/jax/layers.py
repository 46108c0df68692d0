"""What the modules of flax and equinox share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..interleave import interleaved_features, interleaved_layout
from ..layout import Layout, need_layout
from .convert import select_blocks
from .ops.products import sum_dtype


def need_sizes(name: str, layout: Layout, out_features: int, in_features: int) -> Layout:
    """The layout.

    Raises:
        ValueError: it has another size.
    """
    if need_layout(name, layout).sizes != (out_features, in_features):
        raise ValueError(f"[{name}] layout is {list(layout.sizes)}, needs {[out_features, in_features]}, [out, in]")
    return layout


def glu_layout(name: str, layout: Layout, hidden_features: int, in_features: int) -> Layout:
    """The layout of gate and up together, given that or the one of each.

    Raises:
        ValueError: it has the size of neither.
    """
    if need_layout(name, layout).sizes == (interleaved_features(hidden_features), in_features):
        return layout
    return interleaved_layout(need_sizes(name, layout, hidden_features, in_features))


def promoted(x: Any, values: Any, bias: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """X, values and bias of the dtype that a layer computes in: that of x and values together, unless it says another.

    Values in float32 stay what they are beside 16 bits, so that their gradient does.
    """
    dtype = jnp.result_type(x, values) if dtype is None else jnp.dtype(dtype)
    values = values if values.dtype == sum_dtype(dtype) else values.astype(dtype)
    return jnp.asarray(x, dtype), values, None if bias is None else bias.astype(dtype)


def hashable(given: Any) -> Any:
    """Numbers, words and lists of them, as static attributes may be."""
    return tuple(map(hashable, given)) if isinstance(given, list | tuple) else given


def both_norms(gate: jax.Array, up: jax.Array) -> jax.Array:
    """A weight whose blocks have the norms of those of gate and up together.

    Raises:
        ValueError: gate and up have two shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"[from_dense] gate is {list(gate.shape)} and up {list(up.shape)}, [out, in], needs one shape")
    return jnp.hypot(*(part.astype(jnp.promote_types(part.dtype, jnp.float32)) for part in (gate, up)))


def layout_of(weight: jax.Array, density: float | None, block_size: int, layout: Layout | None) -> Layout:
    """The layout given, or that of the blocks of weight [out, in, ...] with the largest norms.

    Raises:
        ValueError: not exactly one of density and layout is given.
    """
    if (density is None) == (layout is None):
        raise ValueError("[from_dense] needs density or layout, one of them")
    return layout if density is None else select_blocks(weight, density, block_size)  # type: ignore[return-value]
