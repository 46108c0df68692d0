"""Tables of layouts on PyTorch's devices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree

from .._core import library
from ..layout import HostLayout, Layout, need_layout

_pytree.register_constant(HostLayout)  # torch.compile may hold one: torch 2.11 asks for that, 2.13 does not
_loaded: set[int] = set()  # CUDA devices that hold all kernels


def index_of(layout: Layout, device: torch.device | str = "cpu") -> Tensor:
    """The layout's tables as an int32 tensor on a device, made once for each device.

    The layout keeps it, and PyTorch's allocator knows only of the stream that it was made on: keep a layout until all
    other streams that use it are done.

    Raises:
        RuntimeError: they are not there yet, and a CUDA graph is being captured.
    """
    return _index_in_tuple(layout, device)[0]


# While torch.compile traces, the result is a constant. A tuple: constant tensors are told apart by the name of their
# function, so that a program with two layouts failed (PyTorch 2.13, "already in seen_sources").
@torch.compiler.assume_constant_result
def _index_in_tuple(layout: Layout, device: torch.device | str) -> tuple[Tensor]:
    try:
        tables = layout.tables.get(device)
    except AttributeError:
        need_layout("linear", layout)
        raise
    return (_make_index(layout, torch.device(device)) if tables is None else tables,)


def load_kernels(device: torch.device) -> None:
    """Loads all kernels on a CUDA device, unless they are there.

    Raises:
        RuntimeError: they are not, and a CUDA graph is being captured.
    """
    if device.index in _loaded:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"[layout] the kernels are not on {device} yet, and cannot be loaded while a graph is captured: make a "
            "layout there, or call a layer, once before"
        )
    library.call("bs_cuda_prepare", device.index)
    _loaded.add(device.index)


def _make_index(layout: Layout, device: torch.device) -> Tensor:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    tables = layout.tables.get(device)
    if tables is None:
        tables = _move_tables(layout, device)
        if type(tables) is Tensor:  # not a fake one, say
            layout.tables[device] = tables
    return tables


def _move_tables(layout: Layout, device: torch.device) -> Tensor:
    # Neither of inference mode, of no use for training later, nor of a level of torch.func, which ends.
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        words = torch.from_numpy(layout.index_for_card() if device.type == "cuda" else layout.index_memory())
    if device.type == "meta":
        return torch.empty_like(words, device=device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"[linear] the layout's tables are not on {device} yet, and cannot be copied while a graph is "
                "captured: call blocksparse.torch.index_of(layout, device), or the layer, once before"
            )
        load_kernels(device)
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        return words.to(device)
