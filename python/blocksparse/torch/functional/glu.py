"""Gated linear units: activation(gate) * up, where one product makes both."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..._core.arguments import shown
from ...layout import Layout, need_layout
from ..arguments import need_strided, need_tensor, need_tensors
from ..interleave import GROUP, interleaved_features
from ..tables import index_of
from .linear import apply_linear

GLU_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}


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
    activate = GLU_ACTIVATIONS[need_glu_activation("glu", activation)]
    if z.dim() == 0 or z.size(-1) != interleaved_features(hidden_features):
        raise ValueError(f"[glu] z is {list(z.shape)}, needs [..., {interleaved_features(hidden_features)}]")
    parts = z.unflatten(-1, (-1, 2, GROUP))
    return (activate(parts[..., 0, :]) * parts[..., 1, :]).flatten(-2)[..., :hidden_features]


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
) -> Tensor:
    """`linear_glu` with the layout as its tables and sizes (out_features, in_features)."""
    z = apply_linear(x, values, index, sizes, transposed, bias, gates)
    return glu(z, hidden_features, activation)
