"""The convolutions of the 2017 release, with their names and conventions, on NumPy, PyTorch and TensorFlow. ::

    from blocksparse.conv import BlocksparseConv

    BCK = [(range(0, 32), range(0, 48)), (range(32, 64), range(48, 96))]     # each block: channels of x, channels of y
    conv = BlocksparseConv(BCK, TRS=(3, 3), DHW=(28, 28))
    y = conv(F, x)                     # F of shape conv.f_shape(), x of conv.i_shape(N) -> y of conv.o_shape(N)

Lists of channels may be of any lengths and orders, and may overlap. They are made into one layout of square blocks: the
channels are sorted so that those in the same lists lie together, and blocks are as large as divides them all. Lists of
whole blocks that do not overlap cost what their weights cost; others cost more, by `fill`, the share of the layout's
blocks that is filled. Each call copies the filter into that layout; `blocksparse.torch.BlockSparseConv2d` does not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import numpy as ops
from ._arrays.kinds import NUMPY, TENSORFLOW, kind_of, sizes_of
from ._core.arguments import to_list
from .layout import Layout

_Int = npt.NDArray[np.int64]
_SIZES = 3


class BlocksparseConv:
    """A convolution of x [N, C, D, H, W] whose blocks connect lists of channels.

    Args:
        BCK: for each block, (channels of x, channels of y). Together they name each channel from 0 on.
        TRS: sizes of the filter: (T, R, S), (R, S) or (S,).
        DHW: sizes of the image, as many as of the filter.
        MPQ: sizes of the result; by default what the others give.
        strides: one for each size; leading ones may be left out.
        dilates: as strides.
        padding: "SAME": half of the filter's extent on either side; "VALID": none; or one number for each size.
        debug: accepted, and otherwise unused.
        edge_bias: False: `blocksparse.torch.EdgeBias` is a layer of its own.

    Attributes:
        C: channels of x.
        K: channels of y.
        blocks: how many there are.
        sizeF: numbers in the filter.
        flops: of one image.
        overlapC: whether channels of x are in several blocks.
        overlapK: whether channels of y are.
        fill: the share of the layout's blocks that the given ones fill, 1 for lists of whole blocks without overlap.

    Raises:
        ValueError: an argument is wrong: the message says which, and what is needed.
    """

    _transposed = False

    def __init__(
        self,
        BCK: Iterable[tuple[Iterable[int], Iterable[int]]],
        TRS: Sequence[int],
        DHW: Sequence[int],
        MPQ: Sequence[int] | None = None,
        strides: Sequence[int] = (1, 1, 1),
        dilates: Sequence[int] = (1, 1, 1),
        padding: str | Sequence[int] = "SAME",
        debug: bool = False,
        edge_bias: bool = False,
    ) -> None:
        self._name = type(self).__name__
        if edge_bias:
            raise NotImplementedError(
                f"[{self._name}] edge_bias is no part of it: take blocksparse.torch.EdgeBias behind it"
            )
        self.TRS, self.DHW = self._three("TRS", TRS), self._three("DHW", DHW)
        if len(TRS) != len(DHW):
            raise ValueError(f"[{self._name}] TRS is {TRS} and DHW {DHW}, needs as many sizes of each, 1 to {_SIZES}")
        self.userTRS = self.TRS[_SIZES - len(TRS) :]
        self.strides, self.dilates = self._three("strides", strides), self._three("dilates", dilates)
        extents = [(s - 1) * d for s, d in zip(self.TRS, self.dilates, strict=True)]
        self.padding = self._padding(padding, extents)
        usual = self._result(extents)
        self.MPQ = usual if MPQ is None else self._three("MPQ", MPQ)
        self._geometry = self._make_geometry(extents, usual)
        self.BCK = [
            self._block(i, given) for i, given in enumerate(to_list(self._name, "BCK", BCK, "a list of blocks"))
        ]
        if not self.BCK:
            raise ValueError(f"[{self._name}] BCK has no block, needs one at least")
        self.blocks, self.debug = len(self.BCK), debug
        self.C, self.overlapC = self._count("C", [c for c, _ in self.BCK])
        self.K, self.overlapK = self._count("K", [k for _, k in self.BCK])
        self.trs = math.prod(self.TRS)
        self.sizeF = sum(len(c) * len(k) for c, k in self.BCK) * self.trs
        self.fixed_block_size = len({(len(c), len(k)) for c, k in self.BCK}) == 1
        self.flops = 2 * self.sizeF * math.prod(self.DHW if self._transposed else self.MPQ)
        self._make_layout()

    # ---- Shapes ------------------------------------------------------------------------------------------------------

    def _three(self, name: str, given: Sequence[int], filler: int = 1) -> list[int]:
        try:
            numbers = [operator.index(number) for number in given]
        except TypeError:
            numbers = []
        if not 1 <= len(numbers) <= _SIZES or min(numbers) < filler:
            raise ValueError(
                f"[{self._name}] {name} is {given}, needs 1 to {_SIZES} numbers, integers from {filler} on"
            )
        return [filler] * (_SIZES - len(numbers)) + numbers

    def _padding(self, given: str | Sequence[int], extents: list[int]) -> list[int]:
        if not isinstance(given, str):
            return self._three("padding", given, 0)
        if given.upper() not in ("SAME", "VALID"):
            raise ValueError(f"[{self._name}] padding is {given!r}, needs 'SAME', 'VALID' or numbers")
        return [(extent + 1) // 2 if given.upper() == "SAME" else 0 for extent in extents]

    def _result(self, extents: list[int]) -> list[int]:
        sizes = zip(self.DHW, self.TRS, extents, self.padding, self.strides, strict=True)
        if self._transposed:  # the original's choice among the sizes that a stride leaves open
            return [n * stride + taps - 2 * pad - taps % 2 for n, taps, _, pad, stride in sizes]
        return [(n + 2 * pad - extent - 1) // stride + 1 for n, _, extent, pad, stride in sizes]

    def _make_geometry(self, extents: list[int], usual: list[int]) -> Any:
        """With as much padding behind as makes the sizes of the result those that were asked for."""
        after, more = [], []
        self._zeros = [0] * _SIZES  # behind a transposed convolution: pixels of its usual size that no tap reaches
        for i, extent in enumerate(extents):
            pad, stride = self.padding[i], self.strides[i]
            if self._transposed:
                short = self.MPQ[i] - ((self.DHW[i] - 1) * stride + extent + 1 - 2 * pad)
                cut = max(0, pad - short)
                after.append(cut)
                most = max(stride, self.dilates[i]) - 1
                more.append(min(short - pad + cut, most))
                if self.MPQ[i] == usual[i]:
                    self._zeros[i] = short - pad + cut - more[i]
            else:
                after.append(max(0, (self.MPQ[i] - 1) * stride + extent + 1 - pad - self.DHW[i]))
                more.append(0)
        padding = list(zip(self.padding, after, strict=True))
        made = ops.conv_geometry(
            self.TRS,
            stride=self.strides,
            padding=padding,
            dilation=self.dilates,
            transposed=self._transposed,
            output_padding=more,
        )
        self._framework_geometry = (
            int(self._transposed),
            *self.TRS,
            *self.strides,
            *self.dilates,
            *self.padding,
            *after,
            *more,
        )
        sizes = [n + zeros for n, zeros in zip(ops.conv_output_size(made, self.DHW), self._zeros, strict=True)]
        if sizes != self.MPQ:
            raise ValueError(f"[{self._name}] MPQ is {self.MPQ}, the other sizes give {sizes}")
        return made

    def _block(self, i: int, given: tuple[Iterable[int], Iterable[int]]) -> tuple[_Int, _Int]:
        needed = "(channels of x, channels of y)"
        lists = to_list(self._name, f"block {i}", given, needed)
        if len(lists) != 2:
            raise ValueError(f"[{self._name}] block {i} has {len(lists)} parts, needs {needed}")
        return self._channels(i, "C", lists[0]), self._channels(i, "K", lists[1])

    def _channels(self, block: int, name: str, given: Iterable[int]) -> _Int:
        channels = np.asarray(to_list(self._name, f"{name} of block {block}", given, "a list of channels"))
        if channels.ndim != 1 or not channels.size or channels.dtype.kind not in "iu":
            raise ValueError(f"[{self._name}] the {name} of block {block} are no list of channels")
        if np.unique(channels).size != channels.size:
            raise ValueError(f"[{self._name}] the {name} of block {block} name a channel twice")
        return channels.astype(np.int64)

    def _count(self, name: str, lists: list[_Int]) -> tuple[int, bool]:
        times = np.unique(np.concatenate(lists), return_counts=True)
        count = times[0].size
        if (times[0] != np.arange(count)).any():
            raise ValueError(f"[{self._name}] BCK has {count} {name}, which are not 0 to {count - 1}")
        return count, bool((times[1] > 1).any())

    def i_shape(self, N: int) -> list[int]:
        """Shape of x for N images."""
        return [N, self.C, *self.DHW]

    def o_shape(self, N: int) -> list[int]:
        """Shape of the result for N images."""
        return [N, self.K, *self.MPQ]

    def f_shape(self, block: int | None = None) -> list[int]:
        """Shape of the filter, or of one block: [K, C, TRS...], in a transposed convolution [C, K, TRS...].

        Of all blocks it is [blocks, ...], if they are of one size, else [sizeF]: one block after the other.
        """
        if block is None:
            return [self.blocks, *self.f_shape(0)] if self.fixed_block_size else [self.sizeF]
        c, k = self.BCK[block]
        sides = [len(c), len(k)] if self._transposed else [len(k), len(c)]
        return [*sides, *self.userTRS]

    def collapse_filter(self, F: Iterable[npt.NDArray[Any]], dtype: Any = None) -> npt.NDArray[Any]:
        """The filter [sizeF] from a list of blocks."""
        flat = np.concatenate([np.asarray(block).reshape(-1) for block in F]).astype(dtype)
        if flat.size != self.sizeF:
            raise ValueError(f"[collapse_filter] the blocks hold {flat.size} numbers, needs {self.sizeF}")
        return flat

    # ---- The layout --------------------------------------------------------------------------------------------------

    def _make_layout(self) -> None:
        """Where each number of the filter lies among the layout's values: `_gather` [times, blocks, taps, b, b]."""
        c_order, c_groups = _sorted_by_lists([c for c, _ in self.BCK], self.C)
        k_order, k_groups = _sorted_by_lists([k for _, k in self.BCK], self.K)
        lengths = c_groups | k_groups
        b = next((size for size in (128, 64, 32, 16, 8) if all(length % size == 0 for length in lengths)), 8)
        place_c, place_k = np.argsort(c_order), np.argsort(k_order)
        in_blocks = -(-self.C // b)
        cells, entries, at = [], [], 0
        for c, k in self.BCK:
            rows, columns = np.meshgrid(place_k[k], place_c[c], indexing="ij")
            if self._transposed:
                rows, columns = rows.T, columns.T
            first = at + np.arange(rows.size) * self.trs
            at += rows.size * self.trs
            cells.append(((rows // b * in_blocks + columns // b) * b + rows % b) * b + columns % b)
            entries.append(first.reshape(rows.shape))
        cell, entry = (np.concatenate([part.ravel() for part in parts]) for parts in (cells, entries))
        blocks, block = np.unique(cell // (b * b), return_inverse=True)
        mask = np.zeros((-(-self.K // b), in_blocks), np.bool_)
        mask.flat[blocks] = True
        self.layout = Layout.from_mask(mask, b, out_features=self.K, in_features=self.C)
        self.fill = float(np.unique(cell).size / (blocks.size * b * b))
        # The number of times that a pair of channels occurs before, in case of overlaps.
        order = np.argsort(cell, kind="stable")
        _, starts, counts = np.unique(cell[order], return_index=True, return_counts=True)
        before = np.empty(cell.size, np.int64)
        before[order] = np.arange(cell.size) - np.repeat(starts, counts)
        gather = np.full((before.max() + 1, blocks.size, self.trs, b, b), self.sizeF)
        inside = cell % (b * b)
        for tap in range(self.trs):
            gather[before, block, tap, inside // b, inside % b] = entry + tap
        self._gather = gather
        plain = np.arange(self.C), np.arange(self.K)
        self._c_order = None if (c_order == plain[0]).all() else c_order.astype(np.int32)
        self._k_place = None if (k_order == plain[1]).all() else place_k
        self._tables: dict[Any, Any] = {}

    # ---- The call ----------------------------------------------------------------------------------------------------

    def __call__(self, F: Any, I: Any) -> Any:  # noqa: E741
        """The convolution.

        Args:
            F: the filter, f_shape() or [sizeF], a NumPy array, or a PyTorch or TensorFlow tensor (then differentiable).
            I: i_shape(N), of the same kind and dtype.

        Returns:
            o_shape(N), of the same kind.

        Raises:
            ValueError: a shape or dtype is wrong.
            TypeError: F and I are of different kinds.
        """
        kind = kind_of(self._name, F=F, I=I)
        F, I = kind.array(F), kind.array(I)  # noqa: E741
        of_filter, of_images = sizes_of(F), sizes_of(I)
        if of_filter not in ([self.sizeF], self.f_shape()):
            raise ValueError(f"[{self._name}] F is {of_filter}, needs {self.f_shape()} or {[self.sizeF]}")
        if of_images is None or len(of_images) != 2 + _SIZES or of_images[1:] != self.i_shape(0)[1:]:
            raise ValueError(f"[{self._name}] I is {of_images}, needs [N, {', '.join(map(str, self.i_shape(0)[1:]))}]")
        if kind is NUMPY:
            return self._numpy(F, I)
        return self._tensorflow(F, I) if kind is TENSORFLOW else self._torch(F, I)

    def _numpy(self, F: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        values = np.append(F.reshape(-1), F.dtype.type(0))[self._gather].sum(0, dtype=F.dtype)
        y = ops.conv_fprop(np.ascontiguousarray(x), values, self.layout, self._geometry, channel_order=self._c_order)
        if any(self._zeros):
            y = np.pad(y, [(0, 0), (0, 0), *((0, zeros) for zeros in self._zeros)])
        return y if self._k_place is None else y[:, self._k_place]

    def _torch(self, F: Any, x: Any) -> Any:
        import torch

        from .torch.functional.conv import apply_conv
        from .torch.tables import index_of

        tables = self._tables.get(x.device)
        if tables is None:
            arrays = (self._gather, self._c_order, self._k_place)
            tables = tuple(None if array is None else torch.from_numpy(array).to(x.device) for array in arrays)
            self._tables[x.device] = tables
        gather, c_order, k_place = tables
        values = torch.nn.functional.pad(F.reshape(-1), (0, 1))[gather].sum(0)
        sizes = self.layout.sizes
        y = apply_conv(
            x, values, index_of(self.layout, x.device), self._framework_geometry, sizes, False, None, c_order
        )
        if any(self._zeros):
            y = torch.nn.functional.pad(y, [pad for zeros in reversed(self._zeros) for pad in (0, zeros)])
        return y if k_place is None else y[:, k_place]

    def _tensorflow(self, F: Any, x: Any) -> Any:
        import tensorflow as tf

        from .tensorflow.conv import apply_conv

        padded = tf.concat([tf.reshape(F, [-1]), tf.zeros([1], F.dtype)], 0)
        values = tf.reduce_sum(TENSORFLOW.take(padded, self._gather), 0)
        geometry = self._framework_geometry
        y = apply_conv(x, values, self.layout, geometry, channels_last=False, channel_order=self._c_order)
        if any(self._zeros):
            y = tf.pad(y, [(0, 0), (0, 0), *((0, zeros) for zeros in self._zeros)])
        return y if self._k_place is None else tf.gather(y, self._k_place, axis=1)

    def l2_normalize(self, F: Any, gain: Any = None, epsilon: float = 1e-12) -> Any:
        """The filter [sizeF] with the weights of each channel of y in each block scaled to length 1, or to its gain.

        Args:
            F: the filter, f_shape() or [sizeF].
            gain: one for each channel of y in the order of BCK, [K]; needs overlapK to be False.
            epsilon: the least sum of squares.

        Raises:
            ValueError: there is a gain, and channels of y are in several blocks.
        """
        if gain is not None and self.overlapK:
            raise ValueError(f"[{self._name}] gain is given, but channels of y are in several blocks")
        kind = kind_of(self._name, F=F, **({} if gain is None else {"gain": gain}))
        flat, gain = kind.reshape(kind.array(F), (-1,)), None if gain is None else kind.array(gain)
        parts, at, channel = [], 0, 0
        for c, k in self.BCK:
            size = len(c) * len(k) * self.trs
            shape = (len(c), len(k), self.trs) if self._transposed else (1, len(k), len(c) * self.trs)
            block = kind.reshape(flat[at : at + size], shape)
            scale = kind.at_least(kind.sum(kind.sum(block * block, 2), 0), epsilon) ** -0.5
            if gain is not None:
                scale = scale * gain[channel : channel + len(k)]
            parts.append(kind.reshape(block * scale[None, :, None], (-1,)))
            at, channel = at + size, channel + len(k)
        return kind.concatenate(parts)


class BlocksparseDeconv(BlocksparseConv):
    """The transposed `BlocksparseConv`: x [N, C, D, H, W] -> y [N, K, M, P, Q], usually larger; blocks are [C, K, ...].

    MPQ says which size of the result is meant where a stride leaves several possible.
    """

    _transposed = True


def cwise_linear(x: Any, a: Any = None, b: Any = None) -> Any:
    """The sum a x + b, for a factor and a term of each channel: x [N, C, ...], a and b [1, C, 1, ...] or None."""
    y = x if a is None else a * x
    return y if b is None else y + b


def _sorted_by_lists(lists: list[_Int], count: int) -> tuple[_Int, set[int]]:
    """Channels sorted by the lists that they are in, then as these have them; the lengths of runs in equal lists."""
    member: list[list[int]] = [[] for _ in range(count)]
    position = np.zeros(count, np.int64)
    seen: dict[bytes, int] = {}
    for channels in lists:
        # A list that several blocks share is one list.
        number = seen.setdefault(channels.tobytes(), len(seen))
        for i, channel in enumerate(channels.tolist()):
            if number not in member[channel]:
                if not member[channel]:
                    position[channel] = i
                member[channel].append(number)
    keys = [tuple(numbers) for numbers in member]
    order = sorted(range(count), key=lambda channel: (keys[channel], position[channel]))
    lengths: dict[tuple[int, ...], int] = {}
    for key in keys:
        lengths[key] = lengths.get(key, 0) + 1
    return np.asarray(order, np.int64), set(lengths.values())
