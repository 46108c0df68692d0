"""What calls of the core take, made of tensors, and what the ops of all families ask of tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..._core import library, structs
from ..arguments import DTYPES, need_strided


def features_first(x: Tensor) -> bool:
    """Whether the tokens of x [n, features] are contiguous rather than its features."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and x.size(0) > 1


def usable(x: Tensor) -> Tensor:
    """x itself if the core takes its memory layout, else a contiguous copy."""
    if x.is_contiguous():
        return x
    need_strided("linear", x=x)
    return x if features_first(x) and x.stride(1) >= x.size(0) else x.contiguous()


def contiguous_or_none(tensor: Tensor | None) -> Tensor | None:
    """It, or a contiguous copy, of what need not be given."""
    return None if tensor is None else tensor.contiguous()


def check_devices(x: Tensor, *others: Tensor | None, op: str = "linear") -> None:
    """Without this, x on the CPU and weights on meta would be answered by a tensor that nothing has written."""
    for other in others:
        if other is not None and other.device != x.device:
            raise ValueError(f"[{op}] a tensor is on {other.device}, needs {x.device}, where x is")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the core sums products of a dtype: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- Arguments of the C interface ----------------------------------------------------------------------------------


def tensor_of(x: Tensor, op: str = "linear") -> structs.Tensor:
    """A bs_tensor.

    Raises:
        ValueError: its dtype or rank is none that the core takes.
    """
    dtype = DTYPES.get(x.dtype)
    if dtype is None:
        raise ValueError(f"[{op}] a tensor of {x.dtype}, needs one of {', '.join(map(str, DTYPES))}")
    if x.dim() > structs.MAX_RANK:
        raise ValueError(f"[{op}] a tensor of {x.dim()} dimensions, at most {structs.MAX_RANK} are possible")
    return library.tensor(x.data_ptr(), dtype, x.shape, x.stride(), device_of(x))


def device_of(x: Tensor) -> tuple[int, int]:
    """(device type, device index) of the C interface."""
    return (library.CUDA, x.get_device()) if x.is_cuda else (library.CPU, 0)


def pointer_to(x: Tensor | None, op: str = "linear") -> Any:
    """To a bs_tensor; None stays None."""
    return None if x is None else ctypes.pointer(tensor_of(x, op))


def view_of(
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
        view = structs.LayoutView(index.data_ptr(), *device_of(index), 0, b, out, in_, blocks)
        library.call("bs_layout_view_on_device", index.numel(), ctypes.byref(view))
    else:
        view = structs.LayoutView()
        library.call("bs_layout_view_from_index", index.data_ptr(), index.numel(), ctypes.byref(view))
    view.transposed = int(transposed)
    return view


def blocks_of(values: Tensor) -> tuple[int, int]:
    """(blocks, b) of values [blocks, b, b]."""
    if values.dim() != 3:
        raise ValueError(f"[linear] values are {list(values.shape)}, needs [blocks, b, b]")
    return values.size(0), values.size(1)


def scratch(size: int, like: Tensor) -> tuple[structs.Workspace, Tensor]:
    """So many bytes where a tensor is, as the core takes them, and the memory, to be kept as long as the call."""
    memory = like.new_empty(size, dtype=torch.uint8)
    return structs.Workspace(memory.data_ptr(), size), memory


def stream_of(x: Tensor, tf32: bool = False) -> structs.Stream:
    """PyTorch's current stream where x is, or on the CPU its number of threads."""
    if x.is_cuda:
        return structs.Stream(torch.cuda.current_stream(x.device).cuda_stream, 0, tf32)
    return structs.Stream(None, torch.get_num_threads(), tf32)


def lengths_pointer(lengths: Tensor | None, n: int, op: str = "lstm") -> int | None:
    """Where the lengths of n sequences are.

    Raises:
        ValueError: they are not int64 [n], contiguous.
    """
    if lengths is None:
        return None
    if lengths.dtype != torch.int64 or lengths.shape != (n,) or not lengths.is_contiguous():
        raise ValueError(f"[{op}] lengths are {lengths.dtype} {list(lengths.shape)}, needs int64 [{n}]")
    return lengths.data_ptr()
