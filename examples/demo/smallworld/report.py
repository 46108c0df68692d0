"""What came out: a table, three pictures, and a page that shows them."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from blocksparse import Layout

from . import speed
from .arms import Arm, Settings
from .train import Run, smooth

COLUMNS = ("network", "units", "parameters", "blocks", "reached", "kB/s", "ms/step", "bits/byte")


@dataclass(frozen=True)
class Results:
    """All that the report shows."""

    settings: Settings
    source: str  # of the text, in words
    text_bytes: int
    runs: list[Run]  # trained
    wide: Arm  # the dense network as wide as the sparse ones: only timed
    step_seconds: dict[str, float]
    speed_ups: list[list[float]]


# ---- Table -----------------------------------------------------------------------------------------------------------


def describe(arm: Arm) -> str:
    """One line about an arm before it is trained."""
    units, parameters, blocks, reached = _sizes(arm)
    path = f"; from one block, {reached} of all are reached" if arm.layouts else ""
    return f"  {arm.kind.title:<20}{units:>4} units, {parameters} parameters, {blocks} blocks{path}"


def rows(results: Results) -> list[tuple[str, ...]]:
    """The table, a row for each arm, as text."""
    size = results.settings.rows * results.settings.time
    lines: list[tuple[str, ...]] = []
    for arm, run in [*((run.arm, run) for run in results.runs), (results.wide, None)]:
        seconds = results.step_seconds[arm.kind.name]
        test = "not trained" if run is None or run.test is None else f"{run.test:.3f}"
        numbers = f"{size / seconds / 1e3:.1f}", f"{1e3 * seconds:.0f}", test
        lines.append((arm.kind.title, *_sizes(arm), *numbers))
    return lines


def table(results: Results) -> str:
    """The table for a terminal."""
    lines = [COLUMNS, *rows(results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def _sizes(arm: Arm) -> tuple[str, str, str, str]:
    blocks, reached = "dense", "all at once"
    if arm.layouts is not None:
        layout = arm.layouts[-1]
        blocks = f"{layout.blocks} ({100 * layout.density:.3g} %)"
        reached = ", ".join(f"{100 * share:.0f}" for share in arm.mix) + " %"
    return str(arm.shape.width), f"{arm.parameters:,}", blocks, reached


# ---- Pictures --------------------------------------------------------------------------------------------------------


def _figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)


def _save(figure: Any, file: Path) -> None:
    import matplotlib.pyplot as plt

    temporary = file.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=110)
    plt.close(figure)
    os.replace(temporary, file)


def draw_layouts(arms: Sequence[Arm], file: Path) -> None:
    """A row of pictures for each sparse arm: its matrices in their order, and how far one block has spread."""
    sparse = [arm for arm in arms if arm.layouts is not None]
    steps = sparse[0].shape.inner + 1
    figure, axes = _figure(len(sparse), steps + 1, 2.1 * (steps + 1), 2.3 * len(sparse))
    for row, arm in zip(axes, sparse, strict=True):
        assert arm.layouts is not None
        for step, layout in enumerate(arm.layouts):
            name = "each gate" if step == steps - 1 else f"matrix {step + 1}"
            _draw_blocks(row[step], layout, arm.kind.color, name)
        row[0].set_ylabel(arm.kind.title)
        _draw_mix(row[-1], arm)
    _save(figure, file)


def _draw_blocks(axis: Any, layout: Layout, color: str, title: str) -> None:
    from matplotlib.colors import ListedColormap

    axis.imshow(layout.mask(), cmap=ListedColormap(["#f2f2f2", color]), interpolation="nearest")
    axis.set(xticks=[], yticks=[], title=title)
    axis.spines[:].set_visible(False)


def _draw_mix(axis: Any, arm: Arm) -> None:
    steps = range(1, len(arm.mix) + 1)
    axis.bar(steps, [100 * share for share in arm.mix], color=arm.kind.color)
    for step, share in zip(steps, arm.mix, strict=True):
        axis.annotate(f"{100 * share:.0f}", (step, 100 * share), ha="center", va="bottom", fontsize=8)
    axis.set(ylim=(0, 115), xticks=list(steps), yticks=[0, 50, 100], title="% reached", box_aspect=1)
    axis.set_xlabel("after so many matrices")


def draw_curves(runs: Sequence[Run], file: Path) -> None:
    """Bits per byte while training, against bytes and against seconds."""
    figure, (axes,) = _figure(1, 2, 12, 4.6, sharey=True)
    low = math.log2(256)
    for run in runs:
        size = run.settings.rows * run.settings.time
        bits = smooth(run.bits, max(1, len(run.bits) // 25))
        low = min(low, *bits, run.test or low)
        read = [size * (step + 1) / 1e3 for step in range(len(bits))]
        for axis, x in ((axes[0], read), (axes[1], list(accumulate(run.seconds)))):
            axis.plot(x, bits, color=run.arm.kind.color, label=f"{run.arm.kind.title}: {run.test:.2f} in the test")
            axis.plot(x[-1], run.test, "o", color=run.arm.kind.color)
    axes[0].set(xlabel="kB of text read", ylabel="bits per byte", title="For the same text")
    axes[0].set(ylim=(low - 0.1, low + 1.5))
    axes[1].set(xlabel="seconds on one core", title="For the same time")
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_xlim(left=0)
    _save(figure, file)


def draw_speed_ups(speed_ups: Sequence[Sequence[float]], file: Path) -> None:
    """How many times faster than dense single layers are, against density."""
    figure, (axes,) = _figure(1, 2, 11, 4.4, sharey=True)
    for axis, column, title in ((axes[0], 2, "forward"), (axes[1], 3, "forward + backward")):
        for b, color in zip(speed.BLOCKS, ("tab:orange", "tab:purple"), strict=True):
            points = np.array([row for row in speed_ups if row[0] == b])
            axis.plot(100 * points[:, 1], points[:, column], "o-", color=color, label=f"blocks of {b} x {b}")
            place = {"xytext": (4, -13 if b == speed.BLOCKS[0] else 5), "textcoords": "offset points", "color": color}
            for row in points:
                axis.annotate(f"{row[column]:.1f}", (100 * row[1], row[column]), **place)
        density = np.array(sorted({row[1] for row in speed_ups}))
        axis.plot(100 * density, 1 / density, ":", color="gray", label="as much as work is saved")
        axis.axhline(1, color="gray", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="% of the blocks that are there", title=title)
        axis.set_xticks(100 * density, [f"{100 * d:g}" for d in density])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    axes[0].set_yticks(ticks, [f"{tick:g} x" for tick in ticks])
    axes[0].set_ylabel("times as fast as dense")
    axes[1].legend(frameon=False)
    _save(figure, file)


# ---- Page ------------------------------------------------------------------------------------------------------------


def write(results: Results, folder: Path) -> Path:
    """Writes the pictures, the table and the page into a folder; returns the page."""
    draw_layouts([run.arm for run in results.runs], folder / "layouts.png")
    draw_curves(results.runs, folder / "curves.png")
    draw_speed_ups(results.speed_ups, folder / "speed.png")
    (folder / "table.txt").write_text(table(results) + "\n")
    page = folder / "index.html"
    page.write_text(_page(results), encoding="utf-8")
    return page


def _page(results: Results) -> str:
    settings, run = results.settings, results.runs[0]
    by_name = {run.arm.kind.name: run for run in results.runs}
    fields = {
        "source": html.escape(results.source),
        "megabytes": f"{results.text_bytes / 1e6:.1f}",
        "kilobytes": f"{len(run.bits) * settings.rows * settings.time / 1e3:.0f}",
        "width": settings.width,
        "dense_width": by_name["dense"].arm.shape.width,
        "wide_ratio": f"{results.step_seconds['wide'] / results.step_seconds['ba']:.1f}",
        "wide_parameters": f"{results.wide.parameters / by_name['ba'].arm.parameters:.0f}",
        "b": settings.block,
        "matrices": settings.inner,
        "layer_width": speed.WIDTH,
        "tokens": speed.TOKENS,
        "table": _html_table(results),
        "samples": "".join(_html_sample(run) for run in results.runs),
    }
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return template.substitute(fields)


def _html_table(results: Results) -> str:
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>\n" for line in rows(results)
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _html_sample(run: Run) -> str:
    return f"<figure><figcaption>{run.arm.kind.title}</figcaption><pre>{html.escape(run.sample)}</pre></figure>\n"
