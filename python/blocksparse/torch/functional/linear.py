"""The linear op with gradients of any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core import library, structs
from ..._core.arguments import shown, to_list
from ...layout import Layout, need_layout
from ..arguments import need_activation, need_same_dtype, need_strided, need_tensor, need_tensors
from ..autograd import traced
from ..autograd.linear import Product
from ..autograd.transforms import apply, has_tangent, needs_gradient, refuse_compiled_transforms, refuse_tangents
from ..ops import linear as ops
from ..ops.calls import contiguous_or_none, sum_dtype, usable
from ..tables import index_of
from .epilogue import ACTIVATE, finish


def linear(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = "none",
) -> Tensor:
    """activation(x W^T + bias + residual), where W has the blocks `values` at the places that `layout` names.

    Differentiable any number of times, forward, backward and by `torch.func`; knows autocast, `torch.compile` and CUDA
    graphs. float32 on CUDA is computed in tf32, and so are its gradients, if `torch.backends.cuda.matmul` allowed it at
    the time of this call.

    Args:
        x: [..., layout.in_features]. A transposed view of a contiguous [features, tokens] tensor is taken as it is and
            answered in kind (features-first); anything else that is not contiguous is copied first.
        values: [layout.blocks, b, b]. What is not contiguous is copied at every call, as are bias and gates.
        layout: which blocks of W there are.
        bias: [layout.out_features].
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        residual: like the result.
        activation: "none" (or None), "relu", "gelu" (the exact one), "gelu_tanh" or "silu". Computed with the product
            where no gradient is wanted, after it otherwise.

    Returns:
        [..., layout.out_features], of the dtype of x; under autocast, of autocast's.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
    """
    if (
        not (isinstance(x, Tensor) and isinstance(values, Tensor) and isinstance(activation, str))
        or not (bias is None or isinstance(bias, Tensor))
        or not (gates is None or isinstance(gates, Tensor))
        or not (residual is None or isinstance(residual, Tensor))
    ):
        activation = _refuse(x, values, bias, gates, residual, activation)
    index = index_of(layout, x.device)
    return apply_linear(x, values, index, layout.sizes, layout.transposed, bias, gates, residual, activation)


def _refuse(x: Any, values: Any, bias: Any, gates: Any, residual: Any, activation: Any) -> str:
    """Says what of it is no tensor, else the activation; a call that looked for names would take 0.4 us more."""
    need_tensor("linear", "x", x)
    need_tensor("linear", "values", values)
    need_tensors("linear", bias=bias, gates=gates, residual=residual)
    return need_activation("linear", activation)


def linear_wgrad(
    xs: Sequence[Tensor], dys: Sequence[Tensor], layout: Layout, *, dtype: torch.dtype | None = None
) -> Tensor:
    """dW of the blocks, summed over a list of (x, dy) in one call: the time steps of a recurrent network, say.

    Args:
        xs: tensors [..., layout.in_features].
        dys: as many tensors [..., layout.out_features].
        layout: which blocks of W there are.
        dtype: of the result: that of x (default), or float32 for narrower x.

    Returns:
        [layout.blocks, b, b]. Not differentiable. In tf32 where `torch.backends.cuda.matmul` allows it.

    Raises:
        ValueError: a shape or dtype is wrong, or the lists are empty or of different lengths.
    """
    need_layout("linear_wgrad", layout)
    xs, dys = (to_list("linear_wgrad", name, given, "a list of tensors") for name, given in (("xs", xs), ("dys", dys)))
    for name, given in (("xs", xs), ("dys", dys)):
        for tensor in given:
            need_tensor("linear_wgrad", f"one of {name}", tensor)
    if len(xs) == 0:
        raise ValueError("[linear_wgrad] xs is empty, needs one tensor at least")
    possible = {xs[0].dtype: False, sum_dtype(xs[0].dtype): True}
    wide = False if dtype is None else possible.get(dtype) if isinstance(dtype, torch.dtype) else None
    if wide is None:
        asked = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise ValueError(f"[linear_wgrad] dtype is {asked}, needs {' or '.join(map(str, possible))}")
    refuse_tangents("linear_wgrad", *xs, *dys)
    with torch.no_grad():
        for x in xs:
            need_strided("linear_wgrad", x=x)
            _check_width("x", x, layout.in_features)
        for dy in dys:
            need_strided("linear_wgrad", dy=dy)
            _check_width("dy", dy, layout.out_features)
        pairs = [usable(x) for x in xs], [usable(dy) for dy in dys]
        index = index_of(layout, xs[0].device)
        tf32 = ops.allows_tf32(xs[0])
        return ops.wgrad_list(
            *pairs, index, layout.blocks, layout.block_size, layout.transposed, wide, None, None, False, tf32
        )[0]


def apply_linear(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    sizes: tuple[int, int],
    transposed: bool,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    product: type[Product] = Product,
) -> Tensor:
    """`linear` with the layout as its tables and sizes (out_features, in_features).

    Every call pays for each line of this function (some 0.1 us), so what the core checks is not checked again.
    """
    if x.dim() > structs.MAX_RANK:
        residual = None if residual is None else residual.flatten(0, -2)
        flat = x.flatten(0, -2)
        y = apply_linear(flat, values, index, sizes, transposed, bias, gates, residual, activation, product)
        return y.unflatten(0, x.shape[:-1])
    on_card, dtype = x.is_cuda, x.dtype
    if torch.is_autocast_enabled("cuda" if on_card else "cpu") and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cuda" if on_card else "cpu")
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        residual = None if residual is None else residual.to(dtype)
    elif values.dtype != dtype:
        need_same_dtype("linear", x, values)
    if on_card:
        _check_width("x", x, sizes[1])
    if activation not in ACTIVATE:
        raise ValueError(f"[linear] activation is {activation!r}, needs one of {', '.join(ACTIVATE)}")
    try:  # which costs nothing; to ask for the layout of each x takes 0.1 us
        contiguous = x.is_contiguous()
        packed = (
            values.is_contiguous()
            and (bias is None or bias.is_contiguous())
            and (gates is None or gates.is_contiguous())
        )
    except RuntimeError:
        need_strided("linear", x=x, values=values, bias=bias, gates=gates)
        raise
    if not contiguous:
        x = usable(x)
    if not packed:
        need_strided("linear", values=values, bias=bias, gates=gates)
        values, bias, gates = values.contiguous(), contiguous_or_none(bias), contiguous_or_none(gates)
    if residual is not None:
        need_strided("linear", residual=residual)
    tf32 = on_card and ops.allows_tf32(x)
    given = (x, values, bias, gates, residual)
    refuse_compiled_transforms("linear")
    if traced.is_tracing():
        y = traced.linear(x, values, gates, bias, index, *sizes, transposed, tf32)
        return finish("linear", y, residual, activation)
    exchanges = not torch.compiler.is_compiling() and product.exchanges  # dynamo cannot read it, and never needs it
    if (torch.is_grad_enabled() and needs_gradient(*given)) or has_tangent(*given) or exchanges:
        y = apply(product, x, values, gates, bias, index, sizes, transposed, tf32)
        return finish("linear", y, residual, activation)
    if values.dtype != dtype:
        values = values.to(dtype)
    if gates is None and residual is None and activation == "none" and not transposed:
        return ops.linear(x, values, index, bias, sizes[0], tf32)
    if residual is not None:
        residual = usable(residual)
    code = library.ACTIVATIONS[activation]
    return ops.fprop(x, values, index, sizes[0], transposed, bias, residual, gates, code, tf32)


def _check_width(name: str, x: Tensor, features: int) -> None:
    """Tables on a card cannot be asked how many features of the last block there are, so the core cannot check this."""
    if x.dim() == 0 or x.size(-1) != features:
        raise ValueError(f"[linear] {name} is {list(x.shape)}, layout needs [N, {features}]")
