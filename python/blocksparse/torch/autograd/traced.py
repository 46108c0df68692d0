"""Ops that bring their gradients, for `torch.jit.trace`.

A graph that it saves holds ops, and no function of autograd. It calls a module twice, with and without gradients, and
compares the graphs: so these stand in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.registry import OPS
from . import conv as of_conv
from . import linear as of_linear
from .lstm import Lstm
from .norm import LayerNorm

OPS.define(
    "linear_traced(Tensor x, Tensor values, Tensor? gates, Tensor? bias, Tensor index, int out_features, "
    "int in_features, bool transposed, bool tf32) -> Tensor"
)
OPS.define(
    "conv_traced(Tensor x, Tensor values, Tensor? gates, Tensor? bias, Tensor index, Tensor? order, int[] geometry, "
    "int out_channels, int in_channels, bool transposed, bool channels_last, bool tf32) -> Tensor"
)
OPS.define(
    "lstm_traced(Tensor pre, Tensor values, Tensor index, Tensor? h0, Tensor? c0, Tensor? lengths) "
    "-> (Tensor, Tensor, Tensor)"
)
OPS.define(
    "layer_norm_traced(Tensor x, Tensor gain, Tensor shift, Tensor? factor, Tensor? term, bool relu, float epsilon) "
    "-> Tensor"
)


def is_tracing() -> bool:
    """Whether `torch.jit.trace` looks on."""
    return torch._C._get_tracing_state() is not None


def _linear(
    x: Tensor,
    values: Tensor,
    gates: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    out_features: int,
    in_features: int,
    transposed: bool,
    tf32: bool,
) -> Tensor:
    given = (x, values, gates, bias, index, (out_features, in_features), transposed, tf32)
    y: Tensor = of_linear.Product.apply(*given)
    return y


def _conv(
    x: Tensor,
    values: Tensor,
    gates: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    order: Tensor | None,
    geometry: Sequence[int],
    out_channels: int,
    in_channels: int,
    transposed: bool,
    channels_last: bool,
    tf32: bool,
) -> Tensor:
    fixed = (tuple(geometry), (out_channels, in_channels), transposed, channels_last, tf32)
    y: Tensor = of_conv.Product.apply(x, values, gates, bias, index, order, *fixed)
    return y


def _lstm(
    pre: Tensor, values: Tensor, index: Tensor, h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    y, h, c, _, _ = Lstm.apply(pre, values, index, h0, c0, lengths)
    return y, h, c


def _layer_norm(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    factor: Tensor | None,
    term: Tensor | None,
    relu: bool,
    epsilon: float,
) -> Tensor:
    y: Tensor = LayerNorm.apply(x, gain, shift, factor, term, relu, epsilon)
    return y


for _name, _kernel in {"linear": _linear, "conv": _conv, "lstm": _lstm, "layer_norm": _layer_norm}.items():
    OPS.impl(f"{_name}_traced", _kernel, "CompositeImplicitAutograd")

linear = torch.ops.blocksparse.linear_traced.default
conv = torch.ops.blocksparse.conv_traced.default
lstm = torch.ops.blocksparse.lstm_traced.default
layer_norm = torch.ops.blocksparse.layer_norm_traced.default
