"""`Layout`: which blocks of a weight are non-zero."""

from __future__ import annotations

import ctypes
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._core import library, structs
from ._core.arguments import need, to_features, to_indices, to_int, to_list
from ._core.digits import from_digits
from ._core.interchange import csr_of_scipy, csr_of_torch, dense_weight, read_pattern, write_pattern
from ._core.text import percentage

Int32 = npt.NDArray[np.int32]
_MAKER_ON_DEVICE = "blocksparse.torch.device_layout:from_device_mask"  # found when it is asked for


class Layout:
    """Which `block_size` x `block_size` blocks of a weight [out_features, in_features] are non-zero.

    Immutable, hashable, picklable and safe to share between threads. Blocks are numbered in the order of (out block, in
    block), so weights `values[blocks, b, b]` in that order are the data of a BSR matrix. Feature counts need not be
    multiples of the block size: the last block of a row or column then sticks out, and its values there are ignored.

    Make one with `from_mask`, `from_coordinates`, `from_csr`, `from_scipy`, `from_torch`, `from_graph`, `load`, or a
    generator of `blocksparse.graphs`.
    """

    # Two kinds of layouts answer to this: `HostLayout` below, and the `DeviceLayout` of blocksparse.torch, whose tables
    # lie on a card alone. Each has its own host, view, index_memory and t; all else is here and asks these. This is no
    # abc.ABC, with which isinstance takes 0.24 us in place of 0.05: every call of an op asks it.

    __slots__ = ("__weakref__", "_block_size", "_blocks", "_grid", "sizes", "tables", "transposed")

    _block_size: int
    _blocks: int
    _grid: tuple[int, int]
    sizes: tuple[int, int]  # (out_features, in_features)
    transposed: bool  # whether this is a transposed view: values[i] is then block i of the matrix that `t()` describes
    tables: dict[Any, Any]  # what front ends derive from the layout, by device

    def __init__(
        self,
        block_size: int,
        blocks: int,
        grid: tuple[int, int],
        sizes: tuple[int, int],
        transposed: bool,
        tables: dict[Any, Any],
    ) -> None:
        """What kinds of layouts share; use the from_* methods instead."""
        put = object.__setattr__  # which `__setattr__` below does not stop
        put(self, "_block_size", block_size)
        put(self, "_blocks", blocks)
        put(self, "_grid", grid)
        put(self, "sizes", sizes)
        put(self, "transposed", transposed)
        put(self, "tables", tables)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"[layout] {name} cannot be set: a layout is immutable")

    # ---- What each kind does its own way ----------------------------------------------------------------------------

    def host(self) -> HostLayout:
        """The same layout with tables on the host: itself, if that is where it has them."""
        raise NotImplementedError

    def view(self) -> structs.LayoutView:
        """What the C library's ops take."""
        raise NotImplementedError

    def index_memory(self) -> Int32:
        """`index` without the guard against writing, for frameworks that cannot take read-only arrays. Do not write."""
        raise NotImplementedError

    def index_for_card(self) -> Int32:
        """A copy of `index` as it is best copied to a CUDA card: with an order of rows that kernels there like."""
        raise NotImplementedError

    def t(self) -> Layout:
        """The transposed weight over the same tables and the same values: nothing is copied."""
        raise NotImplementedError

    # ---- Making one -------------------------------------------------------------------------------------------------

    @staticmethod
    def _make(name: str, block_size: int, out_features: int | None, in_features: int | None, *arguments: Any) -> Layout:
        blocking = structs.Blocking(
            to_int("block_size", block_size, bits=31),
            0 if out_features is None else to_features("out_features", out_features),
            0 if in_features is None else to_features("in_features", in_features),
        )
        handle = ctypes.c_void_p()
        library.call(name, *arguments, ctypes.byref(blocking), ctypes.byref(handle))
        return HostLayout(handle)

    @classmethod
    def from_mask(
        cls, mask: npt.ArrayLike, block_size: int, *, out_features: int | None = None, in_features: int | None = None
    ) -> Layout:
        """From a mask [out_blocks, in_blocks] of zeros and ones (or booleans).

        Raises:
            ValueError: the mask is not 2-D, an entry is neither 0 nor 1, or the sizes do not fit.
        """
        array = np.asarray(mask)
        if array.ndim != 2:
            raise ValueError(f"[layout] mask has shape {array.shape}, needs [out_blocks, in_blocks]")
        bits = np.ascontiguousarray(array != 0).view(np.uint8)
        if (wrong := np.argwhere(array != bits)).size:
            row, column = wrong[0]
            raise ValueError(f"[layout] mask[{row}, {column}] is {array[row, column]}, needs 0 or 1")
        return cls._make("bs_layout_from_mask", block_size, out_features, in_features, bits.ctypes.data, *array.shape)

    @staticmethod
    def from_device_mask(
        mask: Any,
        block_size: int,
        blocks: int | None = None,
        *,
        out_features: int | None = None,
        in_features: int | None = None,
    ) -> Layout:
        """From a PyTorch mask [out_blocks, in_blocks] on a CUDA device, whose tables the card makes itself.

        For patterns that change while a network is trained: with `blocks` given (a mask of the k best blocks has k),
        nothing waits for the card, and all of it may be captured in a CUDA graph, whose replays then follow the mask.

        Args:
            mask: booleans, or numbers of which those that are not 0 count.
            block_size: edge b of a block, in features.
            blocks: how many blocks the mask holds. None: they are counted, for which the host waits once. A mask that
                holds another number leaves a layout without blocks; its `check()` raises ValueError then.
            out_features: rows of the weight. None: whole blocks.
            in_features: columns of the weight. None: whole blocks.

        Raises:
            ValueError: the mask is not on a CUDA device, or the sizes do not fit.
            RuntimeError: the kernels are not on the device yet, and a CUDA graph is being captured.
        """
        make: Callable[..., Layout] = pkgutil.resolve_name(_MAKER_ON_DEVICE)
        return make(mask, block_size, blocks, out_features, in_features)

    @classmethod
    def from_coordinates(
        cls,
        out: npt.ArrayLike,
        in_: npt.ArrayLike,
        grid: tuple[int, int],
        block_size: int,
        *,
        out_features: int | None = None,
        in_features: int | None = None,
    ) -> Layout:
        """From the coordinates of blocks, in any order, in a grid of (out_blocks, in_blocks).

        Raises:
            ValueError: a coordinate is outside of the grid or there twice, or the sizes do not fit.
        """
        rows, columns = to_indices("out", out, np.int32), to_indices("in_", in_, np.int32)
        if rows.shape != columns.shape:
            raise ValueError(f"[layout] {rows.size} out and {columns.size} in coordinates, needs as many of each")
        sides = to_list("layout", "grid", grid, "(out_blocks, in_blocks)")
        if len(sides) != 2:
            raise ValueError(f"[layout] grid has {len(sides)} sides, needs (out_blocks, in_blocks)")
        out_blocks, in_blocks = (to_int("grid", side) for side in sides)
        arguments = (rows.ctypes.data, columns.ctypes.data, rows.size, out_blocks, in_blocks)
        return cls._make("bs_layout_from_coordinates", block_size, out_features, in_features, *arguments)

    @classmethod
    def from_csr(
        cls,
        crow: npt.ArrayLike,
        col: npt.ArrayLike,
        in_blocks: int,
        block_size: int,
        *,
        out_features: int | None = None,
        in_features: int | None = None,
    ) -> Layout:
        """From the index arrays of a BSR matrix: crow [out_blocks + 1], col [blocks] rising within each row.

        Raises:
            ValueError: the arrays are no such index, or the sizes do not fit.
        """
        starts, columns = to_indices("crow", crow, np.int64), to_indices("col", col, np.int64)
        if starts.size == 0 or starts[-1] != columns.size:
            end = "nothing" if starts.size == 0 else int(starts[-1])
            raise ValueError(f"[layout] crow ends with {end}, needs {columns.size}, the number of columns")
        arguments = (starts.ctypes.data, columns.ctypes.data, starts.size - 1, to_int("in_blocks", in_blocks))
        return cls._make("bs_layout_from_csr", block_size, out_features, in_features, *arguments)

    @classmethod
    def from_scipy(cls, matrix: Any) -> Layout:
        """From a SciPy BSR array or matrix with square blocks and sorted indices; `matrix.data` is then `values`.

        Raises:
            ValueError: the blocks are not square, or the indices are not sorted (call `sort_indices()` first).
            TypeError: it is no BSR array or matrix.
        """
        return cls.from_csr(*csr_of_scipy(matrix))

    @classmethod
    def from_torch(cls, tensor: Any) -> Layout:
        """From a 2-D `torch.sparse_bsr` tensor with square blocks. `tensor.values()` is then `values`.

        Raises:
            ValueError: it has more dimensions, or its blocks are not square.
            TypeError: it is no such tensor.
        """
        return cls.from_csr(*csr_of_torch(tensor))

    @classmethod
    def from_graph(
        cls,
        name: str,
        block_size: int,
        *,
        seed: int = 0,
        out_features: int | None = None,
        in_features: int | None = None,
    ) -> Layout:
        """From a graph by its one-line name, such as "ba(384,8)": see `blocksparse.graphs`.

        Raises:
            ValueError: there is no such graph, or its arguments are impossible.
        """
        need("graph", "name", name, str, 'a str such as "ba(384,8)"')
        if "\0" in name:
            raise ValueError(f"[graph] {name!r} is no name")
        arguments = (name.encode(), to_int("seed", seed))
        return cls._make("bs_layout_from_graph", block_size, out_features, in_features, *arguments)

    @staticmethod
    def from_pattern(pattern: npt.ArrayLike) -> Layout:
        """From what `pattern()` returned, or the entry `pattern` of a state dict: these are its digits, as floats.

        Raises:
            ValueError: the data is no pattern, or was altered.
        """
        given = np.asarray(pattern)
        words = from_digits(given) if given.dtype.kind == "f" else to_indices("pattern", given, np.int32)
        handle = ctypes.c_void_p()
        library.call("bs_layout_from_pattern", words.ctypes.data, words.size, ctypes.byref(handle))
        return HostLayout(handle)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Layout:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: the file is no such file, is truncated, or was altered.
            OSError: it cannot be read.
        """
        try:
            return cls.from_pattern(read_pattern(Path(path)))
        except (ValueError, MemoryError) as error:
            raise ValueError(f"[layout] {path} is no saved layout: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the layout to a .npz file: all of it is there, or, if writing fails, what was there before."""
        write_pattern(Path(path), self.pattern())

    # ---- What it is -------------------------------------------------------------------------------------------------

    @property
    def pointer(self) -> ctypes.c_void_p:
        """The `bs_layout*` of the C library, good as long as `host()`."""
        return self.host().pointer

    @property
    def block_size(self) -> int:
        """Edge b of a block, in features."""
        return self._block_size

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.sizes[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.sizes[1]

    @property
    def grid(self) -> tuple[int, int]:
        """(out_blocks, in_blocks)."""
        return self._grid

    @property
    def blocks(self) -> int:
        """How many blocks are non-zero."""
        return self._blocks

    @property
    def density(self) -> float:
        """Non-zero blocks / all blocks."""
        return self.blocks / max(self.grid[0] * self.grid[1], 1)

    @property
    def values_shape(self) -> tuple[int, int, int]:
        """Shape of the weights: (blocks, b, b)."""
        return self.blocks, self.block_size, self.block_size

    def stack(self, times: int) -> Layout:
        """`times` copies of W, one below the other, with values [times * blocks, b, b]: the gates of an LSTM, say.

        Raises:
            ValueError: times is less than 1, the layout is a transposed view, or its last block of outputs sticks out.
        """
        handle = ctypes.c_void_p()
        library.call("bs_layout_stack", self.pointer, to_int("times", times), ctypes.byref(handle))
        return HostLayout(handle)

    def csr(self) -> tuple[Int32, Int32]:
        """(crow [out_blocks + 1], col [blocks]): of the matrix whose blocks are numbered, so of `t()` in a view."""
        rows = self.grid[1] if self.transposed else self.grid[0]
        crow, col = np.empty(rows + 1, np.int32), np.empty(self.blocks, np.int32)
        library.call("bs_layout_csr", self.pointer, crow.ctypes.data, col.ctypes.data)
        return crow, col

    def coordinates(self) -> tuple[Int32, Int32]:
        """(out [blocks], in [blocks]) of block 0, 1, 2, ..."""
        crow, col = self.csr()
        row = np.repeat(np.arange(crow.size - 1, dtype=np.int32), np.diff(crow))
        return (col, row) if self.transposed else (row, col)

    def mask(self) -> npt.NDArray[np.bool_]:
        """[out_blocks, in_blocks], true where there is a block."""
        mask = np.zeros(self.grid, np.bool_)
        mask[self.coordinates()] = True
        return mask

    def pattern(self) -> Int32:
        """The smallest integer form, for files and state dicts."""
        return self.host().pattern()

    def index(self) -> Int32:
        """All tables that kernels read, as one array that shares the layout's memory (read only)."""
        array = self.index_memory()
        array.flags.writeable = False
        return array

    def to_dense(self, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """The weight [out_features, in_features] as a dense array, from values [blocks, b, b]."""
        return dense_weight(self, np.asarray(values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        one, another, equal = self.host(), other.host(), ctypes.c_int32()
        library.call("bs_layout_equal", one.pointer, another.pointer, ctypes.byref(equal))
        return bool(equal.value)

    def __hash__(self) -> int:
        return hash(self.host())

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.from_pattern, (self.pattern(),)

    def __repr__(self) -> str:
        out_blocks, in_blocks = self.grid
        size = f"{self.out_features} x {self.in_features} in {out_blocks} x {in_blocks} blocks of {self.block_size}"
        count = f"{self.blocks} of {out_blocks * in_blocks} ({percentage(self.density)})"
        return f"Layout({size}: {count}{', transposed' if self.transposed else ''})"


class HostLayout(Layout):
    """A layout whose tables lie in the memory of the host, made and owned by the C library."""

    __slots__ = ("_handle", "_info")

    _handle: library.LayoutHandle
    _info: structs.LayoutInfo

    def __init__(self, pointer: ctypes.c_void_p, tables: dict[Any, Any] | None = None) -> None:
        """Takes over a layout of the C library; use the from_* methods instead."""
        info = structs.LayoutInfo()
        library.call("bs_layout_get_info", pointer, ctypes.byref(info))
        own = {} if tables is None else tables
        grid, sizes = (info.out_blocks, info.in_blocks), (info.out_features, info.in_features)
        super().__init__(info.block_size, info.blocks, grid, sizes, bool(info.transposed), own)
        object.__setattr__(self, "_handle", library.LayoutHandle(pointer))
        object.__setattr__(self, "_info", info)

    @property
    def pointer(self) -> ctypes.c_void_p:
        """See `Layout`."""
        return self._handle.pointer

    def host(self) -> HostLayout:
        """See `Layout`."""
        return self

    def view(self) -> structs.LayoutView:
        """See `Layout`."""
        view = structs.LayoutView()
        library.call("bs_layout_get_view", self.pointer, ctypes.byref(view))
        return view

    def index_memory(self) -> Int32:
        """See `Layout`."""
        memory = (ctypes.c_int32 * self._info.index_words).from_address(self.view().index)
        memory.owner = self._handle  # keeps the tables alive as long as the array
        return np.frombuffer(memory, np.int32)

    def index_for_card(self) -> Int32:
        """See `Layout`."""
        words = np.empty(self._info.index_words, np.int32)
        library.call("bs_layout_index_for_card", self.pointer, words.ctypes.data)
        return words

    def pattern(self) -> Int32:
        """See `Layout`."""
        words = np.empty(self._info.pattern_words, np.int32)
        library.call("bs_layout_pattern", self.pointer, words.ctypes.data)
        return words

    def t(self) -> HostLayout:
        """See `Layout`."""
        handle = ctypes.c_void_p()
        library.call("bs_layout_t", self.pointer, ctypes.byref(handle))
        return HostLayout(handle, self.tables)

    def __hash__(self) -> int:
        return int(self._info.hash)


def need_layout(op: str, layout: object) -> Layout:
    """The layout; raises TypeError if it is none."""
    if not isinstance(layout, Layout):
        raise TypeError(f"[{op}] layout is a {type(layout).__name__}, needs a blocksparse.Layout")
    return layout
