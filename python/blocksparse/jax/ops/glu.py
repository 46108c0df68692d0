"""The product that ends in a gated linear unit, as one primitive of JAX.

    linear_glu(x, values, tables, [bias], [gates]) -> y     y = f(gate) * up of z = x W^T + bias

Where derivatives are wanted it is `fprop`, which makes z, and the pointwise half in JAX's own operations, which XLA
fuses with their derivatives and what is around them. How gate and up lie in z: `blocksparse.interleave`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..._core import library
from ...interleave import GROUP
from . import products
from .avals import array_like
from .linear import Linear
from .registry import PLATFORMS, lower

linear_glu_p = Primitive("blocksparse_linear_glu")
products.run_compiled(linear_glu_p)
_BITS = {"bias": 0, "gates": 1}


def linear_glu(
    form: Linear, x: Any, values: Any, words: Any, bias: Any, gates: Any, *, hidden: int, activation: int
) -> Any:
    """y [n, hidden] of x [n, in]; what is given has been checked."""
    more = {"bias": bias, "gates": gates}
    given = tuple(name for name, array in more.items() if array is not None)
    operands = (x, values, words, *(more[name] for name in given))
    return linear_glu_p.bind(*operands, form=form, given=given, hidden=hidden, activation=activation)


def glu(z: Any, hidden: int, activation: int) -> Any:
    """f(gate) * up, computed in the type of sums and rounded once."""
    both = z.astype(products.sum_dtype(z.dtype)).reshape(*z.shape[:-1], z.shape[-1] // (2 * GROUP), 2, GROUP)
    gate, up = (both[..., part, :].reshape(*z.shape[:-1], z.shape[-1] // 2)[..., :hidden] for part in range(2))
    return (products.ACTIVATE[activation](gate) * up).astype(z.dtype)


@linear_glu_p.def_abstract_eval
def _type(x: Any, *more: Any, form: Linear, given: tuple[str, ...], hidden: int, activation: int) -> Any:
    return array_like(x, (x.shape[0], hidden), x.dtype)


def _lower(
    platform: str,
    context: Any,
    *operands: Any,
    form: Linear,
    given: tuple[str, ...],
    hidden: int,
    activation: int,
) -> Any:
    of_x, of_values = context.avals_in[:2]
    if of_values.dtype != of_x.dtype:

        def narrowed(x: Any, values: Any, *others: Any) -> Any:
            more = {"form": form, "given": given, "hidden": hidden, "activation": activation}
            return linear_glu_p.bind(x, values.astype(x.dtype), *others, **more)

        return mlir.lower_fun(narrowed, multiple_results=False)(context, *operands)
    numbers = (int(form.tf32), sum(1 << _BITS[name] for name in given), *form.sizes.numbers(), activation)

    def workspace() -> int:
        view, code = form.sizes.card_view(), library.DTYPES[of_x.dtype.name]
        ask = "bs_linear_glu_fprop_workspace_size"
        return int(library.ask(ask, ctypes.byref(view), code, of_x.shape[0]))

    return lower("bs_xla_linear_glu_fprop", platform, numbers, workspace, context, *operands)


for _platform in PLATFORMS:
    mlir.register_lowering(linear_glu_p, functools.partial(_lower, _platform), platform=_platform)


def _in_steps(
    form: Linear, given: tuple[str, ...], hidden: int, activation: int, x: Any, values: Any, words: Any, *more: Any
) -> Any:
    z = products.fprop(form, x, values, (words,), **dict(zip(given, more, strict=True)))
    return glu(z, hidden, activation)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, form: Linear, given: tuple[str, ...], **more: int) -> Any:
    steps = functools.partial(_in_steps, form, given, more["hidden"], more["activation"])
    return products.jvp_of(steps, primals, tangents)


ad.primitive_jvps[linear_glu_p] = _jvp
batching.primitive_batchers[linear_glu_p] = functools.partial(products.batch_of_tokens, linear_glu_p, (0,))
