"""What callers give: checked at the edge, at trace time, where shapes and dtypes are known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import library
from .._core.arguments import shown

_DTYPES = {jnp.dtype(name) for name in library.DTYPES}


def need_array(op: str, name: str, value: Any) -> jax.Array:
    """The argument as an array of JAX.

    Raises:
        TypeError: it is none, nor one of NumPy.
        ValueError: its dtype is none that the core takes, or JAX would narrow it.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"[{op}] {name} is {shown(value)}, needs an array of JAX or NumPy")
    if value.dtype not in _DTYPES:
        raise ValueError(f"[{op}] {name} is {value.dtype}, needs one of {', '.join(library.DTYPES)}")
    if isinstance(value, jax.Array):
        return value  # jnp.asarray takes 20 us
    if value.dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"[{op}] {name} is float64, which JAX would round to float32: needs "
            'jax.config.update("jax_enable_x64", True), or float32'
        )
    return jnp.asarray(value)


def need_like(op: str, name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The argument as an array of that shape and dtype.

    Raises:
        TypeError: it is no array.
        ValueError: it has another shape or dtype.
    """
    array = need_array(op, name, value)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"[{op}] {name} is {array.dtype} {list(array.shape)}, needs {jnp.dtype(dtype)} {list(shape)}")
    return array


def need_values(op: str, values: Any, shape: tuple[int, ...], dtype: Any, wide: bool) -> jax.Array:
    """The blocks of a weight, of the dtype of x or, if they may be wider, of one that sums have."""
    array = need_array(op, "values", values)
    wider = wide and array.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
    return need_like(op, "values", array, shape, array.dtype if wider else dtype)


def activation_code(op: str, activation: Any) -> int:
    """The core's number of an activation; None is "none".

    Raises:
        ValueError: there is none of that name.
    """
    name = "none" if activation is None else activation
    code = library.ACTIVATIONS.get(name) if isinstance(name, str) else None
    if code is None:
        raise ValueError(f"[{op}] activation is {shown(activation)}, needs one of {', '.join(library.ACTIVATIONS)}")
    return code


def allows_tf32(op: str, precision: Any, dtype: Any) -> bool:
    """Whether float32 on CUDA may be computed in tf32, as XLA decides it for JAX's own products.

    Raises:
        ValueError: there is no such precision.
    """
    given = jax.config.jax_default_matmul_precision if precision is None else precision
    kinds, presets = jax.lax.Precision, jax.lax.DotAlgorithmPreset
    if given is None:
        given = kinds.DEFAULT
    elif isinstance(given, str) and given in presets.__members__:
        given = presets[given]
    elif not isinstance(given, presets):
        try:
            given = kinds(given)  # by any of its names: "float32" is HIGHEST, "tensorfloat32" is HIGH
        except (ValueError, TypeError):
            names = '"default", "high", "highest" or what else jax.lax.Precision and DotAlgorithmPreset name'
            raise ValueError(f"[{op}] precision is {shown(precision)}, needs None, {names}") from None
    return dtype == jnp.float32 and given in (kinds.DEFAULT, kinds.HIGH, presets.DEFAULT, presets.TF32_TF32_F32)
