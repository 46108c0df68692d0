"""Weights divided between devices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from .._core.arguments import to_int
from ..layout import Layout, need_layout
from .tables import Tables, sizes_of


def split_rows(layout: Layout, parts: int) -> Tables:
    """The layout in `parts` of equal height, for `jax.shard_map` over output rows. ::

        tables = bsj.split_rows(layout, 4)
        specs = (P(), P("rows"), P("rows"))
        f = jax.shard_map(bsj.linear, mesh=mesh, in_specs=specs, out_specs=P(None, "rows"))
        y = f(x, values, tables)   # values [blocks, b, b] as ever: each device gets the blocks of its rows

    Inside of `shard_map` the tables are those of one part. All devices run one program, so the parts need as many
    blocks each; `graphs.balanced_random`, `butterfly` and the like have them.

    Args:
        layout: the whole.
        parts: how many.

    Raises:
        ValueError: rows of blocks cannot be divided so, or the parts are not alike.
    """
    need_layout("split_rows", layout)
    parts = to_int("parts", parts, op="split_rows")
    rows = layout.grid[0]
    if parts < 1 or layout.transposed or rows % parts or layout.out_features % layout.block_size:
        raise ValueError(
            f"[split_rows] {layout!r} in {parts} parts: needs rows of blocks that {parts} divides, all whole, and no "
            "transposed view"
        )
    crow, col = layout.csr()
    step = rows // parts
    blocks = np.diff(crow[::step])
    if blocks.size and (blocks != blocks[0]).any():
        raise ValueError(f"[split_rows] the parts have {', '.join(map(str, blocks))} blocks, needs as many in each")
    made = [
        Layout.from_csr(
            crow[i : i + step + 1] - crow[i],
            col[crow[i] : crow[i + step]],
            layout.grid[1],
            layout.block_size,
            in_features=layout.in_features,
        )
        for i in range(0, rows, step)
    ]
    sizes = [sizes_of(part) for part in made]
    if any(size != sizes[0] for size in sizes):
        raise ValueError(
            f"[split_rows] the parts' tables have {', '.join(str(size.words) for size in sizes)} words, needs as many "
            "in each: some have rows so long that they are cut"
        )

    return Tables(jnp.concatenate([jnp.asarray(part.index_for_card()) for part in made]), sizes[0])
