"""Results as a Markdown table and two pictures: speed-up against density, and share of the roofline.

python benchmarks/report.py benchmarks/results/2026-11-21-amd-epyc-avx2.jsonl [--output FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import Problem, Record, Results

DENSE = ("openblas", "onednn")
DIRECTIONS = ("fprop", "dgrad", "wgrad")
TIMES = ("us", "us_hot")  # from memory, in cache
Group = tuple[str, int, int, int, str, int]


@dataclass
class Row:
    """One problem of the file."""

    problem: Problem
    record: Record

    @property
    def us(self) -> float:
        """Ours, weights from memory where that was timed."""
        return float(self.record.get("us") or self.record["us_hot"])

    def of(self, library: str) -> float | None:
        """Another library's time, in us."""
        times = self.record.get("vs") or self.record.get("vs_hot") or {}
        return times.get(library)

    @property
    def dense(self) -> tuple[float, str] | None:
        """Time and name of the fastest dense library."""
        return min(((us, name) for name in DENSE if (us := self.of(name)) is not None), default=None)

    @property
    def speed_up(self) -> float | None:
        """Over the fastest dense library."""
        return self.dense[0] / self.us if self.dense else None

    @property
    def over_libxsmm(self) -> float | None:
        """How many times LIBXSMM's best variant takes our time."""
        us = self.of("libxsmm")
        return None if us is None else us / self.us

    @property
    def density(self) -> float:
        """Share of blocks that are there."""
        return float(self.record["density"])

    @property
    def group(self) -> Group:
        """What rows of one table have in common."""
        p = self.problem
        return (p.dtype, self.record["out"], self.record["in"], p.n, p.order, p.threads)


def rows_of(results: Results) -> list[Row]:
    """All rows of blocksparse-bench, by group, direction, graph, block size and density."""
    rows = [Row(Problem.parse(line), record) for line, record in results.bench.items()]

    def key(row: Row) -> tuple[Any, ...]:
        p = row.problem
        dtype, *rest = row.group
        return (dtype != "f32", dtype, *rest, DIRECTIONS.index(p.direction), kind(p), p.block, row.density)

    return sorted(rows, key=key)


def kind(problem: Problem) -> str:
    """The generator's name."""
    return problem.graph.split("(")[0]


def title(group: Group) -> str:
    """The group in words."""
    dtype, out, in_, n, order, threads = group
    return f"{out} x {in_}, N = {n}, {dtype}, {order}, {threads} thread{'s' if threads > 1 else ''}"


# ---- the table


def number(value: float | None, losing_below: float = 0.0) -> str:
    """Three digits; bold where it is a loss."""
    if value is None:
        return ""
    text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"**{text}**" if value < losing_below else text


def table(names: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table; columns after the first three words are numbers, and so set to the right."""
    columns = names.split(" | ")
    rule = ["---" if name in ("pass", "layout", "problem") else "---:" for name in columns]
    lines = [columns, rule, *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def geometric_mean(values: list[float]) -> str:
    """As text; a dash for none."""
    return f"{statistics.geometric_mean(values):.2f}x" if values else "-"


def summary(rows: list[Row]) -> list[str]:
    """Means by block size and direction, and how many problems were lost."""
    lines = ["Geometric means over the problems of this file, with the smallest and how many are below 1.", ""]
    cells = []
    for direction in DIRECTIONS:
        for block in sorted({row.problem.block for row in rows}):
            some = [row for row in rows if (row.problem.direction, row.problem.block) == (direction, block)]
            if some:
                cells.append([direction, str(block), str(len(some)), *means(some)])
    cells.append(["all", "", str(len(rows)), *means(rows)])
    names = "pass | b | problems | over dense | smallest | lost | over LIBXSMM | smallest | lost | t / (d t_d)"
    return lines + table(names + " | of roofline", cells)


def means(rows: list[Row]) -> list[str]:
    """The cells of one line of the summary."""
    cells = []
    for values in ([r.speed_up for r in rows], [r.over_libxsmm for r in rows]):
        known = [v for v in values if v is not None]
        smallest = f"{min(known):.2f}x" if known else "-"
        cells += [geometric_mean(known), smallest, str(sum(v < 1 for v in known)) if known else "-"]
    ideal = [1 / (r.speed_up * r.density) for r in rows if r.speed_up]
    share = statistics.fmean(r.record["roofline_fraction"] for r in rows)
    return [*cells, geometric_mean(ideal).rstrip("x"), f"{100 * share:.0f} %"]


def details(rows: list[Row]) -> list[str]:
    """A table for each group."""
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    lines = []
    for group, members in groups.items():
        names = "pass | layout | b | density | us | dense us | by | over dense | t / (d t_d) | LIBXSMM us"
        names += " | over LIBXSMM | GFLOP/s | of peak | of roofline"
        lines += ["", f"### {title(group)}", "", *table(names, map(detail, members))]
    return lines


def detail(row: Row) -> list[str]:
    """The cells of one problem."""
    dense, by = row.dense or (None, "")
    speed_up = row.speed_up
    return [
        row.problem.direction,
        f"`{row.problem.graph}`",
        str(row.problem.block),
        f"{100 * row.density:.3g} %",
        number(row.us),
        number(dense),
        by,
        number(speed_up, losing_below=1),
        number(1 / (speed_up * row.density) if speed_up else None),
        number(row.of("libxsmm")),
        number(row.over_libxsmm, losing_below=1),
        number(row.record["gflops"]),
        f"{100 * row.record['peak_fraction']:.0f} %",
        f"{100 * row.record['roofline_fraction']:.0f} %",
    ]


def threads_table(rows: list[Row]) -> list[str]:
    """How much faster several threads are than one, where both were measured."""

    def alone(p: Problem) -> tuple[Any, ...]:
        return (p.direction, p.dtype, p.graph, p.n, p.block, p.seed, p.order)

    single = {alone(row.problem): row for row in rows if row.problem.threads == 1}
    cells = []
    for row in rows:
        one = single.get(alone(row.problem))
        if row.problem.threads == 1 or one is None:
            continue
        ratios = [
            number(one.record[key] / row.record[key]) if key in one.record and key in row.record else ""
            for key in TIMES
        ]
        cells.append([f"`{row.problem.line}`", *ratios])
    if not cells:
        return []
    return ["", "## Threads", "", "Speed over one thread.", "", *table("problem | from memory | in cache", cells)]


def hubs_table(rows: list[Row]) -> list[str]:
    """What a block of a layout with hubs costs, beside one of a balanced layout of about as many."""

    def same(row: Row) -> tuple[Any, ...]:
        return (row.group, row.problem.direction, row.problem.block)

    balanced = {same(row): row for row in rows if kind(row.problem) == "balanced"}
    cells = []
    for row in rows:
        twin = balanced.get(same(row))
        if kind(row.problem) != "ba" or twin is None:
            continue
        blocks = row.density / twin.density
        ratios = [number(row.record[key] / twin.record[key] / blocks) if key in row.record else "" for key in TIMES]
        cells.append([f"`{row.problem.line}`", f"`{twin.problem.graph}`", *ratios])
    if not cells:
        return []
    lines = ["", "## Layouts with hubs", "", "Time of a block over that of a block in a balanced layout.", ""]
    return lines + table("problem | layout | from memory | in cache", cells)


def python_table(results: Results) -> list[str]:
    """Libraries that are called from Python; times hold Python's own."""
    names = sorted({name for record in results.python.values() for name in record["vs"]})
    if not names:
        return []
    versions = next(iter(results.python.values()))["versions"]
    lines = ["", "## Beside Python libraries", ""]
    lines += ["Microseconds a call from Python, and in parentheses over ours; a run of its own, weights from memory."]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()) + ".", ""]
    cells = []
    for line, record in results.python.items():
        cells.append([f"`{line}`", number(record["us"]), *(python_cell(record, name) for name in names)])
    return lines + table(" | ".join(["problem", "blocksparse", *names]), cells)


def python_cell(record: Record, name: str) -> str:
    """One library's time, and over ours; bold where ours is slower."""
    us = record["vs"].get(name)
    if us is None:
        return ""
    losing_below = 0.0 if name.startswith("blocksparse") else 1.0
    return f"{number(us)} ({number(us / record['us'], losing_below)})"


def markdown(results: Results, pictures: Iterable[Path]) -> str:
    """The whole page."""
    h = results.header
    rows = rows_of(results)
    opponents = ", ".join(f"{name} {version}" for name, version in h["opponents"].items())
    lines = [f"# {h['device'].removeprefix('cpu: ')}, {h['isa']}, {h['date'][:10]}", ""]
    lines += [
        f"blocksparse {h['library']} (commit {h['commit'] or 'unknown'}, {h['compiler']}), {h['os']}. {opponents}."
    ]
    lines += [
        "Times are medians in microseconds, weights from memory; dense is the fastest dense library. t / (d t_d) is"
    ]
    lines += ["our time over density times the dense time: 1 or less is the aim. Bold: slower than the other library."]
    lines += ["", *(f"![{p.stem}]({p.name})" for p in pictures), "", "## In short", "", *summary(rows)]
    lines += [*threads_table(rows), *hubs_table(rows), *python_table(results), "", "## Every problem", *details(rows)]
    return "\n".join(lines) + "\n"


# ---- the pictures


def pyplot() -> Any:
    """matplotlib without a screen."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
    return plt


def colours(values: Iterable[int]) -> Callable[[int], Any]:
    """From light to dark by size."""
    import matplotlib as mpl

    order = sorted(set(values))
    return lambda v: mpl.colormaps["viridis"](0.85 * (1 - order.index(v) / max(len(order) - 1, 1)))


def plot_speed_up(rows: list[Row], path: Path) -> bool:
    """A panel for each width and pass, a line for each block size. False where nothing has two densities."""
    rows = [r for r in rows if kind(r.problem) == "random" and r.speed_up]
    rows = [r for r in rows if r.group[:1] + r.group[3:] == ("f32", 64, "features-last", 1)]
    widths = sorted({r.group[1:3] for r in rows if sum(s.group == r.group for s in rows) > 3})
    rows = [r for r in rows if r.group[1:3] in widths]
    if not rows:
        return False
    plt = pyplot()
    colour = colours(r.problem.block for r in rows)
    shape = {"figsize": (12, 0.6 + 3.9 * len(widths)), "sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(len(widths), 3, layout="constrained", **shape)
    for line, width in zip(axes, widths, strict=True):
        for axis, direction in zip(line, DIRECTIONS, strict=True):
            some = [r for r in rows if r.group[1:3] == width and r.problem.direction == direction]
            draw_speed_up(axis, some, colour)
            axis.set_title(f"{direction}, {width[0]} x {width[1]}")
        line[0].set_ylabel("times as fast as dense")
    for axis in axes[-1]:
        axis.set_xlabel("density")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    blocks = sorted((label for label in handles if label.startswith("b")), key=lambda label: int(label[4:]))
    order = [*blocks, *(label for label in handles if not label.startswith("b"))]
    axes[0][-1].legend([handles[label] for label in order], order, frameon=False)
    figure.suptitle(
        "Speed-up over the fastest dense library: N = 64, f32, features-last, 1 thread, weights from memory"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def draw_speed_up(axis: Any, rows: list[Row], colour: Callable[[int], Any]) -> None:
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
    axis.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axis.minorticks_off()
    axis.grid(color="0.92", linewidth=0.6)


def plot_roofline(rows: list[Row], path: Path) -> bool:
    """A line for each group of problems, a point for each problem."""
    if not rows:
        return False
    plt = pyplot()
    groups = list(dict.fromkeys(r.group for r in rows))
    blocks = sorted({r.problem.block for r in rows})
    colour = colours(blocks)
    marks = dict(zip(DIRECTIONS, "o^s", strict=True))
    figure, axis = plt.subplots(figsize=(11, 1.8 + 0.42 * len(groups)), layout="constrained")
    for y, group in enumerate(groups):
        for r in (r for r in rows if r.group == group):
            shift = 0.22 * (DIRECTIONS.index(r.problem.direction) - 1)
            style = {"marker": marks[r.problem.direction], "s": 26, "alpha": 0.8, "linewidths": 0}
            axis.scatter(r.record["roofline_fraction"], y + shift, color=colour(r.problem.block), **style)
    axis.set_yticks(range(len(groups)), [title(g) for g in groups])
    axis.set_ylim(len(groups) - 0.4, -0.6)
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
    figure.legend(loc="outside lower center", ncols=len(marks) + len(blocks), frameon=False)
    axis.set_title("Share of what measured FMA peak and read bandwidth allow, weights from memory")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--output", type=Path, help="folder of the page and its pictures (default: that of the results)"
    )
    options = parser.parse_args(arguments)
    folder = options.output or options.results.parent
    try:
        results = Results.read(options.results)
        rows = rows_of(results)
        folder.mkdir(parents=True, exist_ok=True)
        pictures = []
        for name, plot in (("speed-up", plot_speed_up), ("roofline", plot_roofline)):
            picture = folder / f"{options.results.stem}-{name}.png"
            if plot(rows, picture):
                pictures.append(picture)
        page = folder / f"{options.results.stem}.md"
        page.write_text(markdown(results, pictures), encoding="utf-8")
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in (page, *pictures):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
