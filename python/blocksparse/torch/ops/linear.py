"""The ops that PyTorch sees: schemas, kernels and fake kernels. Only tensors and plain numbers go through.

    linear(x, values, index, bias, out_features) -> y              y = x W^T + bias: few arguments, so cheap to call
    linear_fprop(x, values, index, out_features, ...) -> y         y = f(x W^T + bias + residual), with gates
    linear_dgrad(dy, values, index, in_features, ...) -> dx        dx = dy W
    linear_wgrad(x, dy, index, ...) -> (dw, dgates)                dW = gate * dy^T x
    linear_wgrad_list(x[], dy[], index, ...) -> (dw, dgates)       the same, summed over a list

`tf32` allows float32 to be computed in tf32 on CUDA. `index` is `Layout.index()` as a tensor, on the device of the
others; `transposed` says that W^T of the layout is meant. The kernels are C++ where PyTorch's stable C interface is
there, else Python functions over ctypes; `KERNELS` and `CUDA_KERNELS` tell which.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._core import library, structs
from ..arguments import DTYPES

_ops = torch.library.Library("blocksparse", "DEF")
_ops.define("linear(Tensor x, Tensor values, Tensor index, Tensor? bias, int out_features, bool tf32=False) -> Tensor")
_ops.define(
    "linear_fprop(Tensor x, Tensor values, Tensor index, int out_features, bool transposed=False, "
    "Tensor? bias=None, Tensor? residual=None, Tensor? gates=None, int activation=0, bool tf32=False) -> Tensor"
)
_ops.define(
    "linear_dgrad(Tensor dy, Tensor values, Tensor index, int in_features, bool transposed=False, "
    "Tensor? gates=None, bool tf32=False) -> Tensor"
)
_WGRAD = (
    "Tensor index, int blocks, int block_size, bool transposed=False, bool wide=False, "
    "Tensor? values=None, Tensor? gates=None, bool gate_gradient=False, bool tf32=False) -> (Tensor, Tensor)"
)
_ops.define(f"linear_wgrad(Tensor x, Tensor dy, {_WGRAD}")
_ops.define(f"linear_wgrad_list(Tensor[] x, Tensor[] dy, {_WGRAD}")


def features_first(x: Tensor) -> bool:
    """Whether the tokens of x [n, features] are contiguous rather than its features."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and x.size(0) > 1


def _empty_like(x: Tensor, features: int) -> Tensor:
    if features_first(x):
        return x.new_empty(features, x.size(0)).t()
    return x.new_empty(*x.shape[:-1], features)


def _check_devices(x: Tensor, *others: Tensor | None, op: str = "linear") -> None:
    """Without this, x on the CPU and weights on meta would be answered by a tensor that nothing has written."""
    for other in others:
        if other is not None and other.device != x.device:
            raise ValueError(f"[{op}] a tensor is on {other.device}, needs {x.device}, where x is")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the core sums products of a dtype: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- What the outputs look like ------------------------------------------------------------------------------------


@torch.library.register_fake("blocksparse::linear", lib=_ops)
def _linear_fake(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, out_features: int, tf32: bool = False
) -> Tensor:
    _check_devices(x, values, index, bias)
    return _empty_like(x, out_features)


@torch.library.register_fake("blocksparse::linear_fprop", lib=_ops)
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
    _check_devices(x, values, index, bias, residual, gates)
    return _empty_like(x, out_features)


@torch.library.register_fake("blocksparse::linear_dgrad", lib=_ops)
def _dgrad_fake(
    dy: Tensor,
    values: Tensor,
    index: Tensor,
    in_features: int,
    transposed: bool = False,
    gates: Tensor | None = None,
    tf32: bool = False,
) -> Tensor:
    _check_devices(dy, values, index, gates)
    return _empty_like(dy, in_features)


def _wgrad_outputs(x: Tensor, blocks: int, block_size: int, wide: bool, gate_gradient: bool) -> tuple[Tensor, Tensor]:
    sums = sum_dtype(x.dtype)
    dw = x.new_empty(blocks, block_size, block_size, dtype=sums if wide else x.dtype)
    return dw, x.new_empty(blocks if gate_gradient else 0, dtype=sums)


@torch.library.register_fake("blocksparse::linear_wgrad", lib=_ops)
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
    _check_devices(x, dy, index, values, gates)
    return _wgrad_outputs(x, blocks, block_size, wide, gate_gradient)


@torch.library.register_fake("blocksparse::linear_wgrad_list", lib=_ops)
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
    _check_devices(x[0], *x, *dy, index, values, gates)
    return _wgrad_outputs(x[0], blocks, block_size, wide, gate_gradient)


# ---- Kernels over ctypes -------------------------------------------------------------------------------------------


def _tensor(x: Tensor, op: str = "linear") -> structs.Tensor:
    dtype = DTYPES.get(x.dtype)
    if dtype is None:
        raise ValueError(f"[{op}] a tensor of {x.dtype}, needs one of {', '.join(map(str, DTYPES))}")
    if x.dim() > structs.MAX_RANK:
        raise ValueError(f"[{op}] a tensor of {x.dim()} dimensions, at most {structs.MAX_RANK} are possible")
    return library.tensor(x.data_ptr(), dtype, x.shape, x.stride(), _device(x))


def _device(x: Tensor) -> tuple[int, int]:
    return (library.CUDA, x.get_device()) if x.is_cuda else (library.CPU, 0)


def _pointer(x: Tensor | None, op: str = "linear") -> Any:
    return None if x is None else ctypes.pointer(_tensor(x, op))


def _view(
    index: Tensor, transposed: bool, blocks: int, b: int, out: int, in_: int, op: str = "linear"
) -> structs.LayoutView:
    """The layout as the core takes it. Its tables tell the sizes where they can be read; on a card the tensors do."""
    if index.dtype != torch.int32 or index.dim() != 1 or not index.is_contiguous():
        raise ValueError(
            f"[{op}] index is {index.dtype} {list(index.shape)}, needs the int32 tensor that belongs to the layout"
        )
    if index.is_cuda:
        if transposed:
            out, in_ = in_, out
        view = structs.LayoutView(index.data_ptr(), *_device(index), 0, b, out, in_, blocks)
        library.call("bs_layout_view_on_device", index.numel(), ctypes.byref(view))
    else:
        view = structs.LayoutView()
        library.call("bs_layout_view_from_index", index.data_ptr(), index.numel(), ctypes.byref(view))
    view.transposed = int(transposed)
    return view


def _blocks(values: Tensor) -> tuple[int, int]:
    if values.dim() != 3:
        raise ValueError(f"[linear] values are {list(values.shape)}, needs [blocks, b, b]")
    return values.size(0), values.size(1)


def _workspace(which: str, view: structs.LayoutView, x: Tensor, n: int) -> tuple[structs.Workspace, Tensor]:
    size = library.ask(f"bs_linear_{which}_workspace_size", ctypes.byref(view), DTYPES.get(x.dtype, -1), n)
    memory = x.new_empty(size, dtype=torch.uint8)
    return structs.Workspace(memory.data_ptr(), size), memory


def _tokens(x: Tensor) -> int:
    return math.prod(x.shape[:-1]) if x.dim() else 0


def _width(x: Tensor) -> int:
    return x.size(-1) if x.dim() else 0


def _stream(x: Tensor, tf32: bool = False) -> structs.Stream:
    if x.is_cuda:
        return structs.Stream(torch.cuda.current_stream(x.device).cuda_stream, 0, tf32)
    return structs.Stream(None, torch.get_num_threads(), tf32)


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
    y, view = _empty_like(x, out_features), _view(index, transposed, *_blocks(values), out_features, _width(x))
    workspace, _memory = _workspace("fprop", view, x, _tokens(x))
    epilogue = structs.Epilogue(_pointer(bias), _pointer(residual), activation)
    arguments = (_pointer(x), _pointer(values), _pointer(gates), ctypes.byref(epilogue), _pointer(y))
    library.call("bs_linear_fprop", ctypes.byref(view), *arguments, workspace, _stream(x, tf32))
    return y


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
    dx, view = _empty_like(dy, in_features), _view(index, transposed, *_blocks(values), _width(dy), in_features)
    workspace, _memory = _workspace("dgrad", view, dy, _tokens(dy))
    arguments = (_pointer(dy), _pointer(values), _pointer(gates), _pointer(dx))
    library.call("bs_linear_dgrad", ctypes.byref(view), *arguments, workspace, _stream(dy, tf32))
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
    view = _view(index, transposed, blocks, block_size, _width(dy[0]), _width(x[0]))
    workspace, _memory = _workspace("wgrad", view, x[0], sum(map(_tokens, x)))
    pairs = ((structs.Tensor * len(x))(*map(_tensor, x)), (structs.Tensor * len(dy))(*map(_tensor, dy)))
    gradients = (_pointer(dw), _pointer(dgates) if gate_gradient else None)
    arguments = (len(x), *pairs, _pointer(values), _pointer(gates), 0, *gradients)
    library.call("bs_linear_wgrad", ctypes.byref(view), *arguments, workspace, _stream(x[0], tf32))
    return dw, dgates


def _wgrad(x: Tensor, dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _wgrad_list([x], [dy], *arguments)


def register(family: str, kernels: dict[str, Callable[..., Any]]) -> tuple[str, str]:
    """Gives the ops of a family kernels for the CPU and for CUDA; what they are. Those given stand in for C++ ones."""

    def for_device(key: str, device: int) -> str:
        asked = os.environ.get("BLOCKSPARSE_TORCH_KERNELS") == "python"
        why_not = "BLOCKSPARSE_TORCH_KERNELS is python" if asked else library.torch_register(family, device)
        if not why_not:
            return "C++"
        for name, kernel in kernels.items():
            _ops.impl(name, kernel, key)
        return f"Python over ctypes ({why_not})"

    def refuse_sparse(*arguments: Any) -> None:
        sparse = (a for a in arguments if isinstance(a, Tensor) and a.layout is not torch.strided)
        raise ValueError(f"[{family}] a tensor is {next(sparse).layout}, needs torch.strided (x.to_dense())")

    for key, name in itertools.product(("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"), kernels):
        _ops.impl(name, refuse_sparse, key)
    return for_device("CPU", library.CPU), for_device("CUDA", library.CUDA)


for _key in ("CPU", "CUDA"):
    _ops.impl("linear_wgrad_list", _wgrad_list, _key)
_python: dict[str, Callable[..., Any]] = {"linear": _linear, "linear_fprop": _fprop, "linear_dgrad": _dgrad}
_python["linear_wgrad"] = _wgrad
KERNELS, CUDA_KERNELS = register("linear", _python)

linear = torch.ops.blocksparse.linear.default
fprop = torch.ops.blocksparse.linear_fprop.default
dgrad = torch.ops.blocksparse.linear_dgrad.default
wgrad = torch.ops.blocksparse.linear_wgrad.default
wgrad_list = torch.ops.blocksparse.linear_wgrad_list.default
