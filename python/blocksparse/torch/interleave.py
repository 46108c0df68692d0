"""How gate and up of a gated linear unit lie in one weight: rows of both in turn, eight at a time.

z = W x has 2 round_up(hidden, 8) features: eight of the gate, the same eight of up, and so on. One product then makes
both, x is read by one launch, and whatever sums a block has both halves of a hidden unit side by side.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..layout import Layout, need_layout
from .arguments import need_tensor

GROUP = 8  # hidden units that lie together: see include/blocksparse/glu.h

_Order = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def interleaved_features(hidden: int) -> int:
    """Of z, which has both: twice the hidden ones, up to a multiple of 8."""
    return 2 * GROUP * -(-hidden // GROUP)


def _rows(layout: Layout) -> _Order:
    """Rows and columns of blocks of the interleaved weight; entry 2 i + half is made of block i of the given one."""
    out, in_ = (side.astype(np.int64) for side in layout.coordinates())
    rows = np.stack([2 * out, 2 * out + 1], axis=1).ravel()
    return rows, np.repeat(in_, 2)


def _order(layout: Layout) -> npt.NDArray[np.int64]:
    """Entries of `_rows` in the order of blocks of the interleaved layout, without those that lie below it."""
    rows, columns = _rows(layout)
    order = np.lexsort((columns, rows))
    last = -(-interleaved_features(layout.out_features) // layout.block_size)
    return order[rows[order] < last]


def interleaved_layout(layout: Layout) -> Layout:
    """The layout of gate and up in one weight [2 round_up(hidden, 8), in], from that of each, [hidden, in].

    Raises:
        TypeError: it is no layout.
    """
    need_layout("interleaved_layout", layout)
    rows, columns = _rows(layout)
    order, features = _order(layout), interleaved_features(layout.out_features)
    grid = (-(-features // layout.block_size), layout.grid[1])
    sizes = {"out_features": features, "in_features": layout.in_features}
    return Layout.from_coordinates(rows[order], columns[order], grid, layout.block_size, **sizes)


def _places(layout: Layout, device: torch.device) -> Tensor:
    return torch.from_numpy(_order(layout)).to(device)


def interleave(gate: Tensor, up: Tensor, layout: Layout) -> Tensor:
    """The values of `interleaved_layout(layout)` from those of gate and of up, [blocks, b, b]. Differentiable.

    Raises:
        ValueError: values do not have the layout's shape.
    """
    need_layout("interleave", layout)
    for name, values in (("gate", gate), ("up", up)):
        need_tensor("interleave", name, values)
        if tuple(values.shape) != layout.values_shape:
            raise ValueError(f"[interleave] {name} is {list(values.shape)}, needs {list(layout.values_shape)}")
    if layout.transposed:
        gate, up = gate.transpose(1, 2), up.transpose(1, 2)
    b = layout.block_size
    both = torch.stack([part.unflatten(1, (-1, GROUP)) for part in (gate, up)], 2)  # [blocks, b / 8, 2, 8, b]
    return both.reshape(-1, b, b)[_places(layout, gate.device)]


def separate(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Values of gate and of up, [blocks, b, b] each, from those of `interleaved_layout(layout)`. Differentiable.

    Raises:
        ValueError: there are not as many values as that layout has blocks.
    """
    need_layout("separate", layout)
    need_tensor("separate", "values", values)
    b, order = layout.block_size, _places(layout, values.device)
    if tuple(values.shape) != (order.numel(), b, b):
        raise ValueError(f"[separate] values are {list(values.shape)}, needs {[order.numel(), b, b]}")
    both = values.new_zeros(2 * layout.blocks, b, b).index_put((order,), values)
    both = both.view(layout.blocks, b // GROUP, 2, GROUP, b)
    gate, up = (both[:, :, part].flatten(1, 2) for part in range(2))
    return (gate.transpose(1, 2), up.transpose(1, 2)) if layout.transposed else (gate, up)


def interleave_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Dense weights or biases [hidden, ...] as one [2 round_up(hidden, 8), ...], zeros where there is nothing."""
    need_tensor("interleave_rows", "gate", gate)
    need_tensor("interleave_rows", "up", up)
    if gate.shape != up.shape:
        raise ValueError(f"[interleave_rows] gate is {list(gate.shape)} and up {list(up.shape)}, needs one shape")
    features = interleaved_features(gate.size(0))
    both = gate.new_zeros(features // (2 * GROUP), 2, GROUP, *gate.shape[1:])
    for part, rows in enumerate((gate, up)):
        padded = torch.cat([rows, rows.new_zeros(features // 2 - rows.size(0), *rows.shape[1:])])
        both[:, part] = padded.unflatten(0, (-1, GROUP))
    return both.flatten(0, 2)


def separate_rows(both: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """The other way: (gate, up) [hidden, ...]."""
    parts = both.unflatten(0, (-1, 2, GROUP))
    return parts[:, 0].flatten(0, 1)[:hidden], parts[:, 1].flatten(0, 1)[:hidden]
