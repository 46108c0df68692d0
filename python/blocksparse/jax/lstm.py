"""The LSTM with a block-sparse recurrent weight, as a function of arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arguments import shown
from ..layout import Layout
from .arguments import need_array, need_like, need_values
from .ops import lstm as ops
from .ops.avals import same_axes
from .ops.products import sum_dtype
from .tables import Tables, tables_for

State = tuple[Any, Any]  # h [n, hidden], c [n, hidden]
OP = "lstm"


def lstm(
    pre: Any, values: Any, layout: Layout | Tables, state: State | None = None, lengths: Any | None = None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """A sequence through an LSTM: z = pre[t] + W h, c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c).

    The gates' rows of W [4 hidden, hidden] are in the order i, f, g, o, as in `flax.nnx.OptimizedLSTMCell`. One call
    of the core does all steps, and one the backward pass. Differentiable any number of times, forward and backward; a
    forward derivative, and a gradient that is to have gradients, is a scan over steps. Under `vmap` a batch of
    sequences becomes more sequences of one call; a batch of values, and derivatives of single members, are loops.

    Args:
        pre: [steps, n, 4 * hidden] or [steps, n, 4, hidden]: the input's projection and all biases.
        values: [layout.blocks, b, b], of the dtype of pre.
        layout: of W [4 hidden, hidden]: `layout.stack(4)` if the gates share one. hidden is a multiple of b.
        state: (h, c) before the first step, [n, hidden] each; zeros by default. c is used and returned in float32
            (float64 for float64), whatever the dtype of pre.
        lengths: integers [n], steps of each sequence; afterwards its state stays and its y is 0. All steps by default.

    Returns:
        y [steps, n, hidden], and the state (h, c) after each sequence's last step.

    Raises:
        ValueError: a shape or dtype is wrong.
        TypeError: an argument is no array, or the layout is none.
    """
    return apply_lstm(pre, values, layout, state, lengths)


def apply_lstm(
    pre: Any,
    values: Any,
    layout: Layout | Tables,
    state: State | None = None,
    lengths: Any | None = None,
    wide: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`lstm`; with `wide`, values may be float32 beside narrower pre, and so is their gradient then."""
    pre, tables = need_array(OP, "pre", pre), tables_for(OP, layout, pre)
    sizes = tables.sizes
    hidden = sizes.in_features
    if sizes.transposed or sizes.out_features != 4 * hidden or hidden % sizes.block_size:
        raise ValueError(
            f"[{OP}] layout is {sizes.outputs} x {sizes.inputs}{', transposed' if sizes.transposed else ''}, needs "
            f"4 hidden x hidden, hidden a multiple of {sizes.block_size}"
        )
    if pre.ndim not in (3, 4) or pre.shape[2:] not in ((4 * hidden,), (4, hidden)):
        raise ValueError(f"[{OP}] pre is {list(pre.shape)}, needs [steps, n, {4 * hidden}] or [steps, n, 4, {hidden}]")
    n, dtype = pre.shape[1], pre.dtype
    values = need_values(OP, values, (sizes.blocks, sizes.block_size, sizes.block_size), dtype, wide)
    h0, c0 = _state(state, (n, hidden), dtype)
    call = ops.Lstm(sizes, lengths is not None)
    return _compiled(pre, values, tables.words, h0, c0, _halves(lengths, pre.shape[0], n), call=call)


@functools.partial(jax.jit, static_argnames="call", inline=True)
def _compiled(
    pre: Any, values: Any, words: Any, h0: Any, c0: Any, lengths: Any, *, call: ops.Lstm
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    pre, values, words, h0, c0, lengths = same_axes(pre, values, words, h0, c0, lengths)
    steps, n = pre.shape[:2]
    y, h, c = ops.forward(call, pre.reshape(steps, n, 4, call.hidden), values, words, h0, c0, lengths)
    return y, (h, c)


def _state(state: Any, shape: tuple[int, int], dtype: Any) -> tuple[jax.Array, jax.Array]:
    if state is None:
        return jnp.zeros(shape, dtype), jnp.zeros(shape, sum_dtype(dtype))
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(f"[{OP}] state is {shown(state)}, needs (h, c)")
    h, c = (need_array(OP, name, array) for name, array in zip(("h", "c"), state, strict=True))
    return need_like(OP, "h", h.astype(dtype), shape, dtype), need_like(
        OP, "c", c.astype(sum_dtype(dtype)), shape, sum_dtype(dtype)
    )


def _halves(lengths: Any, steps: int, n: int) -> jax.Array | None:
    """The lengths as the core takes them, 64 bits wide, where JAX may have no such integers: two halves each."""
    if lengths is None:
        return None
    array = (
        lengths if isinstance(lengths, jax.core.Tracer) else np.asarray(lengths)
    )  # JAX's would be traced with the rest
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise ValueError(f"[{OP}] lengths are {array.dtype} {list(array.shape)}, needs integers [{n}]")
    if isinstance(array, np.ndarray) and n and not 0 <= int(array.min()) <= int(array.max()) <= steps:
        raise ValueError(f"[{OP}] lengths are {int(array.min())} to {int(array.max())}, needs 0 to {steps}")
    low = jnp.asarray(array, jnp.int32)
    return jnp.stack([low, low >> 31], -1).reshape(2 * n)
