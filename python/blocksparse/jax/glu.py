"""Gated linear units as functions of arrays: activation(gate) * up, where one product makes both."""

from __future__ import annotations

import functools
from typing import Any

import jax

from .._core.arguments import shown, to_int
from ..interleave import interleaved_features
from ..layout import Layout
from .arguments import activation_code, allows_tf32, need_array, need_like, need_values
from .ops import glu as ops
from .ops.avals import same_axes
from .ops.linear import Linear
from .ops.products import sum_dtype
from .tables import Tables, tables_for


def glu(z: Any, hidden_features: int, activation: str = "silu") -> jax.Array:
    """activation(gate) * up, [..., hidden_features].

    Args:
        z: [..., 2 round_up(hidden_features, 8)]: eight features of the gate, the same of up, and so on.
        hidden_features: of the result.
        activation: "silu" (SwiGLU), "gelu" (the exact one), "gelu_tanh" or "relu".

    Raises:
        ValueError: z has another width, or there is no such activation.
        TypeError: z is no array.

    Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
    """
    op = "glu"
    z, hidden = need_array(op, "z", z), to_int("hidden_features", hidden_features, op=op)
    if hidden < 1 or z.ndim == 0 or z.shape[-1] != interleaved_features(hidden):
        raise ValueError(
            f"[{op}] z is {list(z.shape)}, {hidden} hidden features need [..., {interleaved_features(max(hidden, 1))}]"
        )
    return _pointwise(z, hidden=hidden, activation=_glu_activation(op, activation))


def linear_glu(
    x: Any,
    values: Any,
    layout: Layout | Tables,
    hidden_features: int,
    bias: Any | None = None,
    *,
    gates: Any | None = None,
    activation: str = "silu",
    precision: Any = None,
) -> jax.Array:
    """activation(W_gate x + bias_gate) * (W_up x + bias_up), both by one product: SwiGLU and its kin.

    Differentiable and transformed as `linear` is. Where no derivative is wanted, y alone is made, by one call;
    elsewhere z = (gate, up) is made and kept.

    Args:
        x: [..., layout.in_features].
        values: [layout.blocks, b, b], of the dtype of x: `interleave` makes them of those of gate and up.
        layout: of both: `interleaved_layout` makes it of that of each.
        hidden_features: of the result.
        bias: [layout.out_features], interleaved likewise (`interleave_rows`), of the dtype of x.
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        activation: "silu" (SwiGLU), "gelu" (the exact one), "gelu_tanh" or "relu".
        precision: as for `linear`.

    Returns:
        [..., hidden_features], of the dtype of x.

    Raises:
        ValueError: a shape or dtype is wrong, or there is no such activation.
        TypeError: an argument is no array, or the layout is none.

    Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
    """
    return apply_linear_glu(x, values, layout, hidden_features, bias, gates, activation, precision)


def apply_linear_glu(
    x: Any,
    values: Any,
    layout: Layout | Tables,
    hidden_features: int,
    bias: Any | None = None,
    gates: Any | None = None,
    activation: str = "silu",
    precision: Any = None,
    wide: bool = False,
) -> jax.Array:
    """`linear_glu`; with `wide`, values may be float32 beside narrower x, and so is their gradient then."""
    op = "linear_glu"
    x, tables = need_array(op, "x", x), tables_for(op, layout, x)
    sizes, code = tables.sizes, _glu_activation(op, activation)
    hidden = to_int("hidden_features", hidden_features, op=op)
    if hidden < 1 or sizes.outputs != interleaved_features(hidden):
        raise ValueError(
            f"[{op}] layout has {sizes.outputs} outputs, gate and up of {hidden} hidden features need "
            f"{interleaved_features(max(hidden, 1))} (interleaved_layout makes such a layout)"
        )
    if x.ndim < 1 or x.shape[-1] != sizes.inputs:
        raise ValueError(f"[{op}] x is {list(x.shape)}, layout needs [..., {sizes.inputs}]")
    form = Linear(sizes, False, allows_tf32(op, precision, x.dtype))
    values = need_values(op, values, form.values_shape(), x.dtype, wide)
    if bias is not None:
        bias = need_like(op, "bias", bias, (sizes.outputs,), x.dtype)
    if gates is not None:
        gates = need_like(op, "gates", gates, (sizes.blocks,), sum_dtype(x.dtype))
    return _compiled(x, values, tables.words, bias, gates, form=form, hidden=hidden, activation=code)


def _glu_activation(op: str, activation: Any) -> int:
    code = activation_code(op, activation)
    if code == 0:
        raise ValueError(f"[{op}] activation is {shown(activation)}, needs one of silu, gelu, gelu_tanh, relu")
    return code


@functools.partial(jax.jit, static_argnames=("hidden", "activation"), inline=True)
def _pointwise(z: Any, *, hidden: int, activation: int) -> jax.Array:
    return ops.glu(z, hidden, activation)


@functools.partial(jax.jit, static_argnames=("form", "hidden", "activation"), inline=True)
def _compiled(
    x: Any, values: Any, words: Any, bias: Any, gates: Any, *, form: Linear, hidden: int, activation: int
) -> jax.Array:
    """The product of rows with any axes around them. Compiled, for calls that nobody else compiles."""
    shape = form.around(x.shape, hidden)
    x, values, words, bias, gates = same_axes(x, values, words, bias, gates)
    y = ops.linear_glu(form, form.rows(x), values, words, bias, gates, hidden=hidden, activation=activation)
    return y.reshape(shape)
