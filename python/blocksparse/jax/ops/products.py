"""The three products of a block-sparse weight as primitives of JAX, with derivatives of any order.

    fprop(x, values, tables, [bias], [residual], [gates]) -> y      y = f(x W^T + bias + residual)
    dgrad(dy, values, tables, [gates]) -> dx                        dx = dy W
    wgrad(x, dy, tables, [gates]) -> dw                             dW = gate * dy^T x

Each is linear in each of its first two arrays, so the derivatives of one are the other two: derivatives of any order,
forward and backward, need no more rules. What is multiplied, dense rows or images, is said by the parameter `form`.
Values, and a dW that is asked for, may be wider than x (float32 beside 16 bits): they are rounded before the product,
and their gradient is not.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..._core import library
from .avals import array_like
from .registry import PLATFORMS, lower

Shape = tuple[int, ...]


class Form(ABC):
    """What is multiplied: hashable, and the same for a product and its derivatives."""

    @property
    @abstractmethod
    def handlers(self) -> str:
        """How the names of its handlers begin."""

    @property
    @abstractmethod
    def integers(self) -> int:
        """How many operands behind the first two are not differentiated: tables."""

    @property
    @abstractmethod
    def token_axis(self) -> int:
        """That of tokens or images, of x and y."""

    @property
    @abstractmethod
    def feature_axis(self) -> int:
        """Of y."""

    @abstractmethod
    def values_shape(self) -> Shape:
        """Of the weight."""

    @abstractmethod
    def y_shape(self, x: Shape) -> Shape:
        """Of y for that of x."""

    @abstractmethod
    def x_shape(self, y: Shape) -> Shape:
        """Of x for that of y."""

    @abstractmethod
    def numbers(self, bits: int, activation: int) -> Sequence[int]:
        """As handlers take them; the bits say which optional operands there are."""

    @abstractmethod
    def workspace(self, which: str, x: Shape, dtype: Any) -> int:
        """Bytes that a product needs on a card."""


ACTIVATE: dict[int, Callable[[Any], Any]] = {
    library.ACTIVATIONS["none"]: lambda z: z,
    library.ACTIVATIONS["relu"]: jax.nn.relu,
    library.ACTIVATIONS["gelu"]: functools.partial(jax.nn.gelu, approximate=False),
    library.ACTIVATIONS["silu"]: jax.nn.silu,
    library.ACTIVATIONS["gelu_tanh"]: functools.partial(jax.nn.gelu, approximate=True),
}
_BITS = {"bias": 0, "residual": 1, "gates": 2, "order": 3}

fprop_p, dgrad_p, wgrad_p = (Primitive(f"blocksparse_{name}") for name in ("fprop", "dgrad", "wgrad"))


def sum_dtype(dtype: Any) -> Any:
    """In which the core sums: float64 for float64, float32 for all else."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


# ---- Calls ---------------------------------------------------------------------------------------------------------


def fprop(
    form: Form,
    x: Any,
    values: Any,
    integers: Sequence[Any],
    *,
    bias: Any = None,
    residual: Any = None,
    gates: Any = None,
    activation: int = 0,
) -> Any:
    """y; what is given has been checked."""
    more = {"bias": bias, "residual": residual, "gates": gates}
    given = tuple(name for name, array in more.items() if array is not None)
    operands = (x, values, *integers, *(more[name] for name in given))
    return fprop_p.bind(*operands, form=form, given=given, activation=activation)


def dgrad(form: Form, dy: Any, values: Any, integers: Sequence[Any], gates: Any = None) -> Any:
    """The gradient of x."""
    return dgrad_p.bind(dy, values, *integers, *_optional(gates), form=form, gated=gates is not None)


def wgrad(form: Form, x: Any, dy: Any, integers: Sequence[Any], gates: Any = None, dtype: Any = None) -> Any:
    """The gradient of the values, of the dtype of x unless another one is given."""
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    return wgrad_p.bind(x, dy, *integers, *_optional(gates), form=form, gated=gates is not None, dtype=dtype)


def _optional(array: Any) -> tuple[Any, ...]:
    return () if array is None else (array,)


def _per_block(gates: Any, form: Form) -> Any:
    return gates.reshape(-1, *(1,) * (len(form.values_shape()) - 1))


def _over_features(bias: Any, shape: Shape, form: Form) -> Any:
    axis = form.feature_axis % len(shape)
    return jnp.broadcast_to(bias.reshape(-1, *(1,) * (len(shape) - 1 - axis)), shape)


@functools.lru_cache(maxsize=1024)
def _compiled(primitive: Primitive, parameters: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(parameters)))


def run_compiled(primitive: Primitive) -> None:
    """Calls outside of compiled functions compile, once for each shape, under `jax.disable_jit()`, too."""

    def run(*operands: Any, **more: Any) -> Any:
        with jax.disable_jit(False):
            return _compiled(primitive, tuple(sorted(more.items())))(*operands)

    primitive.def_impl(run)


# ---- Types and lowering --------------------------------------------------------------------------------------------


@fprop_p.def_abstract_eval
def _fprop_type(x: Any, values: Any, *more: Any, form: Form, given: tuple[str, ...], activation: int) -> Any:
    return array_like(x, form.y_shape(x.shape), x.dtype)


@dgrad_p.def_abstract_eval
def _dgrad_type(dy: Any, values: Any, *more: Any, form: Form, gated: bool) -> Any:
    return array_like(dy, form.x_shape(dy.shape), dy.dtype)


@wgrad_p.def_abstract_eval
def _wgrad_type(x: Any, dy: Any, *more: Any, form: Form, gated: bool, dtype: Any) -> Any:
    return array_like(x, form.values_shape(), dtype)


def _lower_product(primitive: Primitive, which: str, platform: str, context: Any, *operands: Any, **more: Any) -> Any:
    form: Form = more["form"]
    of_x, of_values = context.avals_in[:2]
    if of_values.dtype != of_x.dtype:

        def narrowed(x: Any, values: Any, *others: Any) -> Any:
            return primitive.bind(x, values.astype(x.dtype), *others, **more)

        return mlir.lower_fun(narrowed, multiple_results=False)(context, *operands)
    names = more.get("given", ("gates",) if more.get("gated") else ())
    names = (*names, *("order",) * (form.integers - 1))
    numbers = form.numbers(sum(1 << _BITS[name] for name in names), more.get("activation", 0))
    x = context.avals_out[0].shape if which == "dgrad" else of_x.shape
    handler = f"bs_xla_{form.handlers}_{which}"
    return lower(handler, platform, numbers, lambda: form.workspace(which, x, of_x.dtype), context, *operands)


for _platform in PLATFORMS:
    for _primitive, _which in ((fprop_p, "fprop"), (dgrad_p, "dgrad"), (wgrad_p, "wgrad")):
        mlir.register_lowering(
            _primitive, functools.partial(_lower_product, _primitive, _which, _platform), platform=_platform
        )
for _primitive in (fprop_p, dgrad_p, wgrad_p):
    run_compiled(_primitive)


# ---- Derivatives ---------------------------------------------------------------------------------------------------


def is_zero(tangent: Any) -> bool:
    """Whether JAX knows that a tangent is zero."""
    return type(tangent) is ad.Zero


def jvp_of(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """`jax.jvp` of a function of all of them, along the tangents that are not known to be zero."""
    moving = [i for i, tangent in enumerate(tangents) if not is_zero(tangent)]

    def of_moving(*some: Any) -> Any:
        arguments = list(primals)
        for i, array in zip(moving, some, strict=True):
            arguments[i] = array
        return function(*arguments)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _sum(terms: Sequence[Any], aval: Any) -> Any:
    return functools.reduce(jnp.add, terms) if terms else ad.Zero(aval)


def _value(tangent: Any) -> Any:
    """A tangent, or None."""
    return None if is_zero(tangent) else tangent


def _weight_tangent(form: Form, values: Any, dvalues: Any, gates: Any, dgates: Any) -> tuple[Any, Any] | None:
    """(values, gates) whose product is the derivative of gates * W; None if that is zero.

    Where gates have a tangent, the product is written out: its transpose then makes dgates = <S, W> and dW = gate * S
    of one S. It is as wide as sums are.
    """
    if dgates is None:
        return None if dvalues is None else (dvalues, gates)
    wide = gates.dtype
    product = _per_block(dgates, form) * values.astype(wide)
    if dvalues is not None:
        product = product + _per_block(gates, form) * dvalues.astype(wide)
    return product, None


def _fprop_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, form: Form, given: tuple[str, ...], activation: int
) -> tuple[Any, Any]:
    if activation or "residual" in given:
        return jvp_of(functools.partial(_in_steps, form, given, activation), primals, tangents)
    y = fprop_p.bind(*primals, form=form, given=given, activation=0)
    (x, values), (dx, dvalues) = primals[:2], map(_value, tangents[:2])
    integers, k = primals[2 : 2 + form.integers], 2 + form.integers
    more = dict(zip(given, primals[k:], strict=True))
    dmore = {name: _value(tangent) for name, tangent in zip(given, tangents[k:], strict=True)}
    gates, terms = more.get("gates"), []
    if dx is not None:
        terms.append(fprop(form, dx, values, integers, gates=gates))
    if (weight := _weight_tangent(form, values, dvalues, gates, dmore.get("gates"))) is not None:
        terms.append(fprop(form, x, weight[0], integers, gates=weight[1]))
    if dmore.get("bias") is not None:
        terms.append(_over_features(dmore["bias"], y.shape, form))
    return y, _sum(terms, jax.typeof(y).to_tangent_aval())


def _in_steps(form: Form, given: tuple[str, ...], activation: int, *operands: Any) -> Any:
    """fprop with residual and activation behind the product, where JAX differentiates them."""
    k = 2 + form.integers
    more = dict(zip(given, operands[k:], strict=True))
    residual = more.pop("residual", None)
    z = fprop(form, operands[0], operands[1], operands[2:k], **more)
    return ACTIVATE[activation](z if residual is None else z + residual)


def _dgrad_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, form: Form, gated: bool) -> tuple[Any, Any]:
    dx = dgrad_p.bind(*primals, form=form, gated=gated)
    (dy, values), (ddy, dvalues) = primals[:2], map(_value, tangents[:2])
    integers = primals[2 : 2 + form.integers]
    gates, dgates = (primals[-1], _value(tangents[-1])) if gated else (None, None)
    terms = [] if ddy is None else [dgrad(form, ddy, values, integers, gates)]
    if (weight := _weight_tangent(form, values, dvalues, gates, dgates)) is not None:
        terms.append(dgrad(form, dy, weight[0], integers, weight[1]))
    return dx, _sum(terms, jax.typeof(dx).to_tangent_aval())


def _wgrad_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, form: Form, gated: bool, dtype: Any
) -> tuple[Any, Any]:
    dw = wgrad_p.bind(*primals, form=form, gated=gated, dtype=dtype)
    (x, dy), (dx, ddy) = primals[:2], map(_value, tangents[:2])
    integers = primals[2 : 2 + form.integers]
    gates, dgates = (primals[-1], _value(tangents[-1])) if gated else (None, None)
    terms = [wgrad(form, a, b, integers, gates, dtype) for a, b in ((dx, dy), (x, ddy)) if a is not None is not b]
    if dgates is not None:
        s = wgrad(form, x, dy, integers, None, sum_dtype(x.dtype))
        terms.append((_per_block(dgates, form) * s).astype(dtype))
    return dw, _sum(terms, jax.typeof(dw).to_tangent_aval())


ad.primitive_jvps[fprop_p] = _fprop_jvp
ad.primitive_jvps[dgrad_p] = _dgrad_jvp
ad.primitive_jvps[wgrad_p] = _wgrad_jvp


def _transposed(
    ct: Any, operands: Sequence[Any], of_first: Callable[[Any], Any], of_second: Callable[[Any], Any]
) -> list[Any]:
    """The cotangents of a product that is linear in one of its first two arrays."""
    made: list[Any] = [None] * len(operands)
    for i, transpose in enumerate((of_first, of_second)):
        if ad.is_undefined_primal(operands[i]):
            made[i] = ad.Zero(operands[i].aval) if is_zero(ct) else transpose(ct)
    return made


def _fprop_transpose(ct: Any, *operands: Any, form: Form, given: tuple[str, ...], activation: int) -> list[Any]:
    assert given in ((), ("gates",)), "the rule for tangents leaves nothing else"
    x, values, *integers = operands[: 2 + form.integers]
    gates = operands[-1] if given else None
    return _transposed(
        ct,
        operands,
        lambda dy: dgrad(form, dy, values, integers, gates),
        lambda dy: wgrad(form, x, dy, integers, gates, values.aval.dtype),
    )


def _dgrad_transpose(ct: Any, *operands: Any, form: Form, gated: bool) -> list[Any]:
    dy, values, *integers = operands[: 2 + form.integers]
    gates = operands[-1] if gated else None
    return _transposed(
        ct,
        operands,
        lambda ddx: fprop(form, ddx, values, integers, gates=gates),
        lambda ddx: wgrad(form, ddx, dy, integers, gates, values.aval.dtype),
    )


def _wgrad_transpose(ct: Any, *operands: Any, form: Form, gated: bool, dtype: Any) -> list[Any]:
    x, dy, *integers = operands[: 2 + form.integers]
    gates = operands[-1] if gated else None
    return _transposed(
        ct,
        operands,
        lambda ddw: dgrad(form, dy, ddw, integers, gates),
        lambda ddw: fprop(form, x, ddw, integers, gates=gates),
    )


ad.primitive_transposes[fprop_p] = _fprop_transpose
ad.primitive_transposes[dgrad_p] = _dgrad_transpose
ad.primitive_transposes[wgrad_p] = _wgrad_transpose


# ---- Batches -------------------------------------------------------------------------------------------------------


def loop(bind: Callable[..., Any], operands: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    """One call for each member of a batch, one after the other."""
    mapped = {i: jnp.moveaxis(operands[i], dim, 0) for i, dim in enumerate(dims) if dim is not None}

    def one(members: dict[int, Any]) -> Any:
        return bind(*(members.get(i, operand) for i, operand in enumerate(operands)))

    made = jax.lax.map(one, mapped)
    return made, jax.tree_util.tree_map(lambda _: 0, made)


def folded(x: Any, dim: Any, size: int, axis: int) -> Any:
    """A batch of tokens as more tokens."""
    x = jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:])) if dim is None else x
    x = x if dim is None else jnp.moveaxis(x, dim, axis)
    return x.reshape(*x.shape[:axis], math.prod(x.shape[axis : axis + 2]), *x.shape[axis + 2 :])


def batch_of_tokens(
    primitive: Primitive, tokens: Sequence[int], operands: Sequence[Any], dims: Sequence[Any], **more: Any
) -> tuple[Any, Any]:
    """Where weights, bias and gates are the same for all of a batch, its tokens become more tokens of one product."""
    bind = functools.partial(primitive.bind, **more)
    if any(dim is not None for i, dim in enumerate(dims) if i not in tokens):
        return loop(bind, operands, dims)
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    axis, given = more["form"].token_axis, list(operands)
    for i in tokens:
        given[i] = folded(operands[i], dims[i], size, axis)
    first, dim = operands[0].shape, dims[0]
    n = first[axis] if dim is None else (*first[:dim], *first[dim + 1 :])[axis]
    made = bind(*given)
    return made.reshape(*made.shape[:axis], size, n, *made.shape[axis + 1 :]), axis


def _fprop_batch(operands: Sequence[Any], dims: Sequence[Any], **more: Any) -> tuple[Any, Any]:
    given, k = more["given"], 2 + more["form"].integers
    tokens = (0, k + given.index("residual")) if "residual" in given else (0,)
    return batch_of_tokens(fprop_p, tokens, operands, dims, **more)


batching.primitive_batchers[fprop_p] = _fprop_batch
batching.primitive_batchers[dgrad_p] = functools.partial(batch_of_tokens, dgrad_p, (0,))
batching.primitive_batchers[wgrad_p] = functools.partial(batch_of_tokens, wgrad_p, ())
