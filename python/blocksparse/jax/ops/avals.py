"""Types of arrays while JAX traces, whose names differ between its versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def _manual_axes(aval: Any) -> frozenset[Any]:
    """Axes of a mesh inside `shard_map` along which the array differs."""
    if (kind := getattr(aval, "mat", None)) is not None:  # from JAX 0.10 on
        return frozenset(kind.varying)
    return frozenset(getattr(aval, "vma", ()))


def array_like(aval: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The type of an array of that shape and dtype that differs along the axes that another one differs along."""
    if not _manual_axes(aval):
        return jax.core.ShapedArray(tuple(shape), dtype)
    spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
    more: dict[str, Any] = {"sharding": jax.sharding.NamedSharding(aval.sharding.mesh, spec)}
    more |= {"manual_axis_type": aval.mat} if hasattr(aval, "mat") else {"vma": aval.vma}
    return jax.core.ShapedArray(tuple(shape), dtype, **more)


def same_axes(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, of which each differs along the axes that any differs along; None stays None.

    Inside `shard_map`, weights that all devices share meet tokens that they do not. The gradient of what is done here
    is the sum over devices.

    Raises:
        ValueError: an array is divided along an axis of a mesh that is part of its type.
    """
    for array in arrays:
        _refuse_explicit(array)
    own = [frozenset() if a is None else _manual_axes(jax.typeof(a)) for a in arrays]
    axes = frozenset().union(*own)
    return tuple(
        a if a is None or not axes - mine else _vary(a, tuple(axes - mine)) for a, mine in zip(arrays, own, strict=True)
    )


def _refuse_explicit(array: Any) -> None:
    sharding = getattr(None if array is None else jax.typeof(array), "sharding", None)
    if sharding is not None and any(part is not None for part in sharding.spec):
        raise ValueError(
            f"[jax] an array is {jax.typeof(array)}, divided along an axis of type Explicit: needs jax.shard_map, or a "
            "mesh whose axes are of type Auto"
        )


def _vary(array: Any, axes: tuple[Any, ...]) -> Any:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)  # before JAX 0.9
