"""What a block-sparse layer is: dense, sparse and wide, sparse and deep, each of as many blocks.

python docs/pictures/layers.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from blocksparse import Layout, graphs
from style import BLOCK, INK, PALE, phone_figure, save

Mask = npt.NDArray[np.bool_]


def masks(*layouts: Layout) -> list[Mask]:
    """Of each, [out blocks, in blocks]."""
    return [layout.mask() for layout in layouts]


DENSE = masks(graphs.dense(6, block_size=8))
WIDE = masks(graphs.balanced_random(12, degree=3, block_size=8, seed=2))
DEEP = masks(*(graphs.balanced_random(6, degree=2, block_size=8, seed=seed) for seed in (1, 2, 3)))
COLUMNS = (("dense", DENSE), ("sparse and wide", WIDE), ("sparse and deep", DEEP))


def draw_network(axis: Any, layers: list[Mask]) -> None:
    """Units in rows, from the bottom up, and a line for each block."""
    for depth, mask in enumerate(layers):
        out, in_ = np.nonzero(mask)
        places = [np.linspace(0, 1, n + 2)[1:-1] for n in mask.shape]
        lines = [((places[1][i], depth), (places[0][o], depth + 1)) for o, i in zip(out, in_, strict=True)]
        axis.add_collection(LineCollection(lines, colors=BLOCK, linewidths=0.7, alpha=0.75))
    for depth in range(len(layers) + 1):
        units = layers[0].shape[1] if depth == 0 else layers[depth - 1].shape[0]
        x = np.linspace(0, 1, units + 2)[1:-1]
        axis.plot(x, np.full(units, depth), "o", color="white", markeredgecolor=INK, markersize=4, markeredgewidth=0.8)
    axis.set(xlim=(0, 1), ylim=(-0.15 * len(layers), 1.15 * len(layers)))
    axis.set_axis_off()


def draw_matrices(axis: Any, layers: list[Mask]) -> None:
    """Each weight matrix with its blocks, one beside or under the other, in one scale for all three columns."""
    side, gap = 12, 1.5
    rows = 1 if len(layers) == 1 else 2
    for index, mask in enumerate(layers):
        n = len(mask)
        left = (side - n) / 2 if rows == 1 else (index % 2) * (n + gap) - gap / 2 + (index // 2) * (n + gap) / 2
        top = 0.0 if rows == 1 else (index // 2) * (n + gap)
        for row, column in np.ndindex(mask.shape):
            colour = BLOCK if mask[row, column] else PALE
            axis.add_patch(Rectangle((left + column + 0.06, top + row + 0.06), 0.88, 0.88, facecolor=colour))
    axis.set(xlim=(-1, side + 1), ylim=(side + gap, -0.2))
    axis.set_aspect("equal", anchor="N")
    axis.set_axis_off()


def main() -> None:
    """Writes layers.png."""
    figure = phone_figure(3.1)
    axes = figure.subplots(2, 3, height_ratios=(1.15, 1.3))
    for (upper, lower), (title, layers) in zip(axes.T, COLUMNS, strict=True):
        blocks = sum(int(mask.sum()) for mask in layers)
        density = blocks / sum(mask.size for mask in layers)
        draw_network(upper, layers)
        draw_matrices(lower, layers)
        upper.set_title(f"{title}\n{blocks} blocks, {density:.0%}")
    save(figure, "layers")


if __name__ == "__main__":
    main()
