"""The shared library, through ctypes: its functions, its structs, and its errors as Python exceptions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ABI_VERSION = 6
MAX_RANK = 5
MAX_MIX = 64
MAX_SIZES = 3

CPU, CUDA = 0, 1
DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}

_Dims = ctypes.c_int64 * MAX_RANK
_Sizes = ctypes.c_int64 * MAX_SIZES


class Blocking(ctypes.Structure):
    """bs_blocking."""

    _fields_ = (("block_size", ctypes.c_int32), ("out_features", ctypes.c_int64), ("in_features", ctypes.c_int64))


class LayoutInfo(ctypes.Structure):
    """bs_layout_info."""

    _fields_ = (
        ("block_size", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_blocks", ctypes.c_int64),
        ("in_blocks", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("pattern_words", ctypes.c_int64),
        ("index_words", ctypes.c_int64),
        ("hash", ctypes.c_uint64),
    )


class LayoutView(ctypes.Structure):
    """bs_layout_view."""

    _fields_ = (
        ("index", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("cut_by_out", ctypes.c_int32),
        ("cut_by_in", ctypes.c_int32),
    )


class Degrees(ctypes.Structure):
    """bs_degrees."""

    _fields_ = (("min", ctypes.c_int64), ("median", ctypes.c_double), ("max", ctypes.c_int64))


class Report(ctypes.Structure):
    """bs_report."""

    _fields_ = (
        ("blocks", ctypes.c_int64),
        ("density", ctypes.c_double),
        ("out", Degrees),
        ("in_", Degrees),
        ("mean_path", ctypes.c_double),
        ("unreachable", ctypes.c_double),
        ("clustering", ctypes.c_double),
        ("diameter", ctypes.c_int64),
        ("symmetric", ctypes.c_int32),
        ("sampled", ctypes.c_int32),
        ("mix_steps", ctypes.c_int32),
        ("mix", ctypes.c_double * MAX_MIX),
    )


class Tensor(ctypes.Structure):
    """bs_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", _Dims),
        ("stride", _Dims),
    )


class Epilogue(ctypes.Structure):
    """bs_epilogue."""

    _fields_ = (
        ("bias", ctypes.POINTER(Tensor)),
        ("residual", ctypes.POINTER(Tensor)),
        ("activation", ctypes.c_int32),
    )


class ConvGeometry(ctypes.Structure):
    """bs_conv_geometry."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
        ("kernel", _Sizes),
        ("stride", _Sizes),
        ("dilation", _Sizes),
        ("padding_before", _Sizes),
        ("padding_after", _Sizes),
        ("output_padding", _Sizes),
    )


class LstmOutputs(ctypes.Structure):
    """bs_lstm_outputs."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("y", "h", "c", "gates", "cells"))


class LstmSaved(ctypes.Structure):
    """bs_lstm_saved."""

    _fields_ = (
        *((name, ctypes.POINTER(Tensor)) for name in ("w", "h0", "c0")),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.POINTER(Tensor)) for name in ("y", "gates", "cells")),
    )


class LstmGrads(ctypes.Structure):
    """bs_lstm_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("pre", "w", "h0", "c0"))


class LayerNormInputs(ctypes.Structure):
    """bs_layer_norm_inputs."""

    _fields_ = (
        *((name, ctypes.POINTER(Tensor)) for name in ("x", "gain", "shift", "factor", "term")),
        ("relu", ctypes.c_int32),
        ("epsilon", ctypes.c_double),
    )


class LayerNormSaved(ctypes.Structure):
    """bs_layer_norm_saved."""

    _fields_ = (
        *((name, ctypes.POINTER(Tensor)) for name in ("x", "gain", "shift", "factor", "y", "stats")),
        ("relu", ctypes.c_int32),
    )


class LayerNormGrads(ctypes.Structure):
    """bs_layer_norm_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("x", "gain", "shift", "factor", "term"))


class DeepUpdateMatrix(ctypes.Structure):
    """bs_deep_update_matrix."""

    _fields_ = (
        ("layout", ctypes.POINTER(LayoutView)),
        *((name, ctypes.POINTER(Tensor)) for name in ("w", "gain", "shift")),
    )


class DeepUpdateInputs(ctypes.Structure):
    """bs_deep_update_inputs."""

    _fields_ = (
        ("matrices", ctypes.POINTER(DeepUpdateMatrix)),
        ("count", ctypes.c_int32),
        *((name, ctypes.POINTER(Tensor)) for name in ("factor", "term", "h0", "c0")),
        ("lengths", ctypes.c_void_p),
        ("epsilon", ctypes.c_double),
    )


class DeepUpdateMatrixGrads(ctypes.Structure):
    """bs_deep_update_matrix_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("w", "gain", "shift"))


class DeepUpdateGrads(ctypes.Structure):
    """bs_deep_update_grads."""

    _fields_ = (
        ("matrices", ctypes.POINTER(DeepUpdateMatrixGrads)),
        *((name, ctypes.POINTER(Tensor)) for name in ("factor", "term", "h0", "c0")),
    )


class MultiplicativeInputs(ctypes.Structure):
    """bs_multiplicative_inputs."""

    _fields_ = (
        *((name, ctypes.POINTER(LayoutView)) for name in ("layout_m", "layout")),
        *((name, ctypes.POINTER(Tensor)) for name in ("w_m", "w", "factor", "pre", "h0", "c0")),
        ("lengths", ctypes.c_void_p),
    )


class MultiplicativeGrads(ctypes.Structure):
    """bs_multiplicative_grads."""

    _fields_ = tuple((name, ctypes.POINTER(Tensor)) for name in ("w_m", "w", "factor", "pre", "h0", "c0"))


class Workspace(ctypes.Structure):
    """bs_workspace."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class Stream(ctypes.Structure):
    """bs_stream."""

    _fields_ = (("handle", ctypes.c_void_p), ("threads", ctypes.c_int32), ("math", ctypes.c_int32))


class UnavailableError(RuntimeError):
    """This build or this machine lacks what was asked for: CUDA, or an instruction set."""


class UnsupportedError(RuntimeError):
    """Right in principle, but no kernel answers it."""


_EXCEPTIONS: dict[int, type[Exception]] = {1: ValueError, 2: UnsupportedError, 3: UnavailableError, 4: MemoryError}


def library_path() -> Path:
    """The shared library: BLOCKSPARSE_LIBRARY if set, else the one that was installed with this package."""
    if path := os.environ.get("BLOCKSPARSE_LIBRARY"):
        return Path(path)
    return Path(__file__).parent / "lib" / "libblocksparse.so"


def _load() -> ctypes.CDLL:
    path = library_path()
    if not path.exists():
        raise ImportError(
            f"{path} is missing: install the package (pip install .), or point BLOCKSPARSE_LIBRARY to a built library"
        )
    library = ctypes.CDLL(str(path))
    if (version := library.bs_abi_version()) != ABI_VERSION:
        raise ImportError(
            f"{path} has ABI version {version}, this package needs {ABI_VERSION}: build both from one tree"
        )
    return library


_library = _load()

_void_p, _i32, _i64, _size_t, _str = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p
_ptr = ctypes.POINTER
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "bs_version": (_str, []),
    "bs_last_error": (_str, []),
    "bs_cpu_isas": (_str, []),
    "bs_cpu_isa": (_i32, [_ptr(_str)]),
    "bs_set_cpu_isa": (_i32, [_str]),
    "bs_cuda_status": (_i32, []),
    "bs_cuda_kernels": (_str, []),
    "bs_set_cuda_kernel": (_i32, [_str]),
    "bs_cuda_prepare": (_i32, [_i32]),
    "bs_default_threads": (_i32, []),
    "bs_layout_from_mask": (_i32, [_void_p, _i64, _i64, _ptr(Blocking), _ptr(_void_p)]),
    "bs_layout_from_coordinates": (_i32, [_void_p, _void_p, _i64, _i64, _i64, _ptr(Blocking), _ptr(_void_p)]),
    "bs_layout_from_csr": (_i32, [_void_p, _void_p, _i64, _i64, _ptr(Blocking), _ptr(_void_p)]),
    "bs_layout_from_graph": (_i32, [_str, _i64, _ptr(Blocking), _ptr(_void_p)]),
    "bs_layout_from_pattern": (_i32, [_void_p, _i64, _ptr(_void_p)]),
    "bs_layout_t": (_i32, [_void_p, _ptr(_void_p)]),
    "bs_layout_stack": (_i32, [_void_p, _i64, _ptr(_void_p)]),
    "bs_layout_free": (None, [_void_p]),
    "bs_layout_get_info": (_i32, [_void_p, _ptr(LayoutInfo)]),
    "bs_layout_get_view": (_i32, [_void_p, _ptr(LayoutView)]),
    "bs_layout_view_from_index": (_i32, [_void_p, _i64, _ptr(LayoutView)]),
    "bs_layout_view_on_device": (_i32, [_i64, _ptr(LayoutView)]),
    "bs_layout_build_words": (_i32, [_ptr(LayoutView), _ptr(_i64)]),
    "bs_layout_build_workspace_size": (_size_t, [_ptr(LayoutView)]),
    "bs_layout_build": (_i32, [_void_p, _ptr(LayoutView), _void_p, _i64, Workspace, Stream]),
    "bs_layout_from_device_index": (_i32, [_void_p, _i64, _ptr(_void_p)]),
    "bs_layout_csr": (_i32, [_void_p, _void_p, _void_p]),
    "bs_layout_pattern": (_i32, [_void_p, _void_p]),
    "bs_layout_equal": (_i32, [_void_p, _void_p, _ptr(_i32)]),
    "bs_layout_report": (_i32, [_void_p, _ptr(Report)]),
    "bs_layout_mix": (_i32, [_ptr(_void_p), _i64, _void_p]),
    "bs_linear_fprop": (
        _i32,
        [_ptr(LayoutView), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), _ptr(Epilogue), _ptr(Tensor), Workspace, Stream],
    ),
    "bs_linear_dgrad": (
        _i32,
        [_ptr(LayoutView), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), Workspace, Stream],
    ),
    "bs_linear_wgrad": (
        _i32,
        [
            *(_ptr(LayoutView), _i64, _void_p, _void_p, _ptr(Tensor), _ptr(Tensor), _i32, _ptr(Tensor), _ptr(Tensor)),
            *(Workspace, Stream),
        ],
    ),
    "bs_linear_fprop_workspace_size": (_size_t, [_ptr(LayoutView), _i32, _i64]),
    "bs_linear_dgrad_workspace_size": (_size_t, [_ptr(LayoutView), _i32, _i64]),
    "bs_linear_wgrad_workspace_size": (_size_t, [_ptr(LayoutView), _i32, _i64]),
    "bs_conv_output_size": (_i32, [_ptr(ConvGeometry), _void_p, _void_p]),
    "bs_conv_fprop": (
        _i32,
        [
            *(_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), _void_p),
            *(_ptr(Epilogue), _ptr(Tensor), Workspace, Stream),
        ],
    ),
    "bs_conv_dgrad": (
        _i32,
        [
            *(_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), _void_p),
            *(_ptr(Tensor), Workspace, Stream),
        ],
    ),
    "bs_conv_wgrad": (
        _i32,
        [
            *(_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), _void_p),
            *(_i32, _ptr(Tensor), _ptr(Tensor), Workspace, Stream),
        ],
    ),
    "bs_conv_fprop_workspace_size": (_size_t, [_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor)]),
    "bs_conv_dgrad_workspace_size": (_size_t, [_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor)]),
    "bs_conv_wgrad_workspace_size": (_size_t, [_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor)]),
    "bs_lstm_forward": (
        _i32,
        [_ptr(LayoutView), *(4 * (_ptr(Tensor),)), _void_p, _ptr(LstmOutputs), Workspace, Stream],
    ),
    "bs_lstm_backward": (
        _i32,
        [_ptr(LayoutView), _ptr(LstmSaved), *(3 * (_ptr(Tensor),)), _i32, _ptr(LstmGrads), Workspace, Stream],
    ),
    "bs_layer_norm_forward": (_i32, [_ptr(LayerNormInputs), _ptr(Tensor), _ptr(Tensor), Stream]),
    "bs_layer_norm_backward": (_i32, [_ptr(LayerNormSaved), _ptr(Tensor), _ptr(LayerNormGrads), Stream]),
    "bs_deep_update_forward": (
        _i32,
        [_ptr(DeepUpdateInputs), *(3 * (_ptr(Tensor),)), Workspace, Workspace, Stream],
    ),
    "bs_deep_update_backward": (
        _i32,
        [
            *(_ptr(DeepUpdateInputs), _ptr(Tensor), Workspace, *(3 * (_ptr(Tensor),))),
            *(_ptr(DeepUpdateGrads), Workspace, Stream),
        ],
    ),
    "bs_deep_update_saved_size": (_size_t, [_ptr(DeepUpdateInputs)]),
    "bs_deep_update_forward_workspace_size": (_size_t, [_ptr(DeepUpdateInputs)]),
    "bs_deep_update_backward_workspace_size": (_size_t, [_ptr(DeepUpdateInputs)]),
    "bs_multiplicative_forward": (
        _i32,
        [_ptr(MultiplicativeInputs), *(3 * (_ptr(Tensor),)), Workspace, Workspace, Stream],
    ),
    "bs_multiplicative_backward": (
        _i32,
        [
            *(_ptr(MultiplicativeInputs), _ptr(Tensor), Workspace, *(3 * (_ptr(Tensor),))),
            *(_ptr(MultiplicativeGrads), Workspace, Stream),
        ],
    ),
    "bs_multiplicative_saved_size": (_size_t, [_ptr(MultiplicativeInputs)]),
    "bs_multiplicative_forward_workspace_size": (_size_t, [_ptr(MultiplicativeInputs)]),
    "bs_multiplicative_backward_workspace_size": (_size_t, [_ptr(MultiplicativeInputs)]),
    "bs_lstm_forward_workspace_size": (_size_t, [_ptr(LayoutView), _i32, _i64, _i64]),
    "bs_lstm_backward_workspace_size": (_size_t, [_ptr(LayoutView), _i32, _i64, _i64]),
    "bs_torch_register": (_str, [_str, _i32]),
}
for _name, (_result, _arguments) in _SIGNATURES.items():
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes = _result, _arguments


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status, and raises what it means if it is not BS_OK.

    Raises:
        ValueError: an argument is wrong; the message says what was given and what is needed.
        UnavailableError, UnsupportedError, MemoryError: see there.
    """
    status = getattr(_library, name)(*arguments)
    if status != 0:
        message = _library.bs_last_error().decode()
        raise _EXCEPTIONS.get(status, RuntimeError)(message)


def ask(name: str, *arguments: Any) -> Any:
    """Calls a function that returns a value rather than a status."""
    return getattr(_library, name)(*arguments)


def tensor(
    pointer: int, dtype: int, shape: Sequence[int], stride: Sequence[int], device: tuple[int, int] = (CPU, 0)
) -> Tensor:
    """A bs_tensor; shape and stride are in elements."""
    if len(shape) > MAX_RANK:
        raise ValueError(f"a tensor of {len(shape)} dimensions, at most {MAX_RANK} are possible")
    return Tensor(pointer, dtype, device[0], device[1], len(shape), _Dims(*shape), _Dims(*stride))


def torch_register(family: str, device: int) -> str:
    """Gives "linear", "conv" or "lstm" of PyTorch's ops C++ kernels for CPU or CUDA: "" or why there are none."""
    reason: bytes = ask("bs_torch_register", family.encode(), device)
    return reason.decode()
