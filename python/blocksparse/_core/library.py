"""The shared library, through ctypes: its functions, and its errors as Python exceptions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .structs import (
    MAX_RANK,
    Blocking,
    ConvGeometry,
    DeepUpdateGrads,
    DeepUpdateInputs,
    Dims,
    Epilogue,
    LayerNormGrads,
    LayerNormInputs,
    LayerNormSaved,
    LayoutInfo,
    LayoutView,
    LstmGrads,
    LstmOutputs,
    LstmSaved,
    MultiplicativeGrads,
    MultiplicativeInputs,
    Report,
    Stream,
    Tensor,
    Workspace,
)

ABI_VERSION = 11
CPU, CUDA = 0, 1
DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3, "gelu_tanh": 4}


class UnavailableError(RuntimeError):
    """This build or this machine lacks what was asked for: CUDA, or an instruction set."""


class UnsupportedError(RuntimeError):
    """Right in principle, but no kernel answers it."""


_EXCEPTIONS: dict[int, type[Exception]] = {1: ValueError, 2: UnsupportedError, 3: UnavailableError, 4: MemoryError}


def library_path() -> Path:
    """The shared library: BLOCKSPARSE_LIBRARY if set, else the one that was installed with this package."""
    if path := os.environ.get("BLOCKSPARSE_LIBRARY"):
        return Path(path)
    return Path(__file__).parent.parent / "lib" / "libblocksparse.so"


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
    "bs_cuda_leave_multiprocessors": (_i32, [_i32]),
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
    "bs_layout_index_for_card": (_i32, [_void_p, _void_p]),
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
    "bs_bias_gradient": (_i32, [_ptr(Tensor), _ptr(Tensor), Workspace, Stream]),
    "bs_bias_gradient_workspace_size": (_size_t, [_ptr(Tensor)]),
    "bs_linear_glu_fprop": (
        _i32,
        [_ptr(LayoutView), _ptr(Tensor), _ptr(Tensor), _ptr(Tensor), _ptr(Epilogue), _ptr(Tensor), Workspace, Stream],
    ),
    "bs_linear_glu_fprop_workspace_size": (_size_t, [_ptr(LayoutView), _i32, _i64]),
    "bs_glu_forward": (_i32, [_ptr(Tensor), _i32, _ptr(Tensor), Stream]),
    "bs_glu_backward": (_i32, [_ptr(Tensor), _ptr(Tensor), _i32, _ptr(Tensor), Stream]),
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
    "bs_conv_fprop_workspace_size": (_size_t, [_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor), _void_p]),
    "bs_conv_dgrad_workspace_size": (_size_t, [_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor), _void_p]),
    "bs_conv_wgrad_workspace_size": (_size_t, [_ptr(LayoutView), _ptr(ConvGeometry), _ptr(Tensor), _void_p]),
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
    "bs_xla_versions": (None, [_void_p, _void_p]),
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


class LayoutHandle:
    """Owns a layout of the C library. Arrays over its tables hold on to this, not to the Layout."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: ctypes.c_void_p) -> None:
        self.pointer = pointer

    def __del__(self, free: Any = _library.bs_layout_free) -> None:  # bound here, for the interpreter's end
        free(self.pointer)


def tensor(
    pointer: int, dtype: int, shape: Sequence[int], stride: Sequence[int], device: tuple[int, int] = (CPU, 0)
) -> Tensor:
    """A bs_tensor; shape and stride are in elements."""
    if len(shape) > MAX_RANK:
        raise ValueError(f"a tensor of {len(shape)} dimensions, at most {MAX_RANK} are possible")
    return Tensor(pointer, dtype, device[0], device[1], len(shape), Dims(*shape), Dims(*stride))


def function(name: str) -> Any:
    """A C function itself, for frameworks that call it."""
    return getattr(_library, name)


def xla_versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """The newest version of XLA's interface for custom calls that the handlers speak, and the runtime's."""
    ours, theirs = (ctypes.c_int32 * 2)(), (ctypes.c_int32 * 2)()
    _library.bs_xla_versions(ours, theirs)
    return (ours[0], ours[1]), (theirs[0], theirs[1])


def torch_register(family: str, device: int) -> str:
    """Gives one of PyTorch's families of ops, "linear" say, C++ kernels for CPU or CUDA: "" or why there are none."""
    reason: bytes = ask("bs_torch_register", family.encode(), device)
    return reason.decode()
