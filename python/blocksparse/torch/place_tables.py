"""A layout's tables made anew from the places of its blocks, where tensors are: memory in proportion to the blocks.

The kernel of `bs_layout_build` reads a mask, a byte for each place, and is fast where there are few of them. This makes
the same words by PyTorch's operators, of fixed shapes, which wait for no card. Their form: src/core/index.h.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layout import HostLayout

HEADER, HASH, COUNTS = 32, 10, (12, 15)  # words of the header, and which of them hold the hash, and counts of each side
SCHEDULE_GROUPS, MOST_SCHEDULE_WAVES = (132, 66, 33, 16), 32  # src/core/schedule.h
RESERVED = 18  # the first of the words of the header that are 0 on the host
PADDING = 12  # words at the end: all directions may be cut
MOST_SLOTS, MOST_SPLITS, FEW_SLICES, FEW_SLICES_CAPS = 512, 256, 8, 16  # src/core/tables.h
KEY_STEP = 1 << 27


class Side(NamedTuple):
    """Rows of W, or its columns: how many, how long, and where their sections begin."""

    rows: int
    columns: int
    starts: int
    refs: int
    pieces: int
    splits: int
    order: int


class Sections(NamedTuple):
    """`index_sections` of src/core/index.h."""

    by_out: Side
    by_in: Side
    out_of: int
    words: int  # without schedules and padding


def sections_of(rows: int, columns: int, blocks: int) -> Sections:
    """Where the sections lie, in words."""
    end = HEADER

    def place(words: int) -> int:
        nonlocal end
        begin, end = end, end + -(-words // 4) * 4
        return begin

    by_out, by_in = (
        Side(n, m, *map(place, (n + 1, 2 * blocks, 4 * (n + MOST_SLOTS), 4 * MOST_SPLITS, n)))
        for n, m in ((rows, columns), (columns, rows))
    )
    return Sections(by_out, by_in, place(blocks), end)


def schedule_words(rows: int, columns: int) -> int:
    """Words between the sections and the padding, 0 here: `schedule_words` of src/core/schedule.h."""
    numbers = 0  # of 16 bits
    for n in (rows, columns):
        for groups in SCHEDULE_GROUPS:
            waves = -(-3 * -(-n // groups) // 2) + 2
            numbers += groups * waves if n >= groups and waves <= MOST_SCHEDULE_WAVES else 0
    return -(-numbers // 32) * 16


def tables_to_change(layout: HostLayout, device: torch.device) -> Tensor:
    """int32 words on a device for `write_tables`, as a card makes them: without a hash, with all room."""
    words, grid = layout.index(), layout.grid
    whole = np.zeros(sections_of(*grid, layout.blocks).words + schedule_words(*grid) + PADDING, np.int32)
    whole[: words.size] = words
    whole[HASH : HASH + 2] = 0
    with torch.inference_mode(False):  # tensors made in that mode are of no use for training later
        return torch.from_numpy(whole).to(device)


@torch.no_grad()
def write_tables(words: Tensor, places: Tensor, grid: tuple[int, int]) -> None:
    """Writes all of the tables that depends on where blocks are.

    Args:
        words: int32, of `tables_to_change` of a layout of this grid and as many blocks.
        places: int64 [blocks], row * columns + column, rising.
        grid: (rows, columns).
    """
    blocks = places.numel()
    at = sections_of(*grid, blocks)
    rows, columns, weights = places // grid[1], places % grid[1], torch.arange(blocks, device=places.device)
    by_column, order = columns.sort(stable=True)
    words[RESERVED:HEADER].zero_()  # no mask was wrong, and no rows are dealt
    words[at.out_of : at.out_of + blocks] = rows.int()
    _write_side(words, at.by_out, COUNTS[0], rows, columns, weights)
    _write_side(words, at.by_in, COUNTS[1], by_column, rows[order], order)


def _write_side(words: Tensor, side: Side, counts: int, rows: Tensor, others: Tensor, weights: Tensor) -> None:
    """One direction, from the row, the column and the weight of each block in the order of rows."""
    blocks, device = rows.numel(), rows.device
    starts = torch.searchsorted(rows, torch.arange(side.rows + 1, device=device))
    words[side.starts : side.starts + side.rows + 1] = starts.int()
    words[side.refs : side.refs + 2 * blocks] = torch.stack([others, weights], 1).int().flatten()
    lengths = starts.diff()
    cap = max(32, -(-blocks // 256), min(2 * (blocks // side.rows), blocks // 32))
    most = FEW_SLICES if side.columns <= FEW_SLICES_CAPS * cap else MOST_SLOTS
    parts, doublings = torch.ones_like(lengths), torch.zeros_like(lengths)
    for _ in range(most.bit_length() - 1):
        more = (parts * cap < lengths).long()
        parts, doublings = parts << more, doublings + more
    is_cut = parts > 1
    slots = torch.where(is_cut, parts, 0)
    first_slot = slots.cumsum(0) - slots
    _write_pieces(words, side, starts, lengths, parts, torch.where(is_cut, first_slot, -1), doublings)
    # Rows that are cut, in their order.
    rank = is_cut.cumsum(0)
    i = torch.arange(MOST_SPLITS, device=device)
    row = torch.searchsorted(rank, i + 1).clamp_(max=side.rows - 1)
    split = torch.stack([row, first_slot[row], parts[row], torch.zeros_like(row)], 1)
    split = torch.where((i < rank[-1]).unsqueeze(1), split, 0)
    words[side.splits : side.splits + 4 * MOST_SPLITS] = split.int().flatten()
    words[counts : counts + 3] = torch.stack([parts.sum(), rank[-1], slots.sum()]).int()


def _write_pieces(
    words: Tensor, side: Side, starts: Tensor, lengths: Tensor, parts: Tensor, first_slot: Tensor, doublings: Tensor
) -> None:
    """The slices of all rows: those of most slices first, then the longest."""
    ends = parts.cumsum(0)
    i = torch.arange(side.rows + MOST_SLOTS, device=starts.device)
    row = torch.searchsorted(ends, i, right=True).clamp_(max=side.rows - 1)
    n, length = parts[row], lengths[row]
    k = i - (ends[row] - n)
    slot = torch.where(first_slot[row] < 0, -1, first_slot[row] + k)
    pieces = torch.stack([row, starts[row] + length * k // n, starts[row] + length * (k + 1) // n, slot], 1)
    there = i < ends[-1]
    key = torch.where(there, (length + n - 1) // n + doublings[row] * KEY_STEP, -1)
    order = key.sort(descending=True, stable=True).indices
    pieces = torch.where(there.unsqueeze(1), pieces, 0)[order]
    words[side.pieces : side.pieces + 4 * i.numel()] = pieces.int().flatten()
