"""The linear op as a function of arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax

from ..layout import Layout
from .arguments import activation_code, allows_tf32, need_array, need_like, need_values
from .ops import products
from .ops.avals import same_axes
from .ops.linear import Linear
from .tables import Tables, tables_for

OP = "linear"


def linear(
    x: Any,
    values: Any,
    layout: Layout | Tables,
    bias: Any | None = None,
    *,
    gates: Any | None = None,
    residual: Any | None = None,
    activation: str | None = "none",
    feature_axis: int = -1,
    precision: Any = None,
) -> jax.Array:
    """activation(x W^T + bias + residual), where W has the blocks `values` at the places that `layout` names.

    Differentiable any number of times, forward and backward; knows `jit`, `vmap`, `jax.checkpoint`, `lax.scan` and
    `shard_map`. Under `vmap` a batch of x becomes more tokens of one product; a batch of values, bias or gates is a
    loop of one product each.

    Args:
        x: [..., layout.in_features]; with feature_axis=0 [layout.in_features, ...].
        values: [layout.blocks, b, b], of the dtype of x.
        layout: which blocks of W there are: a `Layout`, which is static, or `Tables`, which may be an argument of a
            compiled function.
        bias: [layout.out_features], of the dtype of x.
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        residual: like the result.
        activation: "none" (or None), "relu", "gelu" (the exact one), "gelu_tanh" or "silu". Computed with the product
            where no derivative is wanted, after it otherwise.
        feature_axis: -1: the last axis of x and of the result counts features; 0: the first one does.
        precision: of float32 on CUDA, as for `jax.numpy.matmul`: "highest" computes in float32, while JAX's default
            allows tf32. None: `jax_default_matmul_precision`.

    Returns:
        [..., layout.out_features], or [layout.out_features, ...], of the dtype of x.

    Raises:
        ValueError: a shape or dtype is wrong.
        TypeError: an argument is no array, or the layout is none.
    """
    return apply_linear(x, values, layout, bias, gates, residual, activation, feature_axis, precision)


def apply_linear(
    x: Any,
    values: Any,
    layout: Layout | Tables,
    bias: Any | None = None,
    gates: Any | None = None,
    residual: Any | None = None,
    activation: str | None = "none",
    feature_axis: int = -1,
    precision: Any = None,
    wide: bool = False,
) -> jax.Array:
    """`linear`; with `wide`, values may be float32 beside narrower x, and so is their gradient then."""
    x, tables = need_array(OP, "x", x), tables_for(OP, layout, x)
    if feature_axis not in (0, -1):
        raise ValueError(f"[{OP}] feature_axis is {feature_axis!r}, needs -1 (the last) or 0 (the first)")
    first, sizes, code = feature_axis == 0, tables.sizes, activation_code(OP, activation)
    form = Linear(sizes, first, allows_tf32(OP, precision, x.dtype))
    if x.ndim < 1 or x.shape[feature_axis] != sizes.inputs:
        needed = f"[{sizes.inputs}, ...]" if first else f"[..., {sizes.inputs}]"
        raise ValueError(f"[{OP}] x is {list(x.shape)}, layout needs {needed}")
    values = need_values(OP, values, form.values_shape(), x.dtype, wide)
    if bias is not None:
        bias = need_like(OP, "bias", bias, (sizes.outputs,), x.dtype)
    if gates is not None:
        gates = need_like(OP, "gates", gates, (sizes.blocks,), products.sum_dtype(x.dtype))
    if residual is not None:
        residual = need_like(OP, "residual", residual, form.around(x.shape, sizes.outputs), x.dtype)
    return _compiled(x, values, tables.words, bias, residual, gates, form=form, activation=code)


@functools.partial(jax.jit, static_argnames=("form", "activation"), inline=True)
def _compiled(
    x: Any, values: Any, words: Any, bias: Any, residual: Any, gates: Any, *, form: Linear, activation: int
) -> jax.Array:
    """The product of rows with any axes around them. Compiled, for calls that nobody else compiles."""
    shape = form.around(x.shape, form.sizes.outputs)
    x, values, words, bias, residual, gates = same_axes(x, values, words, bias, residual, gates)
    rows, residual = form.rows(x), None if residual is None else form.rows(residual)
    y = products.fprop(form, rows, values, (words,), bias=bias, residual=residual, gates=gates, activation=activation)
    return y.reshape(shape)
