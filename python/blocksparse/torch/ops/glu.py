"""Gated linear units as PyTorch sees them: see include/blocksparse/glu.h for how gate and up lie in z.

linear_glu(x, values, index, out_features, hidden_features, ...) -> y   f(gate) * up of z = x W^T + bias
glu(z, hidden_features, activation) -> y                                f(gate) * up
glu_backward(z, dy, activation) -> dz                                   the gradient of both in one pass
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._core import library, structs
from ..arguments import DTYPES
from .calls import blocks_of, check_devices, pointer_to, scratch, stream_of, view_of
from .registry import OPS, register

OPS.define(
    "linear_glu(Tensor x, Tensor values, Tensor index, int out_features, int hidden_features, bool transposed=False, "
    "Tensor? bias=None, Tensor? gates=None, int activation=3, bool tf32=False) -> Tensor"
)
OPS.define("glu(Tensor z, int hidden_features, int activation) -> Tensor")
OPS.define("glu_backward(Tensor z, Tensor dy, int activation) -> Tensor")


@torch.library.register_fake("blocksparse::linear_glu", lib=OPS)
def _linear_fake(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    out_features: int,
    hidden_features: int,
    transposed: bool = False,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    activation: int = 3,
    tf32: bool = False,
) -> Tensor:
    check_devices(x, values, index, bias, gates, op="linear_glu")
    return x.new_empty(*x.shape[:-1], hidden_features)


@torch.library.register_fake("blocksparse::glu", lib=OPS)
def _forward_fake(z: Tensor, hidden_features: int, activation: int) -> Tensor:
    return z.new_empty(*z.shape[:-1], hidden_features)


@torch.library.register_fake("blocksparse::glu_backward", lib=OPS)
def _backward_fake(z: Tensor, dy: Tensor, activation: int) -> Tensor:
    check_devices(z, dy, op="glu")
    return z.new_empty(z.shape)


def _linear(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    out_features: int,
    hidden_features: int,
    transposed: bool = False,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    activation: int = 3,
    tf32: bool = False,
) -> Tensor:
    op, width = "linear_glu", x.size(-1) if x.dim() else 0
    y = x.new_empty(*x.shape[:-1], hidden_features)
    view = view_of(index, transposed, *blocks_of(values), out_features, width, op)
    n = math.prod(x.shape[:-1]) if x.dim() else 0
    size = library.ask("bs_linear_glu_fprop_workspace_size", ctypes.byref(view), DTYPES.get(x.dtype, -1), n)
    space, _memory = scratch(size, x)
    epilogue = structs.Epilogue(pointer_to(bias, op), None, activation)
    given = (pointer_to(x, op), pointer_to(values, op), pointer_to(gates, op), ctypes.byref(epilogue))
    library.call(
        "bs_linear_glu_fprop", ctypes.byref(view), *given, pointer_to(y, op), space, stream_of(x, tf32)
    )  # fmt: skip
    return y


def _forward(z: Tensor, hidden_features: int, activation: int) -> Tensor:
    y = z.new_empty(*z.shape[:-1], hidden_features)
    library.call("bs_glu_forward", pointer_to(z, "glu"), activation, pointer_to(y, "glu"), stream_of(z))
    return y


def _backward(z: Tensor, dy: Tensor, activation: int) -> Tensor:
    dz = z.new_empty(z.shape)
    given = (pointer_to(z, "glu"), pointer_to(dy, "glu"), activation, pointer_to(dz, "glu"))
    library.call("bs_glu_backward", *given, stream_of(z))
    return dz


_python: dict[str, Callable[..., Any]] = {"linear_glu": _linear, "glu": _forward, "glu_backward": _backward}
KERNELS, CUDA_KERNELS = register("glu", _python)

linear = torch.ops.blocksparse.linear_glu.default
forward = torch.ops.blocksparse.glu.default
backward = torch.ops.blocksparse.glu_backward.default
