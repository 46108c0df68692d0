"""Gated linear units: activation(gate) * up, where one product makes both."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core import library, structs
from ..._core.arguments import shown, to_int
from ...interleave import interleaved_features
from ...layout import Layout, need_layout
from ..arguments import need_same_dtype, need_strided, need_tensor, need_tensors
from ..autograd import traced
from ..autograd.glu import Glu, composed
from ..autograd.linear import Product
from ..autograd.transforms import apply, has_tangent, needs_gradient, refuse_compiled_transforms
from ..ops import glu as ops
from ..ops.calls import usable
from ..ops.linear import allows_tf32
from ..tables import index_of
from .epilogue import ACTIVATE
from .linear import apply_linear

GLU_ACTIVATIONS = {name: ACTIVATE[name] for name in ("silu", "gelu", "gelu_tanh", "relu")}


def need_glu_activation(op: str, activation: object) -> str:
    """Its name; raises ValueError if there is none of that name."""
    if not isinstance(activation, str) or activation not in GLU_ACTIVATIONS:
        raise ValueError(f"[{op}] activation is {shown(activation)}, needs one of {', '.join(GLU_ACTIVATIONS)}")
    return activation


def glu(z: Tensor, hidden_features: int, activation: str = "silu") -> Tensor:
    """activation(gate) * up, [..., hidden_features].

    Args:
        z: [..., 2 round_up(hidden_features, 8)]: eight features of the gate, the same of up, and so on.
        hidden_features: of the result.
        activation: "silu" (SwiGLU), "gelu" (the exact one), "gelu_tanh" or "relu".

    Raises:
        ValueError: z has another width, or there is no such activation.

    Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
    """
    need_tensor("glu", "z", z)
    need_strided("glu", z=z)
    need_glu_activation("glu", activation)
    hidden_features = to_int("hidden_features", hidden_features, op="glu")
    if z.dim() == 0 or z.size(-1) != interleaved_features(hidden_features):
        raise ValueError(f"[glu] z is {list(z.shape)}, needs [..., {interleaved_features(hidden_features)}]")
    return apply_glu(z, hidden_features, activation)


def apply_glu(z: Tensor, hidden_features: int, activation: str) -> Tensor:
    """`glu` of what is known to be right."""
    if z.dim() > structs.MAX_RANK:
        return apply_glu(z.flatten(0, -2), hidden_features, activation).unflatten(0, z.shape[:-1])
    code = library.ACTIVATIONS[activation]
    refuse_compiled_transforms("glu")
    if traced.is_tracing():
        return composed(z, hidden_features, code)
    if not z.is_contiguous():
        z = z.contiguous()
    if (torch.is_grad_enabled() and z.requires_grad) or has_tangent(z):
        y: Tensor = apply(Glu, z, hidden_features, code)
        return y
    result: Tensor = ops.forward(z, hidden_features, code)
    return result


def linear_glu(
    x: Tensor,
    values: Tensor,
    layout: Layout,
    hidden_features: int,
    bias: Tensor | None = None,
    *,
    gates: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """activation(W_gate x + bias_gate) * (W_up x + bias_up), both by one product.

    Differentiable as `blocksparse.torch.linear` is.

    Args:
        x: [..., layout.in_features], features-last.
        values: [layout.blocks, b, b]: `interleave` makes them of those of gate and up.
        layout: of both: `interleaved_layout` makes it of that of each.
        hidden_features: of the result.
        bias: [layout.out_features], interleaved likewise (`interleave_rows`).
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        activation: "silu" (SwiGLU), "gelu" (the exact one), "gelu_tanh" or "relu".

    Returns:
        [..., hidden_features], of the dtype of x; under autocast, of autocast's.

    Raises:
        ValueError: a shape, dtype or memory layout is wrong.
    """
    need_layout("linear_glu", layout)
    need_tensor("linear_glu", "x", x)
    need_tensor("linear_glu", "values", values)
    need_tensors("linear_glu", bias=bias, gates=gates)
    need_glu_activation("linear_glu", activation)
    hidden_features = to_int("hidden_features", hidden_features, op="linear_glu")
    need_glu_sizes("linear_glu", layout, hidden_features)
    index = index_of(layout, x.device)
    return apply_linear_glu(
        x, values, index, layout.sizes, hidden_features, bias, gates, activation, transposed=layout.transposed
    )


def need_glu_sizes(op: str, layout: Layout, hidden_features: int) -> None:
    """Raises ValueError if the layout is none of gate and up of so many features."""
    if hidden_features < 1 or layout.out_features != interleaved_features(hidden_features):
        raise ValueError(
            f"[{op}] layout has {layout.out_features} outputs, gate and up of {hidden_features} hidden features need "
            f"{interleaved_features(max(hidden_features, 1))} (interleaved_layout makes such a layout)"
        )


def apply_linear_glu(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    sizes: tuple[int, int],
    hidden_features: int,
    bias: Tensor | None,
    gates: Tensor | None,
    activation: str,
    *,
    transposed: bool = False,
    product: type[Product] = Product,
) -> Tensor:
    """`linear_glu` with the layout as its tables and sizes (out_features, in_features).

    Where gradients are wanted, z is made and kept; elsewhere y alone is, by one launch.
    """
    given = (x, values, bias, gates)
    if traced.is_tracing() or (torch.is_grad_enabled() and needs_gradient(*given)) or has_tangent(*given):
        z = apply_linear(x, values, index, sizes, transposed, bias, gates, product=product)
        return apply_glu(z, hidden_features, activation)
    if x.dim() > structs.MAX_RANK:
        flat = (x.flatten(0, -2), values, index, sizes, hidden_features, bias, gates, activation)
        return apply_linear_glu(*flat, transposed=transposed).unflatten(0, x.shape[:-1])
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, values = x.to(dtype), values.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    need_same_dtype("linear_glu", x, values)
    need_strided("linear_glu", x=x)
    if x.dim() == 0 or x.size(-1) != sizes[1]:
        raise ValueError(f"[linear_glu] x is {list(x.shape)}, layout needs [N, {sizes[1]}]")
    refuse_compiled_transforms("linear_glu")
    code, tf32 = library.ACTIVATIONS[activation], allows_tf32(x)
    y: Tensor = ops.linear(
        usable(x), values, index, sizes[0], hidden_features, transposed, bias, gates, code, tf32
    )  # fmt: skip
    return y
