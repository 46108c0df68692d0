"""`DeviceLayout`: a layout whose tables a CUDA card has made itself, so that a pattern can change while training."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .._core import library, structs
from .._core.arguments import need
from ..layout import HostLayout, Int32, Layout
from .tables import load_kernels


class DeviceLayout(Layout):
    """A layout that lies on a CUDA device alone: see `Layout.from_device_mask`.

    The functional ops take it like any other. Whatever else a layout can tell (`mask`, `csr`, `==`, `hash`, `save`)
    waits for the card, copies the tables to the host, and raises ValueError if the mask did not hold as many blocks as
    it was said to: `check` does only that. The copy is kept, unless replays of a CUDA graph make the tables anew.
    """

    __slots__ = ("_host", "_remade", "_words")

    _host: HostLayout | None
    _remade: bool  # by each replay of the graph that it was captured in
    _words: Tensor

    def __init__(
        self,
        words: Tensor,
        block_size: int,
        blocks: int,
        grid: tuple[int, int],
        sizes: tuple[int, int],
        transposed: bool,
        remade: bool,
        tables: dict[Any, Any] | None = None,
    ) -> None:
        """Takes over tables; use `Layout.from_device_mask` instead."""
        own = {words.device: words} if tables is None else tables
        super().__init__(block_size, blocks, grid, sizes, transposed, own)
        object.__setattr__(self, "_words", words)
        object.__setattr__(self, "_host", None)
        object.__setattr__(self, "_remade", remade)

    def host(self) -> HostLayout:
        """The same layout with tables on the host.

        Raises:
            ValueError: the mask held another number of blocks.
            RuntimeError: a CUDA graph is being captured.
        """
        if self._host is not None and not self._remade:
            return self._host
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("[layout] the tables lie on the card, and cannot be read while a graph is captured")
        torch.cuda.synchronize(self._words.device)  # whatever stream made them
        words = self._words.cpu().numpy()
        handle = ctypes.c_void_p()
        library.call("bs_layout_from_device_index", words.ctypes.data, words.size, ctypes.byref(handle))
        layout = HostLayout(handle)
        layout = layout.t() if self.transposed else layout
        object.__setattr__(self, "_host", layout)
        return layout

    def check(self) -> DeviceLayout:
        """Waits for the card, and raises ValueError if the mask held another number of blocks."""
        self.host()
        return self

    def index_memory(self) -> Int32:
        """See `Layout.index_memory`.

        Raises:
            RuntimeError: replays of a graph make the tables anew, which a copy elsewhere would not follow.
        """
        return self._settled().index_memory()

    def index_for_card(self) -> Int32:
        """See `Layout.index_for_card`. Raises what `index_memory` does."""
        return self._settled().index_for_card()

    def view(self) -> structs.LayoutView:
        """See `Layout.view`. Raises what `index_memory` does."""
        return self._settled().view()

    def _settled(self) -> HostLayout:
        if self._remade:
            raise RuntimeError(
                f"[layout] this one is made anew by each replay of a CUDA graph, and can be used on "
                f"{self._words.device} alone"
            )
        return self.host()

    def t(self) -> DeviceLayout:
        """The transposed weight over the same tables and the same values: nothing is copied."""
        turned = (self.grid[::-1], self.sizes[::-1], not self.transposed)
        again = (self._remade, self.tables)
        return DeviceLayout(self._words, self.block_size, self.blocks, *turned, *again)


def _features(name: str, given: int | None, blocks: int, b: int) -> int:
    features = blocks * b if given is None else given
    if (features + b - 1) // b != blocks:
        raise ValueError(
            f"[layout] {name} is {features}, {blocks} blocks of {b} need {max(0, (blocks - 1) * b + 1)} to {blocks * b}"
        )
    return features


def from_device_mask(
    mask: Tensor, block_size: int, blocks: int | None, out_features: int | None, in_features: int | None
) -> DeviceLayout:
    """See `Layout.from_device_mask`."""
    need("layout", "mask", mask, Tensor, "a tensor on a CUDA device; Layout.from_mask takes others")
    if not mask.is_cuda:
        raise ValueError(
            f"[layout] mask is on {mask.device}, needs a tensor on a CUDA device; Layout.from_mask takes others"
        )
    if mask.dim() != 2:
        raise ValueError(f"[layout] mask has shape {tuple(mask.shape)}, needs [out_blocks, in_blocks]")
    if block_size not in (8, 16, 32, 64, 128):
        raise ValueError(f"[layout] block_size is {block_size}, needs 8, 16, 32, 64 or 128")
    rows, columns = mask.shape
    out, in_ = (
        _features("out_features", out_features, rows, block_size),
        _features("in_features", in_features, columns, block_size),
    )
    capturing = torch.cuda.is_current_stream_capturing()
    if blocks is None:
        if capturing:
            raise ValueError("[layout] blocks is not given, and cannot be counted while a graph is captured")
        blocks = int(torch.count_nonzero(mask))
    device = mask.device
    load_kernels(device)
    mask = (mask if mask.dtype in (torch.bool, torch.uint8) else mask != 0).contiguous()
    view = structs.LayoutView(None, library.CUDA, device.index, 0, block_size, out, in_, blocks)
    words = ctypes.c_int64()
    library.call("bs_layout_build_words", ctypes.byref(view), ctypes.byref(words))
    size = library.ask("bs_layout_build_workspace_size", ctypes.byref(view))
    with torch.inference_mode(False):  # tensors made in that mode are of no use for training later
        index = torch.empty(words.value, dtype=torch.int32, device=device)
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    library.call(
        "bs_layout_build",
        mask.data_ptr(),
        ctypes.byref(view),
        index.data_ptr(),
        words.value,
        structs.Workspace(memory.data_ptr(), size),
        structs.Stream(torch.cuda.current_stream(device).cuda_stream, 0),
    )
    sizes = view.out_features, view.in_features
    return DeviceLayout(index, view.block_size, view.blocks, (rows, columns), sizes, False, remade=capturing)
