"""The ops that PyTorch sees: schemas, kernels and fake kernels. Only tensors and plain numbers go through.

    linear(x, values, index, bias, out_features) -> y              y = x W^T + bias: few arguments, so cheap to call
    linear_fprop(x, values, index, out_features, ...) -> y         y = f(x W^T + bias + residual), with gates
    linear_dgrad(dy, values, index, in_features, ...) -> dx        dx = dy W
    linear_wgrad(x, dy, index, ...) -> (dw, dgates)                dW = gate * dy^T x
    linear_wgrad_list(x[], dy[], index, ...) -> (dw, dgates)       the same, summed over a list
    bias_gradient(dy) -> dbias                                     sums of dy [..., features], features side by side

`tf32` allows float32 to be computed in tf32 on CUDA. `index` is `Layout.index()` as a tensor, on the device of the
others; `transposed` says that W^T of the layout is meant. The kernels are C++ where PyTorch's stable C interface is
there, else Python functions over ctypes; `KERNELS` and `CUDA_KERNELS` tell which.
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
from .calls import (
    blocks_of,
    check_devices,
    features_first,
    pointer_to,
    scratch,
    stream_of,
    sum_dtype,
    tensor_of,
    view_of,
)
from .registry import OPS, register

OPS.define("linear(Tensor x, Tensor values, Tensor index, Tensor? bias, int out_features, bool tf32=False) -> Tensor")
OPS.define(
    "linear_fprop(Tensor x, Tensor values, Tensor index, int out_features, bool transposed=False, "
    "Tensor? bias=None, Tensor? residual=None, Tensor? gates=None, int activation=0, bool tf32=False) -> Tensor"
)
OPS.define(
    "linear_dgrad(Tensor dy, Tensor values, Tensor index, int in_features, bool transposed=False, "
    "Tensor? gates=None, bool tf32=False) -> Tensor"
)
_WGRAD = (
    "Tensor index, int blocks, int block_size, bool transposed=False, bool wide=False, "
    "Tensor? values=None, Tensor? gates=None, bool gate_gradient=False, bool tf32=False) -> (Tensor, Tensor)"
)
OPS.define(f"linear_wgrad(Tensor x, Tensor dy, {_WGRAD}")
OPS.define(f"linear_wgrad_list(Tensor[] x, Tensor[] dy, {_WGRAD}")
OPS.define("bias_gradient(Tensor dy) -> Tensor")


# ---- What the outputs look like ------------------------------------------------------------------------------------


def _empty_like(x: Tensor, features: int) -> Tensor:
    if features_first(x):
        return x.new_empty(features, x.size(0)).t()
    return x.new_empty(*x.shape[:-1], features)


@torch.library.register_fake("blocksparse::linear", lib=OPS)
def _linear_fake(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, out_features: int, tf32: bool = False
) -> Tensor:
    check_devices(x, values, index, bias)
    return _empty_like(x, out_features)


@torch.library.register_fake("blocksparse::linear_fprop", lib=OPS)
def _fprop_fake(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    out_features: int,
    transposed: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gates: Tensor | None = None,
    activation: int = 0,
    tf32: bool = False,
) -> Tensor:
    check_devices(x, values, index, bias, residual, gates)
    return _empty_like(x, out_features)


@torch.library.register_fake("blocksparse::linear_dgrad", lib=OPS)
def _dgrad_fake(
    dy: Tensor,
    values: Tensor,
    index: Tensor,
    in_features: int,
    transposed: bool = False,
    gates: Tensor | None = None,
    tf32: bool = False,
) -> Tensor:
    check_devices(dy, values, index, gates)
    return _empty_like(dy, in_features)


def _wgrad_outputs(x: Tensor, blocks: int, block_size: int, wide: bool, gate_gradient: bool) -> tuple[Tensor, Tensor]:
    sums = sum_dtype(x.dtype)
    dw = x.new_empty(blocks, block_size, block_size, dtype=sums if wide else x.dtype)
    return dw, x.new_empty(blocks if gate_gradient else 0, dtype=sums)


@torch.library.register_fake("blocksparse::linear_wgrad", lib=OPS)
def _wgrad_fake(
    x: Tensor,
    dy: Tensor,
    index: Tensor,
    blocks: int,
    block_size: int,
    transposed: bool = False,
    wide: bool = False,
    values: Tensor | None = None,
    gates: Tensor | None = None,
    gate_gradient: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    check_devices(x, dy, index, values, gates)
    return _wgrad_outputs(x, blocks, block_size, wide, gate_gradient)


@torch.library.register_fake("blocksparse::linear_wgrad_list", lib=OPS)
def _wgrad_list_fake(
    x: list[Tensor],
    dy: list[Tensor],
    index: Tensor,
    blocks: int,
    block_size: int,
    transposed: bool = False,
    wide: bool = False,
    values: Tensor | None = None,
    gates: Tensor | None = None,
    gate_gradient: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    check_devices(x[0], *x, *dy, index, values, gates)
    return _wgrad_outputs(x[0], blocks, block_size, wide, gate_gradient)


@torch.library.register_fake("blocksparse::bias_gradient", lib=OPS)
def _bias_fake(dy: Tensor) -> Tensor:
    return dy.new_empty(_width(dy))


# ---- Kernels over ctypes -------------------------------------------------------------------------------------------


def workspace(which: str, view: structs.LayoutView, x: Tensor, n: int) -> tuple[structs.Workspace, Tensor]:
    """That of a pass over n tokens, and its memory, to be kept as long as the call."""
    size = library.ask(f"bs_linear_{which}_workspace_size", ctypes.byref(view), DTYPES.get(x.dtype, -1), n)
    return scratch(size, x)


def _tokens(x: Tensor) -> int:
    return math.prod(x.shape[:-1]) if x.dim() else 0


def _width(x: Tensor) -> int:
    return x.size(-1) if x.dim() else 0


_precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # 0.2 us, the property of torch.backends 2 us


@torch.compiler.assume_constant_result  # torch.compile guards the setting itself
def _tf32_is_allowed() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32 if _precision is None else _precision("cuda", "matmul") == "tf32")


def allows_tf32(x: Tensor) -> bool:
    """Whether PyTorch's own products of such a tensor may be computed in tf32: torch.backends.cuda.matmul."""
    return x.is_cuda and x.dtype == torch.float32 and _tf32_is_allowed()


def _fprop(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    out_features: int,
    transposed: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gates: Tensor | None = None,
    activation: int = 0,
    tf32: bool = False,
) -> Tensor:
    y = _empty_like(x, out_features)
    fprop_into(y, x, values, index, transposed, bias, residual, gates, activation, tf32)
    return y


def fprop_into(
    y: Tensor,
    x: Tensor,
    values: Tensor,
    index: Tensor,
    transposed: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gates: Tensor | None = None,
    activation: int = 0,
    tf32: bool = False,
) -> None:
    """`fprop` into a y [..., out] that is there. No op: neither autograd nor torch.compile sees it."""
    view = view_of(index, transposed, *blocks_of(values), _width(y), _width(x))
    space, _memory = workspace("fprop", view, x, _tokens(x))
    epilogue = structs.Epilogue(pointer_to(bias), pointer_to(residual), activation)
    arguments = (pointer_to(x), pointer_to(values), pointer_to(gates), ctypes.byref(epilogue), pointer_to(y))
    library.call("bs_linear_fprop", ctypes.byref(view), *arguments, space, stream_of(x, tf32))


def _linear(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, out_features: int, tf32: bool = False
) -> Tensor:
    return _fprop(x, values, index, out_features, False, bias, tf32=tf32)


def _dgrad(
    dy: Tensor,
    values: Tensor,
    index: Tensor,
    in_features: int,
    transposed: bool = False,
    gates: Tensor | None = None,
    tf32: bool = False,
) -> Tensor:
    dx, view = _empty_like(dy, in_features), view_of(index, transposed, *blocks_of(values), _width(dy), in_features)
    space, _memory = workspace("dgrad", view, dy, _tokens(dy))
    arguments = (pointer_to(dy), pointer_to(values), pointer_to(gates), pointer_to(dx))
    library.call("bs_linear_dgrad", ctypes.byref(view), *arguments, space, stream_of(dy, tf32))
    return dx


def _wgrad_list(
    x: list[Tensor],
    dy: list[Tensor],
    index: Tensor,
    blocks: int,
    block_size: int,
    transposed: bool = False,
    wide: bool = False,
    values: Tensor | None = None,
    gates: Tensor | None = None,
    gate_gradient: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    if len(x) != len(dy) or not x:
        raise ValueError(f"[linear_wgrad] {len(x)} tensors x and {len(dy)} dy, needs as many of each, and one at least")
    dw, dgates = _wgrad_outputs(x[0], blocks, block_size, wide, gate_gradient)
    view = view_of(index, transposed, blocks, block_size, _width(dy[0]), _width(x[0]))
    space, _memory = workspace("wgrad", view, x[0], sum(map(_tokens, x)))
    pairs = ((structs.Tensor * len(x))(*map(tensor_of, x)), (structs.Tensor * len(dy))(*map(tensor_of, dy)))
    gradients = (pointer_to(dw), pointer_to(dgates) if gate_gradient else None)
    arguments = (len(x), *pairs, pointer_to(values), pointer_to(gates), 0, *gradients)
    library.call("bs_linear_wgrad", ctypes.byref(view), *arguments, space, stream_of(x[0], tf32))
    return dw, dgates


def _wgrad(x: Tensor, dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _wgrad_list([x], [dy], *arguments)


def _bias(dy: Tensor) -> Tensor:
    dbias, given = _bias_fake(dy), pointer_to(dy, "bias_gradient")
    space, _memory = scratch(library.ask("bs_bias_gradient_workspace_size", given), dy)
    library.call("bs_bias_gradient", given, pointer_to(dbias, "bias_gradient"), space, stream_of(dy))
    return dbias


for _key in ("CPU", "CUDA"):
    OPS.impl("linear_wgrad_list", _wgrad_list, _key)
_python: dict[str, Callable[..., Any]] = {"linear": _linear, "linear_fprop": _fprop, "linear_dgrad": _dgrad}
_python |= {"linear_wgrad": _wgrad, "bias_gradient": _bias}
KERNELS, CUDA_KERNELS = register("linear", _python)

linear = torch.ops.blocksparse.linear.default
fprop = torch.ops.blocksparse.linear_fprop.default
dgrad = torch.ops.blocksparse.linear_dgrad.default
wgrad = torch.ops.blocksparse.linear_wgrad.default
wgrad_list = torch.ops.blocksparse.linear_wgrad_list.default
bias_gradient = torch.ops.blocksparse.bias_gradient.default
