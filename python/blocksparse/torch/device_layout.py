"""`DeviceLayout`: a layout whose tables a CUDA card has made itself, so that a pattern can change while training."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .._core import library, structs
from .._core.arguments import need
from ..layout import HostLayout, Int32, Layout
from .place_tables import tables_to_change, write_tables
from .tables import load_kernels

FEW_PLACES = 1 << 22  # of a grid that the kernel reads a mask of


class DeviceLayout(Layout):
    """A layout that lies on a CUDA device alone: see `Layout.from_device_mask`.

    The functional ops take it like any other. Whatever else a layout can tell (`mask`, `csr`, `==`, `hash`, `save`)
    waits for the card, copies the tables to the host, and raises ValueError if the mask did not hold as many blocks as
    it was said to: `check` does only that. The copy is kept, unless the tables are made anew: by replays of a CUDA
    graph, or by `remake`.
    """

    __slots__ = ("_host", "_remade", "_words")

    _host: HostLayout | None
    _remade: bool  # by each replay of the graph that it was captured in, or by `remake`
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
                f"[layout] this one is made anew by each replay of a CUDA graph or by remake(), and can be used on "
                f"{self._words.device} alone"
            )
        return self.host()

    def remake(self, mask: Tensor) -> None:
        """Makes the tables anew in place, from another mask of as many blocks, without waiting for the card.

        Whatever holds the tables follows: layers, captured graphs, views by `t()`. Only for layouts of
        `changing_layout`; a mask that holds another number of blocks leaves none, as `check` says.

        Args:
            mask: bool or uint8, of the shape of the grid of the matrix whose blocks are numbered.

        Raises:
            ValueError: the layout was not made to change, or the mask has another shape, dtype or device.
        """
        grid = self.grid[::-1] if self.transposed else self.grid
        if not self._remade:
            raise ValueError("[layout] remake() is for layouts that changing_layout() has made")
        if tuple(mask.shape) != grid or mask.device != self._words.device:
            raise ValueError(
                f"[layout] mask is {list(mask.shape)} on {mask.device}, needs {list(grid)} on {self._words.device}"
            )
        if mask.dtype not in (torch.bool, torch.uint8):
            raise ValueError(f"[layout] mask is {mask.dtype}, needs torch.bool")
        out, in_ = self.sizes[::-1] if self.transposed else self.sizes
        _build(mask.contiguous(), self._words, (self.block_size, out, in_, self.blocks))
        torch.autograd.graph.increment_version(self._words)  # a backward pass of the former tables says so

    def remake_at(self, places: Tensor) -> None:
        """`remake` from the places of the blocks: int64, row * columns + column, rising, as many as there are blocks.

        Memory is in proportion to the blocks where the grid has many places: see `place_tables`.
        """
        grid = self.grid[::-1] if self.transposed else self.grid
        if grid[0] * grid[1] <= FEW_PLACES:
            mask = torch.zeros(grid[0] * grid[1], dtype=torch.bool, device=places.device)
            self.remake(mask.index_fill_(0, places, True).view(grid))
            return
        write_tables(self._words, places, grid)
        torch.autograd.graph.increment_version(self._words)

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
    index = _build(mask, None, (block_size, out, in_, blocks))
    return DeviceLayout(index, block_size, blocks, (rows, columns), (out, in_), False, remade=capturing)


def changing_layout(layout: Layout, device: torch.device) -> DeviceLayout:
    """The same layout with tables on a CUDA device that `DeviceLayout.remake` may make anew.

    Its numbers of blocks and features stay.
    """
    load_kernels(device)
    host = (layout.t() if layout.transposed else layout).host()
    index = tables_to_change(host, device)
    made = DeviceLayout(index, layout.block_size, layout.blocks, host.grid, host.sizes, False, remade=True)
    return made.t() if layout.transposed else made


def _build(mask: Tensor, index: Tensor | None, sizes: tuple[int, int, int, int]) -> Tensor:
    """Makes the tables of (block size, out features, in features, blocks), in given memory or in new one."""
    device = mask.device
    view = structs.LayoutView(None, library.CUDA, device.index, 0, *sizes)
    words = ctypes.c_int64()
    library.call("bs_layout_build_words", ctypes.byref(view), ctypes.byref(words))
    size = library.ask("bs_layout_build_workspace_size", ctypes.byref(view))
    if index is None:
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
    return index
