"""The linear op with gradients of any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..._core import library, structs
from ..._core.arguments import shown, to_list
from ...layout import Layout, need_layout
from ..arguments import need_activation, need_same_dtype, need_strided, need_tensor, need_tensors
from ..autograd.transforms import (
    Pass,
    apply,
    has_tangent,
    refuse_compiled_transforms,
    refuse_tangents,
    run,
    tangent_of,
    tangents_of_gradient,
)
from ..ops import linear as _ops
from ..tables import index_of

_pytree.register_constant(Layout)  # torch.compile may hold one: torch 2.11 asks for that, 2.13 does not


def linear(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    gates: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """activation(x W^T + bias + residual), where W has the blocks `values` at the places that `layout` names.

    Differentiable any number of times, forward, backward and by `torch.func`; knows autocast, `torch.compile` and CUDA
    graphs. float32 on CUDA is computed in tf32, and so are its gradients, if `torch.backends.cuda.matmul` allowed it at
    the time of this call.

    Args:
        x: [..., layout.in_features]. A transposed view of a contiguous [features, tokens] tensor is taken as it is and
            answered in kind (features-first); anything else that is not contiguous is copied first.
        values: [layout.blocks, b, b].
        layout: which blocks of W there are.
        bias: [layout.out_features].
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        residual: like the result.
        activation: "none", "relu", "gelu" (the exact one) or "silu". Computed with the product where no gradient is
            wanted, after it otherwise.

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
        _refuse(x, values, bias, gates, residual, activation)
    index = index_of(layout, x.device)
    return apply_linear(x, values, index, layout.sizes, layout.transposed, bias, gates, residual, activation)


def _refuse(x: Any, values: Any, bias: Any, gates: Any, residual: Any, activation: Any) -> None:
    """Says what of it is no tensor; a call that looked for names each time would take 0.4 us more."""
    need_tensor("linear", "x", x)
    need_tensor("linear", "values", values)
    need_tensors("linear", bias=bias, gates=gates, residual=residual)
    need_activation("linear", activation)


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
    possible = {xs[0].dtype: False, _ops.sum_dtype(xs[0].dtype): True}
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
        tf32 = _ops.allows_tf32(xs[0])
        return _ops.wgrad_list(
            *pairs, index, layout.blocks, layout.block_size, layout.transposed, wide, None, None, False, tf32
        )[0]


def usable(x: Tensor) -> Tensor:
    """x itself if the core takes its memory layout, else a contiguous copy."""
    if x.is_contiguous():
        return x
    need_strided("linear", x=x)
    return x if _ops.features_first(x) and x.stride(1) >= x.size(0) else x.contiguous()


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
) -> Tensor:
    """`linear` with the layout as its tables and sizes (out_features, in_features).

    Every call pays for each line of this function (some 0.1 us), so what the core checks is not checked again.
    """
    if x.dim() > structs.MAX_RANK:
        residual = None if residual is None else residual.flatten(0, -2)
        y = apply_linear(x.flatten(0, -2), values, index, sizes, transposed, bias, gates, residual, activation)
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
    if activation not in _ACTIVATE:
        raise ValueError(f"[linear] activation is {activation!r}, needs one of {', '.join(_ACTIVATE)}")
    try:  # which costs nothing; to ask for the layout of each x takes 0.1 us
        contiguous = x.is_contiguous()
    except RuntimeError:
        need_strided("linear", x=x)
        raise
    if not contiguous:
        x = usable(x)
    if residual is not None:
        need_strided("linear", residual=residual)
    tf32 = on_card and _ops.allows_tf32(x)
    given = (x, values, bias, gates, residual)
    refuse_compiled_transforms("linear")
    if (torch.is_grad_enabled() and _needs_gradient(*given)) or has_tangent(*given):
        y = apply(_Product, x, values, gates, bias, index, sizes, transposed, tf32)
        if residual is not None:
            if residual.shape != y.shape or residual.dtype != y.dtype:
                raise ValueError(
                    f"[linear] residual is {residual.dtype} {list(residual.shape)}, needs {y.dtype} {list(y.shape)}"
                )
            y = y + residual
        return y if activation == "none" else _ACTIVATE[activation](y)
    if values.dtype != dtype:
        values = values.to(dtype)
    if gates is None and residual is None and activation == "none" and not transposed:
        return _ops.linear(x, values, index, bias, sizes[0], tf32)
    if residual is not None:
        residual = usable(residual)
    code = library.ACTIVATIONS[activation]
    return _ops.fprop(x, values, index, sizes[0], transposed, bias, residual, gates, code, tf32)


def _check_width(name: str, x: Tensor, features: int) -> None:
    """Tables on a card cannot be asked how many features of the last block there are, so the core cannot check this."""
    if x.dim() == 0 or x.size(-1) != features:
        raise ValueError(f"[linear] {name} is {list(x.shape)}, layout needs [N, {features}]")


_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.nn.Identity(),
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _flat_sum(dy: Tensor) -> Tensor:
    return dy.reshape(-1, dy.size(-1)).sum(0)


def _again(function: type[Pass], *fixed: Any) -> Callable[..., Any]:
    """The pass as a function of its first tensors, which may lie anyhow."""
    return lambda *tensors: apply(function, *(None if t is None else usable(t) for t in tensors), *fixed)


class _Product(Pass):
    """y = x (gates * W)^T + bias. Values may be wider than x (autocast): their gradient is as wide as they are."""

    tensors = 5
    bias = 3

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        gates: Tensor | None,
        bias: Tensor | None,
        index: Tensor,
        sizes: tuple[int, int],
        transposed: bool,
        tf32: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, values, gates, index)
        ctx.fixed = (sizes, transposed, tf32)
        y: Tensor = _ops.fprop(x, values.to(x.dtype), index, sizes[0], transposed, bias, None, gates, 0, tf32)
        return y

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        x, values, gates, index = ctx.saved_tensors
        dy, dbias = tangent_of(_again(_Product, None, index, *ctx.fixed), (x, values, gates), tangents[:3]), tangents[3]
        if dy is None or dbias is None:
            return dy if dbias is None else dbias.expand(*x.shape[:-1], -1)
        return dy + dbias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, values, gates, index = ctx.saved_tensors
        wants_x, wants_values, wants_gates, wants_bias = ctx.needs_input_grad[:4]
        wide = values.dtype != x.dtype
        values = values.to(x.dtype) if wide else values  # here, so that the second gradient goes through it
        dy = usable(dy)
        dx = dw = dgates = dbias = None
        if wants_x:
            dx = run(_Transposed, dy, values, gates, index, *ctx.fixed)
        if wants_values or wants_gates:
            dw, dgates = run(_Gradient, x, dy, values, gates, index, *ctx.fixed, wide, wants_gates)
        if wants_bias:
            dbias = _flat_sum(dy)
        return dx, dw if wants_values else None, dgates if wants_gates else None, dbias, None, None, None, None


class _Transposed(Pass):
    """dx = dy (gates * W)."""

    tensors = 4

    @staticmethod
    def forward(
        ctx: Any,
        dy: Tensor,
        values: Tensor,
        gates: Tensor | None,
        index: Tensor,
        sizes: tuple[int, int],
        transposed: bool,
        tf32: bool,
    ) -> Tensor:
        ctx.save_for_backward(dy, values, gates, index)
        ctx.fixed = (sizes, transposed, tf32)
        dx: Tensor = _ops.dgrad(dy, values, index, sizes[1], transposed, gates, tf32)
        return dx

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor | None:
        *tensors, index = ctx.saved_tensors
        return tangent_of(_again(_Transposed, index, *ctx.fixed), tensors, tangents[:3])

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
        dy, values, gates, index = ctx.saved_tensors
        wants_dy, wants_values, wants_gates = ctx.needs_input_grad[:3]
        ddx = usable(ddx)
        ddy = dw = dgates = None
        if wants_dy:
            ddy = apply(_Product, ddx, values, gates, None, index, *ctx.fixed)
        if wants_values or wants_gates:
            dw, dgates = apply(_Gradient, ddx, dy, values, gates, index, *ctx.fixed, False, wants_gates)
        return ddy, dw if wants_values else None, dgates if wants_gates else None, None, None, None, None


class _Gradient(Pass):
    """dW = gates * S and dgates = <S, W> for each block, with S = dy_out^T x_in."""

    tensors = 5

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dy: Tensor,
        values: Tensor,
        gates: Tensor | None,
        index: Tensor,
        sizes: tuple[int, int],
        transposed: bool,
        tf32: bool,
        wide: bool,
        wants_gates: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, dy, values, gates, index)
        ctx.fixed = (sizes, transposed, tf32, wide, wants_gates)
        blocks, b, _ = values.shape
        dw, dgates = _ops.wgrad(x, dy, index, blocks, b, transposed, wide, values, gates, wants_gates, tf32)
        return dw, dgates

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> tuple[Tensor | None, Tensor | None]:
        *tensors, index = ctx.saved_tensors
        return tangents_of_gradient(_again(_Gradient, index, *ctx.fixed), tensors, tangents[:4])

    @staticmethod
    def backward(ctx: Any, ddw: Tensor, ddgates: Tensor) -> tuple[Tensor | None, ...]:
        x, dy, values, gates, index = ctx.saved_tensors
        wants_x, wants_dy, wants_values, wants_gates = ctx.needs_input_grad[:4]
        *fixed, _wide, wanted_gates = ctx.fixed
        # <ddw, gates * S> + <ddgates, <S, W>> = <S, V>: V plays the part of a weight.
        per_block = (-1, 1, 1)
        v = ddw if gates is None else ddw * gates.view(per_block)
        if wanted_gates:
            v = v + ddgates.view(per_block) * values
        v = v.to(x.dtype)
        ddx = dddy = dvalues = dgates = None
        if wants_x:
            ddx = apply(_Transposed, dy, v, None, index, *fixed)
        if wants_dy:
            dddy = apply(_Product, x, v, None, None, index, *fixed)
        if (wants_values and wanted_gates) or wants_gates:
            ddw = ddw.to(x.dtype).contiguous()
            s, inner = apply(_Gradient, x, dy, ddw, None, index, *fixed, False, True)
            dvalues = (ddgates.view(per_block) * s).to(values.dtype) if wants_values and wanted_gates else None
            dgates = inner if wants_gates else None
        return ddx, dddy, dvalues, dgates, None, None, None, None, None, None
