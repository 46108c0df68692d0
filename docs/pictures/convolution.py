"""Draws the pictures of docs/guide/convolution.md: python docs/pictures/convolution.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from blocksparse import Layout, graphs

HERE = Path(__file__).parent
COLOURS = ("#c8553d", "#2f6690", "#588157", "#bc8a2c")
GREY = "#e9e9e9"


def bare(axes: Any) -> None:
    """No axes: rectangles alone."""
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal")
    for spine in axes.spines.values():
        spine.set_visible(False)


def what_is_sparse() -> None:
    """The filter as blocks, one block as taps, and the pixels that one row of blocks reads."""
    mask = np.array([[1, 0, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 1, 1, 0], [1, 0, 0, 1, 0]])
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(11, 3.6), layout="constrained", width_ratios=(1.2, 0.9, 1.5)
    )
    rows, columns = mask.shape
    for row, column in np.ndindex(mask.shape):
        used = mask[row, column]
        colour = COLOURS[0] if used and row == 1 else "#d9a79b" if used else GREY
        left.add_patch(Rectangle((column, rows - 1 - row), 0.94, 0.94, color=colour))
    left.set(xlim=(-0.1, columns), ylim=(-0.1, rows), title="the filter: blocks of channels")
    left.set_xlabel("input channels, b at a time")
    left.set_ylabel("output channels, b at a time")
    bare(left)

    for tap in range(9):
        x, y = tap % 3, 2 - tap // 3
        middle.add_patch(Rectangle((x, y), 0.9, 0.9, color=COLOURS[0], alpha=0.25 + 0.08 * tap))
        middle.text(x + 0.45, y + 0.45, f"tap {tap}\nb x b", ha="center", va="center", fontsize=8)
    middle.set(xlim=(-0.1, 3), ylim=(-0.1, 3), title="one block: all taps, dense")
    bare(middle)

    width = 7
    for channel in range(columns):
        read = mask[1, channel]
        first = (channel % 3 * (width + 2), (1 - channel // 3) * (width + 2.5))
        for x, y in np.ndindex(width, width):
            inside = read and 2 <= x < 5 and 2 <= y < 5
            colour = COLOURS[0] if inside else "#f4e3df" if read else GREY
            right.add_patch(Rectangle((first[0] + x, first[1] + y), 0.8, 0.8, facecolor=colour))
        name = f"inputs {channel}"
        place = (first[0] + width / 2, first[1] - 1.2)
        right.text(*place, name, ha="center", fontsize=8, color=COLOURS[0] if read else "#888888")
    right.set(xlim=(-0.5, 3 * width + 4.5), ylim=(-1.8, 2 * width + 3), title="what a pixel of output row 1 reads")
    bare(right)
    figure.savefig(HERE / "convolution_sparse.png", dpi=140)


def shuffle(groups: int, channels: int) -> np.ndarray[Any, Any]:
    """ShuffleNet's order: the first channel of each group, then the second of each."""
    return np.arange(channels).reshape(groups, -1).T.ravel()


def groups_and_orders() -> None:
    """Which channels of x each output sees, in one layer and through two."""
    channels, b = 64, 8
    diagonal = np.kron(Layout.from_graph("diagonal(8,2)", b).mask(), np.ones((b, b)))
    random = np.kron(graphs.balanced_random(8, degree=2, block_size=b, seed=4).mask(), np.ones((b, b)))
    order = shuffle(4, channels)
    shuffled = np.zeros_like(diagonal)
    shuffled[:, order] = diagonal  # channel c of the layout is channel order[c] of x
    second = np.kron(graphs.balanced_random(8, degree=2, block_size=b, seed=9).mask(), np.ones((b, b)))
    cases = (
        ("groups=4: diagonal(8,2)", diagonal, diagonal),
        ("the same blocks, channel_order: a shuffle", shuffled, shuffled),
        ("balanced(8,2)", random, second),
    )
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 6.6), layout="constrained")
    for column, (title, one, other) in enumerate(cases):
        two = (other @ one) > 0
        for row, seen in enumerate((one > 0, two)):
            panel = axes[row, column]
            panel.imshow(seen, cmap=ListedColormap([GREY, COLOURS[row]]), vmin=0, vmax=1, interpolation="nearest")
            panel.set(xticks=[], yticks=[], xlabel="channels of x" if row else "")
            panel.set_title(title if row == 0 else f"two such layers: {seen.mean():.0%} connected", fontsize=10)
        axes[0, column].set_ylabel("output channels" if column == 0 else "")
    axes[1, 0].set_ylabel("output channels")
    figure.savefig(HERE / "convolution_orders.png", dpi=100)


if __name__ == "__main__":
    what_is_sparse()
    groups_and_orders()
