"""The pictures of a report: speed-up against density, share of the roofline, and plain kernels by tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rows import DIRECTIONS, Group, Row, grouped_by_matrix, kind, title


def pyplot() -> Any:
    """matplotlib without a screen."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
    return plt


def save(figure: Any, path: Path) -> None:
    """A palette is enough, and half of the bytes: the pictures lie beside the results."""
    from PIL import Image

    figure.savefig(path, dpi=100)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE)
    small.save(path, optimize=True)


def colours(values: Iterable[int]) -> Callable[[int], Any]:
    """From light to dark by size."""
    import matplotlib as mpl

    order = sorted(set(values))
    return lambda v: mpl.colormaps["viridis"](0.85 * (1 - order.index(v) / max(len(order) - 1, 1)))


def plot_speed_up(
    rows: list[Row], path: Path, *, directions: tuple[str, ...] = DIRECTIONS, most: int | None = None
) -> bool:
    """A panel for each width and pass, a line for each block size. False where nothing has two densities.

    directions: the passes that are drawn. most: of so many groups, those with the most problems.
    """
    on_card = any(r.on_card for r in rows)
    usual = ("features-last", "channels-last")
    rows = [r for r in rows if kind(r.problem) == "random" and r.speed_up and r.problem.order in usual]
    wanted = ("bf16", 0) if on_card else ("f32", 1)
    rows = [r for r in rows if (r.group[0], r.group[-1]) == wanted]
    rows = [r for r in rows if on_card or r.problem.is_conv or r.problem.n == 64]
    groups = sorted(
        {r.group for r in rows if sum(s.group == r.group for s in rows) > 3}, key=lambda g: (*g[3:6], *g[1:3])
    )
    if not groups:
        return False
    if most is not None:
        largest = sorted(groups, key=lambda g: -sum(r.group == g for r in rows))[:most]
        groups = [group for group in groups if group in largest]
    rows = [r for r in rows if r.group in groups and r.problem.direction in directions]
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if t >= min(0.5, *(r.speed_up or 1 for r in rows))]
    plt = pyplot()
    colour = colours(r.problem.block for r in rows)
    wide = len(directions) == len(DIRECTIONS)
    size = (12, 0.6 + 3.9 * len(groups)) if wide else (6.8, 0.8 + 2.9 * len(groups))
    shape = {"figsize": size, "sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(len(groups), len(directions), layout="constrained", **shape)
    for line, group in zip(axes, groups, strict=True):
        for axis, direction in zip(line, directions, strict=True):
            some = [r for r in rows if r.group == group and r.problem.direction == direction]
            if not some:
                axis.set_axis_off()
                continue
            draw_speed_up(axis, some, colour, ticks)
            axis.set_title(panel_name(direction, group, on_card))
        line[0].set_ylabel("times as fast as dense")
    for axis in axes[-1]:
        axis.set_xlabel("density")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    blocks = sorted((label for label in handles if label.startswith("b")), key=lambda label: int(label[4:]))
    order = [*blocks, *(label for label in handles if not label.startswith("b"))]
    next(axis for axis in reversed(axes[0]) if axis.lines).legend(
        [handles[label] for label in order], order, frameon=False
    )
    name = whole_name(on_card, rows[0].problem.is_conv)
    figure.suptitle(name if wide else name.replace(": ", ":\n"))
    save(figure, path)
    plt.close(figure)
    return True


def panel_name(direction: str, group: Group, on_card: bool) -> str:
    """Short enough for a third of the width."""
    if group[5]:
        return f"{direction}, {group[1]} x {group[2]}, {group[5]}"
    return f"{direction}, {group[1]} x {group[2]}" + (f", N = {group[3]}" if on_card else "")


def whole_name(on_card: bool, of_convolutions: bool) -> str:
    """What all panels have in common."""
    if of_convolutions:
        over = "cuDNN's dense convolution: bf16" if on_card else "oneDNN's dense convolution: f32, 1 thread"
        return f"Speed-up over {over}, channels-last"
    over = "cuBLAS: bf16" if on_card else "the fastest dense library: N = 64, f32, 1 thread"
    return f"Speed-up over {over}, features-last, weights from memory"


def draw_speed_up(axis: Any, rows: list[Row], colour: Callable[[int], Any], ticks: list[float]) -> None:
    """One panel, logarithmic both ways."""
    for block in sorted({r.problem.block for r in rows}):
        points = sorted((r.density, r.speed_up) for r in rows if r.problem.block == block)
        axis.plot(*zip(*points, strict=True), "o-", color=colour(block), label=f"b = {block}", markersize=4)
    ends = (0.018, 0.55)
    axis.plot(ends, [1 / d for d in ends], ":", color="0.4", label="1 / density")
    axis.axhline(1, color="0.7", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks([0.02, 0.05, 0.1, 0.25, 0.5], ["2 %", "5 %", "10 %", "25 %", "50 %"])
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(color="0.92", linewidth=0.6)


def plot_roofline(rows: list[Row], path: Path) -> bool:
    """A line for each group of problems, a point for each problem. False where no line tells its share."""
    rows = [r for r in rows if r.share("roofline") is not None]
    if not rows:
        return False
    plt = pyplot()
    groups = list(dict.fromkeys(r.group for r in rows))
    blocks = sorted({r.problem.block for r in rows})
    colour = colours(blocks)
    marks = dict(zip(DIRECTIONS, "o^s", strict=True))
    figure, axis = plt.subplots(figsize=(6.8, 1.9 + 0.48 * len(groups)), layout="constrained")
    for y, group in enumerate(groups):
        for r in (r for r in rows if r.group == group):
            shift = 0.2 * DIRECTIONS.index(r.problem.direction) - 0.06
            style = {"marker": marks[r.problem.direction], "s": 26, "alpha": 0.8, "linewidths": 0}
            axis.scatter(r.record["roofline_fraction"], y + shift, color=colour(r.problem.block), **style)
        axis.text(0.005, y - 0.32, title(group), fontsize=8, va="center")  # a margin of names would not fit a phone
        axis.axhline(y - 0.52, color="0.9", linewidth=0.6)
    axis.set_yticks([])
    axis.set_ylim(len(groups) - 0.5, -0.6)
    most = max(1.0, *(r.record["roofline_fraction"] for r in rows))
    axis.set_xlim(0, 1.03 * most)
    axis.axvline(1, color="0.4", linestyle=":")
    axis.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
    axis.grid(color="0.92", linewidth=0.6)
    axis.set_axisbelow(True)
    for direction, mark in marks.items():
        axis.scatter([], [], marker=mark, color="0.4", label=direction)
    for block in blocks:
        axis.scatter([], [], marker="o", color=colour(block), label=f"b = {block}")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    peak = "cuBLAS's rate" if any(r.on_card for r in rows) else "FMA peak"
    figure.suptitle(f"Share of what measured {peak} and read bandwidth allow,\nweights from memory")
    save(figure, path)
    plt.close(figure)
    return True


def plot_plain(rows: list[Row], path: Path) -> bool:
    """Panels for each size, from memory and in cache, and pass; a line for each block size and layout over the tokens.

    Losses are crosses below the line of 1. False where no row was timed beside plain kernels.
    """
    if not rows:
        return False
    plt = pyplot()
    groups = grouped_by_matrix(rows)
    lines = [(f"{name}, {where}", some, hot) for name, some in groups.items() for where, hot in STATES]
    shape = {"figsize": (12, 1.2 + 3.2 * len(lines)), "sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(len(lines), 3, layout="constrained", **shape)
    colour = colours(r.problem.block for r in rows)
    densities = sorted({round(r.density, 2) for r in rows}, reverse=True)
    dashes = {density: DASHES[i % len(DASHES)] for i, density in enumerate(densities)}
    for line, (name, some, hot) in zip(axes, lines, strict=True):
        for axis, direction in zip(line, DIRECTIONS, strict=True):
            draw_plain(axis, [r for r in some if r.problem.direction == direction], colour, dashes, hot)
            axis.set_title(f"{direction}, {name}")
        line[0].set_ylabel("times as fast as plain Triton")
    ratios = [ratio for r in rows for _, hot in STATES if (ratio := r.over_plain(hot=hot)) is not None]
    axes[0][0].set_ylim(0.95 * min(*ratios, 1), 1.05 * max(*ratios, 1))  # of all panels, which share it
    tokens = sorted({r.problem.n for r in rows})
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [str(n) for n in tokens], rotation=45)
        axis.minorticks_off()
    named = [axis.get_legend_handles_labels() for axis in axes.flat]
    handles = {label: handle for some in named for handle, label in zip(*some, strict=True)}
    order = sorted(handles, key=lambda label: (label == LOST, [int(n) for n in re.findall(r"\d+", label)]))
    figure.legend([handles[label] for label in order], order, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Speed-up over plain Triton kernels, each tuned for its problem")
    save(figure, path)
    plt.close(figure)
    return True


STATES = (("from memory", False), ("in cache", True))
DASHES = ("-", "--", "-.", ":")  # dense layouts to sparse ones
LOST = "slower than plain"
RATIOS = (0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10)


def draw_plain(axis: Any, rows: list[Row], colour: Callable[[int], Any], dashes: dict[float, str], hot: bool) -> None:
    """One panel, logarithmic both ways."""
    graphs = {(r.problem.block, r.problem.graph): round(r.density, 2) for r in rows}
    for (block, graph), density in graphs.items():
        some = [r for r in rows if (r.problem.block, r.problem.graph) == (block, graph)]
        points = sorted((r.problem.n, ratio) for r in some if (ratio := r.over_plain(hot=hot)) is not None)
        if not points:
            continue
        name = graph.split("(")[0]
        label = f"b = {block}, {100 * density:.0f} %" + ("" if name == "random" else f", {name}")
        axis.plot(
            *zip(*points, strict=True), dashes[density], marker="o", markersize=3, color=colour(block), label=label
        )
        lost = [point for point in points if point[1] < 1]
        if lost:
            axis.plot(*zip(*lost, strict=True), "x", color="tab:red", markersize=8, label=LOST)
    axis.axhline(1, color="0.4", linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.set_yticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
    axis.minorticks_off()
    axis.grid(color="0.92", linewidth=0.6)
