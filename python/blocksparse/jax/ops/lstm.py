"""The LSTM as primitives of JAX, with derivatives of any order.

    forward(pre, values, tables, h0, c0, [lengths]) -> y, h, c, gates, cells      (the last two if they are saved)
    tangent(values, tables, h0, c0, [lengths], y, gates, cells,  dpre, dvalues, dh0, dc0) -> those of the outputs
    backward(values, tables, h0, c0, [lengths], y, gates, cells,  dy, dh, dc) -> dpre, dvalues, dh0, dc0

What the forward pass saves is output of it and has derivatives, too, so tangents need nothing but what was saved. The
tangent is a scan over steps, made of differentiable operations. The backward pass is its transpose, and one call of
the core; where its own derivatives are wanted, it is the transposed scan. Lengths are [2 n] int32, the halves of int64.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..._core import library
from ..tables import Sizes
from . import products
from .avals import array_like
from .linear import Linear
from .products import is_zero, jvp_of, loop, run_compiled, sum_dtype
from .registry import PLATFORMS, lower

forward_p, tangent_p, backward_p = (
    Primitive(f"blocksparse_lstm_{name}") for name in ("forward", "tangent", "backward")
)
for _primitive in (forward_p, tangent_p, backward_p):
    _primitive.multiple_results = True
    run_compiled(_primitive)


@dataclasses.dataclass(frozen=True)
class Lstm:
    """What is static of a call."""

    sizes: Sizes  # of W [4 hidden, hidden]
    has_lengths: bool
    tf32: bool = False

    @property
    def hidden(self) -> int:
        """Units."""
        return self.sizes.in_features

    @property
    def saved(self) -> int:
        """How many operands of the tangent and of the backward pass are not cotangents: those of the forward pass."""
        return 7 + int(self.has_lengths)

    def numbers(self, save: bool) -> tuple[int, ...]:
        """As handlers take them."""
        return 0, int(self.has_lengths), *self.sizes.numbers(), int(save)

    def workspace(self, which: str, steps: int, n: int, dtype: np.dtype) -> int:
        """Bytes that a pass needs on a card."""
        ask, code = f"bs_lstm_{which}_workspace_size", library.DTYPES[dtype.name]
        return int(library.ask(ask, ctypes.byref(self.sizes.card_view()), code, steps, n))


def forward(call: Lstm, pre: Any, values: Any, words: Any, h0: Any, c0: Any, lengths: Any) -> tuple[Any, Any, Any]:
    """y [steps, n, hidden], h and c [n, hidden]; what is given has been checked."""
    operands = (pre, values, words, h0, c0, *(() if lengths is None else (lengths,)))
    y, h, c = forward_p.bind(*operands, call=call, save=False)
    return y, h, c


# ---- Types and lowering --------------------------------------------------------------------------------------------


def _output_types(like: Any, steps: int, n: int, call: Lstm, save: bool) -> list[Any]:
    state, narrow, wide = (n, call.hidden), like.dtype, sum_dtype(like.dtype)
    made = [((steps, *state), narrow), (state, narrow), (state, wide)]
    if save:
        made += [((steps, n, 4, call.hidden), narrow), ((steps, *state), wide)]
    return [array_like(like, *each) for each in made]


@forward_p.def_abstract_eval
def _forward_type(pre: Any, *more: Any, call: Lstm, save: bool) -> list[Any]:
    return _output_types(pre, pre.shape[0], pre.shape[1], call, save)


@tangent_p.def_abstract_eval
def _tangent_type(*operands: Any, call: Lstm) -> list[Any]:
    y = operands[call.saved - 3]
    return _output_types(y, y.shape[0], y.shape[1], call, True)


@backward_p.def_abstract_eval
def _backward_type(values: Any, words: Any, h0: Any, c0: Any, *more: Any, call: Lstm) -> list[Any]:
    gates = more[-5]
    return [array_like(each, each.shape, each.dtype) for each in (gates, values, h0, c0)]


def _lower_forward(platform: str, context: Any, *operands: Any, call: Lstm, save: bool) -> Any:
    pre, values = context.avals_in[:2]
    if values.dtype != pre.dtype:

        def narrowed(pre: Any, values: Any, *others: Any) -> Any:
            return forward_p.bind(pre, values.astype(pre.dtype), *others, call=call, save=save)

        return mlir.lower_fun(narrowed, multiple_results=True)(context, *operands)
    steps, n = pre.shape[:2]
    workspace = functools.partial(call.workspace, "forward", steps, n, pre.dtype)
    return lower("bs_xla_lstm_forward", platform, call.numbers(save), workspace, context, *operands)


def _lower_backward(platform: str, context: Any, *operands: Any, call: Lstm) -> Any:
    values, y = context.avals_in[0], context.avals_in[call.saved - 3]

    def call_core(context: Any, *operands: Any) -> Any:
        before, lengths, after = operands[:4], operands[4 : call.saved - 3], operands[call.saved - 3 :]
        workspace = functools.partial(call.workspace, "backward", y.shape[0], y.shape[1], y.dtype)
        types = [context.avals_in[i] for i in range(len(operands))]
        moved = [*types[:4], *types[call.saved - 3 :], *types[4 : call.saved - 3]]
        operands = (*before, *after, *lengths)
        context = context.replace(avals_in=moved)
        return lower("bs_xla_lstm_backward", platform, call.numbers(True), workspace, context, *operands)

    if values.dtype == y.dtype:
        return call_core(context, *operands)
    narrow = mlir.lower_fun(lambda values: values.astype(y.dtype), multiple_results=False)
    type_of = array_like(values, values.shape, y.dtype)
    made = narrow(context.replace(avals_in=[values], avals_out=[type_of]), operands[0])
    context = context.replace(avals_in=[type_of, *context.avals_in[1:]])
    return call_core(context, *made, *operands[1:])


for _platform in PLATFORMS:
    mlir.register_lowering(forward_p, functools.partial(_lower_forward, _platform), platform=_platform)
    mlir.register_lowering(backward_p, functools.partial(_lower_backward, _platform), platform=_platform)


# ---- The tangent, step by step -------------------------------------------------------------------------------------


def _tangent_steps(call: Lstm, *operands: Any) -> list[Any]:
    """The derivatives of y, h, c, gates and cells along those of pre, values, h0 and c0."""
    values, words, h0, c0 = operands[:4]
    y, gates, cells = operands[call.saved - 3 : call.saved]
    dpre, dvalues, dh0, dc0 = operands[call.saved :]
    (steps, n, hidden), narrow, wide = y.shape, y.dtype, cells.dtype
    form = Linear(call.sizes)
    narrow_values = values.astype(narrow)

    def product(h: Any, w: Any) -> Any:
        z = products.fprop(form, h.reshape(-1, hidden).astype(narrow), w, (words,))
        return z.reshape(*h.shape[:-1], 4, hidden).astype(wide)

    before_h = jnp.concatenate([h0[None], y[:-1]]) if steps else y
    before_c = jnp.concatenate([c0[None], cells[:-1]]) if steps else cells
    dz0 = dpre.astype(wide) + product(before_h, dvalues)
    if call.has_lengths:
        lengths = operands[4].reshape(n, 2)[:, 0]
        running = jnp.arange(steps)[:, None] < lengths
    else:
        running = jnp.ones((steps, n), bool)

    def step(state: tuple[Any, Any], given: tuple[Any, ...]) -> Any:
        dh_before, dc_before = state
        dz, gate, c, c_before, runs = given
        i, f, g, o = (gate[:, k].astype(wide) for k in range(4))
        slopes = jnp.stack([i * (1 - i), f * (1 - f), 1 - g * g, o * (1 - o)], 1)
        dgate = (dz + product(dh_before, narrow_values)) * slopes
        squashed = jnp.tanh(c)
        dc = f * dc_before + c_before * dgate[:, 1] + i * dgate[:, 2] + g * dgate[:, 0]
        dh = o * (1 - squashed * squashed) * dc + squashed * dgate[:, 3]
        runs = runs[:, None]
        dh_after, dc_after = jnp.where(runs, dh, dh_before), jnp.where(runs, dc, dc_before)
        dy = jnp.where(runs, dh, 0).astype(narrow)
        return (dh_after, dc_after), (dy, jnp.where(runs[..., None], dgate, 0).astype(narrow), dc_after)

    start = (dh0.astype(wide), dc0)
    (dh, dc), (dy, dgates, dcells) = jax.lax.scan(step, start, (dz0, gates, cells, before_c, running))
    return [dy, dh.astype(narrow), dc, dgates, dcells]


def _backward_steps(call: Lstm, *operands: Any, of_saved: Sequence[Any] = ()) -> list[Any]:
    """The transpose of the tangent, as differentiable operations; `of_saved` are the cotangents of gates and cells."""
    known, cts = operands[: call.saved], list(operands[call.saved :])
    values, _, h0, c0 = known[:4]
    gates, cells = known[-2:]
    cts += of_saved if of_saved else [jnp.zeros_like(gates), jnp.zeros_like(cells)]
    zeros = [jnp.zeros_like(a) for a in (gates, values, h0, c0)]
    # Of what is linear, the gradient is the transpose. jax.linear_transpose fails here in JAX 0.6 to 0.8.
    _, pull = jax.vjp(lambda *tangents: _tangent_steps(call, *known, *tangents), *zeros)
    return list(pull(cts))


# A tangent runs as it is written.
mlir.register_lowering(
    tangent_p,
    lambda context, *operands, call: mlir.lower_fun(functools.partial(_tangent_steps, call), multiple_results=True)(
        context, *operands
    ),
)


# ---- Derivatives and batches ---------------------------------------------------------------------------------------


def _instantiated(tangents: Sequence[Any]) -> list[Any]:
    return [ad.instantiate_zeros(tangent) for tangent in tangents]


def _forward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Lstm, save: bool) -> tuple[Any, Any]:
    made = forward_p.bind(*primals, call=call, save=True)
    y, _, _, gates, cells = made
    dpre, dvalues, _, dh0, dc0 = tangents[:5]
    moved = _instantiated([dpre, dvalues, dh0, dc0])
    dmade = tangent_p.bind(*primals[1:], y, gates, cells, *moved, call=call)
    kept = slice(None) if save else slice(3)
    return made[kept], dmade[kept]


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Lstm) -> tuple[Any, Any]:
    return jvp_of(functools.partial(_tangent_steps, call), primals, tangents)


def _backward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Lstm) -> tuple[Any, Any]:
    return jvp_of(functools.partial(_backward_steps, call), primals, tangents)


def _tangent_transpose(cts: Sequence[Any], *operands: Any, call: Lstm) -> list[Any]:
    known = operands[: call.saved]
    types = [a.aval if ad.is_undefined_primal(a) else jax.typeof(a) for a in operands[call.saved :]]
    if all(map(is_zero, cts)):
        return [None] * call.saved + [ad.Zero(kind) for kind in types]
    *of_outputs, dgates, dcells = cts
    of_outputs = _instantiated(of_outputs)
    if is_zero(dgates) and is_zero(dcells):
        made = backward_p.bind(*known, *of_outputs, call=call)
    else:
        made = _backward_steps(call, *known, *of_outputs, of_saved=_instantiated([dgates, dcells]))
    pairs = zip(operands[call.saved :], made, strict=True)
    return [None] * call.saved + [ct if ad.is_undefined_primal(a) else None for a, ct in pairs]


def _backward_transpose(cts: Sequence[Any], *operands: Any, call: Lstm) -> list[Any]:
    known = operands[: call.saved]
    made = tangent_p.bind(*known, *_instantiated(cts), call=call)[:3]
    pairs = zip(operands[call.saved :], made, strict=True)
    return [None] * call.saved + [ct if ad.is_undefined_primal(a) else None for a, ct in pairs]


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_jvps[backward_p] = _backward_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose


def _forward_batch(operands: Sequence[Any], dims: Sequence[Any], *, call: Lstm, save: bool) -> tuple[Any, Any]:
    """More sequences of one call, where the weight is the same for all of a batch."""
    bind = functools.partial(forward_p.bind, call=call, save=save)
    if dims[1] is not None or dims[2] is not None:
        return loop(bind, operands, dims)
    size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
    axes = (1, None, None, 0, 0, 0)[: len(operands)]
    n = np.delete(operands[0].shape, [] if dims[0] is None else dims[0])[1]
    given = [
        a if axis is None else products.folded(a, dim, size, axis)
        for a, dim, axis in zip(operands, dims, axes, strict=True)
    ]
    out_axes = (1, 0, 0, 1, 1)
    made = [
        a.reshape(*a.shape[:axis], size, n, *a.shape[axis + 1 :])
        for a, axis in zip(bind(*given), out_axes, strict=False)
    ]
    return made, out_axes[: len(made)]


def _loop_of(primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], **more: Any) -> tuple[Any, Any]:
    return loop(functools.partial(primitive.bind, **more), operands, dims)


batching.primitive_batchers[forward_p] = _forward_batch
batching.primitive_batchers[tangent_p] = functools.partial(_loop_of, tangent_p)
batching.primitive_batchers[backward_p] = functools.partial(_loop_of, backward_p)
