"""Pictures of layouts. Needs matplotlib: pip install 'blocksparse[viz]'."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from . import graphs
from ._core.text import percentage
from .layout import Layout
from .models.files import check_name, check_writable, write_whole

DARKER = 0.4  # power of the share of a pixel that has blocks: a single block of a huge grid is seen beside full ones
SIDE = 768  # blocks a side that are drawn one by one
LABELS = 10  # of bars, at most
TICKS = 7  # spaces between numbers of an axis, at most
FLATTEST = 4  # a grid that is longer is not drawn to scale: nothing would be seen of it


def plot_layout(
    layout: Layout, path: str | os.PathLike[str], title: str = "", report: graphs.Report | None = None
) -> Path:
    """Draws the blocks, their number by row and column, and what is reached step by step, as a PNG or SVG file.

    Args:
        layout: to be drawn.
        path: of the file: all of it is there, or, if writing fails, what was there before. PNG without an ending.
        title: above the picture; by default the sizes.
        report: of the layout, if it is known already.

    Returns:
        The path of the file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: there are no pictures with such an ending.
    """
    place = check_picture(path)
    figure = draw_layout(layout, report or graphs.report(layout), title)
    kind = place.suffix.removeprefix(".").lower() or "png"
    write_whole(place, lambda file: figure.savefig(file, format=kind, dpi=130), "plot")
    return place


def check_picture(path: str | os.PathLike[str], op: str = "plot", ending: str = ".png") -> Path:
    """The path, with this ending if it has none; raises what the op does of a path before any work."""
    need_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    if os.fspath(path) in ("", "-"):
        raise ValueError(f'[{op}] the picture is "{path}", needs a file')
    place = Path(path)
    check_name(place, op)
    if not place.suffix and not place.exists():
        place = place.with_name(f"{place.name}{ending}")
    known = {ending.removeprefix("."), *FigureCanvasBase.get_supported_filetypes()}
    if place.suffix and place.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"[{op}] {place} ends with {place.suffix}, needs one of {', '.join(sorted(known))}")
    if not place.parent.is_dir():
        raise FileNotFoundError(f"[{op}] {place.parent} is no folder")
    check_writable(place, op)
    return place


def need_matplotlib() -> None:
    """Raises ModuleNotFoundError, with the extra's name, where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        message = "pictures need matplotlib: pip install 'blocksparse[viz]'"
        raise ModuleNotFoundError(message, name="matplotlib") from error


def draw_layout(layout: Layout, report: graphs.Report, title: str = "") -> Any:
    """The picture, a matplotlib.figure.Figure."""
    from matplotlib.figure import Figure

    square = bool(report.mix)
    figure = Figure(figsize=(15 if square else 10, 5), layout="constrained")
    axes = figure.subplots(1, 3 if square else 2)
    _draw_blocks(axes[0], layout)
    _draw_degrees(axes[1], layout)
    if square:
        _draw_mix(axes[2], report)
    text = title or f"{layout.out_features} x {layout.in_features}, blocks of {layout.block_size}"
    figure.suptitle(text if len(text) <= 80 else f"{text[:77]}...")
    return figure


def _draw_blocks(axis: Any, layout: Layout) -> None:
    from matplotlib.colors import PowerNorm

    rows, columns = layout.grid
    out, in_ = layout.coordinates()
    height, width = min(rows, SIDE), min(columns, SIDE)
    row_of, column_of = (np.arange(n) * pixels // max(n, 1) for n, pixels in ((rows, height), (columns, width)))
    pixels = row_of[out] * width + column_of[in_]
    there = np.bincount(pixels, minlength=height * width).reshape(height, width)
    of = np.outer(np.bincount(row_of, minlength=height), np.bincount(column_of, minlength=width))
    share = there / np.maximum(of, 1)
    flat = max(rows, columns) > FLATTEST * min(rows, columns)
    axis.imshow(
        share,
        cmap="Greys",
        norm=PowerNorm(DARKER, vmin=0, vmax=share.max(initial=0) or 1),
        interpolation="nearest",
        extent=(0, columns, rows, 0),
        aspect="auto" if flat else "equal",
    )
    axis.set(xlabel="input block", ylabel="output block", title=f"{layout.blocks} blocks, {percentage(layout.density)}")
    _whole_numbers(axis.xaxis, TICKS if flat else TICKS * columns // max(rows, columns))
    _whole_numbers(axis.yaxis)


def _draw_degrees(axis: Any, layout: Layout) -> None:
    out, in_ = layout.coordinates()
    by_row, by_column = np.bincount(out, minlength=layout.grid[0]), np.bincount(in_, minlength=layout.grid[1])
    mark = "." if max(layout.grid) == 1 or min(layout.grid) < 3 else ""  # a line of one point is none
    axis.plot(np.sort(by_row)[::-1], marker=mark, label="rows (inputs of an output block)")
    axis.plot(np.sort(by_column)[::-1], "--", marker=mark, label="columns")
    top = max(by_row.max(initial=0), by_column.max(initial=0), 1)
    if max(layout.grid) == 1:
        axis.set(xlim=(-1, 1))
    axis.set(xlabel="rank", ylabel="blocks", title="Blocks in each row and column, largest first", ylim=(0, 1.05 * top))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    _whole_numbers(axis.xaxis)
    _whole_numbers(axis.yaxis)


def _draw_mix(axis: Any, report: graphs.Report) -> None:
    steps = range(1, len(report.mix) + 1)
    axis.bar(steps, [100 * share for share in report.mix], color="tab:blue")
    last = max(len(report.mix), 4)  # so that a single bar is no wall
    beside = max(0.75, last / 20)
    every = math.ceil(len(report.mix) / LABELS)
    for step, share in list(zip(steps, report.mix, strict=True))[::-1][::every]:  # of the last one in any case
        axis.annotate(f"{math.floor(100 * share)}%", (step, 100 * share), ha="center", va="bottom")
    axis.set(
        xlabel="steps",
        ylabel="% of blocks reached",
        xlim=(1 - beside, last + beside),
        ylim=(0, 110),
        title=f"Mix (mean path {report.mean_path:.2f}, clustering {report.clustering:.2f})",
    )
    _whole_numbers(axis.xaxis)


def _whole_numbers(axis: Any, most: int = TICKS) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=max(1, most), integer=True))
