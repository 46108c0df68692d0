"""Pictures of layouts. Needs matplotlib: pip install 'blocksparse[viz]'."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from . import graphs
from .layout import Layout


def plot_layout(layout: Layout, path: str | os.PathLike[str], title: str = "") -> Path:
    """Draws the blocks, their number by row and column, and what is reached step by step, as a PNG or SVG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pictures need matplotlib: pip install 'blocksparse[viz]'", name="matplotlib"
        ) from error

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    report = graphs.report(layout)
    square = bool(report.mix)
    figure, axes = plt.subplots(1, 3 if square else 2, figsize=(15 if square else 10, 4.8), layout="constrained")
    _draw_blocks(axes[0], layout)
    _draw_degrees(axes[1], layout)
    if square:
        _draw_mix(axes[2], report)
    figure.suptitle(title or f"{layout.out_features} x {layout.in_features}, blocks of {layout.block_size}")
    path = Path(path)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw_blocks(axis: Any, layout: Layout) -> None:
    rows, columns = layout.grid
    side = 768  # larger grids are drawn by the share of blocks in each pixel
    out, in_ = layout.coordinates()
    height, width = min(rows, side), min(columns, side)
    counts = np.zeros((height, width))
    np.add.at(
        counts, (out.astype(np.int64) * height // max(rows, 1), in_.astype(np.int64) * width // max(columns, 1)), 1
    )
    axis.imshow(
        counts > 0 if (height, width) == (rows, columns) else counts,
        cmap="Greys",
        interpolation="nearest",
        extent=(0, columns, rows, 0),
        aspect="equal",
    )
    axis.set(xlabel="input block", ylabel="output block", title=f"{layout.blocks} blocks, {layout.density:.2%}")


def _draw_degrees(axis: Any, layout: Layout) -> None:
    out, in_ = layout.coordinates()
    by_row, by_column = np.bincount(out, minlength=layout.grid[0]), np.bincount(in_, minlength=layout.grid[1])
    axis.plot(np.sort(by_row)[::-1], label="rows (inputs of an output block)")
    axis.plot(np.sort(by_column)[::-1], "--", label="columns")
    axis.set(xlabel="rank", ylabel="blocks", title="Blocks in each row and column, largest first", ylim=(0, None))
    axis.legend()


def _draw_mix(axis: Any, report: graphs.Report) -> None:
    steps = range(1, len(report.mix) + 1)
    axis.bar(steps, [100 * share for share in report.mix], color="tab:blue")
    for step, share in zip(steps, report.mix, strict=True):
        axis.annotate(f"{math.floor(100 * share)}%", (step, 100 * share), ha="center", va="bottom")
    axis.set(
        xlabel="steps",
        ylabel="% of blocks reached",
        ylim=(0, 110),
        xticks=list(steps),
        title=f"Mix (mean path {report.mean_path:.2f}, clustering {report.clustering:.2f})",
    )
