"""How gate and up of a gated linear unit lie in one weight: rows of both in turn, eight at a time.

z = W x has 2 round_up(hidden, 8) features: eight of the gate, the same eight of up, and so on. One product then makes
both, x is read by one launch, and whatever sums a block has both halves of a hidden unit side by side.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .layout import Layout, need_layout

GROUP = 8  # hidden units that lie together: see include/blocksparse/glu.h


def interleaved_features(hidden: int) -> int:
    """Of z, which has both: twice the hidden ones, up to a multiple of 8."""
    return 2 * GROUP * -(-hidden // GROUP)


def _coordinates(layout: Layout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of blocks of the interleaved weight; entry 2 i + half is made of block i of the given one."""
    out, in_ = (side.astype(np.int64) for side in layout.coordinates())
    return np.stack([2 * out, 2 * out + 1], axis=1).ravel(), np.repeat(in_, 2)


def interleaved_order(layout: Layout) -> npt.NDArray[np.int64]:
    """Which half each block of `interleaved_layout` is made of: 2 i + half of block i of the given layout.

    Halves that lie below the interleaved weight are not among them.
    """
    rows, columns = _coordinates(layout)
    order = np.lexsort((columns, rows))
    last = -(-interleaved_features(layout.out_features) // layout.block_size)
    return order[rows[order] < last]


def interleaved_layout(layout: Layout) -> Layout:
    """The layout of gate and up in one weight [2 round_up(hidden, 8), in], from that of each, [hidden, in].

    Raises:
        TypeError: it is no layout.
    """
    need_layout("interleaved_layout", layout)
    rows, columns = _coordinates(layout)
    order, features = interleaved_order(layout), interleaved_features(layout.out_features)
    grid = (-(-features // layout.block_size), layout.grid[1])
    sizes = {"out_features": features, "in_features": layout.in_features}
    return Layout.from_coordinates(rows[order], columns[order], grid, layout.block_size, **sizes)
