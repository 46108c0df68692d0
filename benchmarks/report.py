"""Results as a Markdown table and pictures: speed-up against density, share of the roofline, plain kernels by tokens.

python benchmarks/report.py benchmarks/results/2026-11-22-amd-epyc-zen3.jsonl [--output FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pictures import plot_plain, plot_roofline, plot_speed_up
from records import Problem, Record, Results
from rows import DIRECTIONS, FEW, Group, Row, grouped_by_matrix, kind, rows_beside_plain, rows_of, title

TIMES = ("us", "us_hot")  # from memory, in cache
TWIN = 0.25  # how far the number of blocks may be away
GEOMETRIC = "Geometric means over the problems of this file, with the smallest and how many are below 1."


def number(value: float | None, losing_below: float = 0.0) -> str:
    """Three digits; bold where it is a loss."""
    if value is None:
        return ""
    text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"**{text}**" if value < losing_below else text


def table(names: str, rows: Iterable[Iterable[str]], *, numbers: bool = True) -> list[str]:
    """A Markdown table; columns are set to the right but for these names, or all to the left without numbers."""
    columns = names.split(" | ")
    rule = [
        "---:" if numbers and name not in ("pass", "layout", "problem", "way", "machine") else "---" for name in columns
    ]
    lines = [columns, rule, *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def geometric_mean(values: list[float]) -> str:
    """As text; a dash for none."""
    return f"{statistics.geometric_mean(values):.2f}x" if values else "-"


def summary(rows: list[Row]) -> list[str]:
    """Means by block size and direction, and how many problems were lost; on a card for few tokens and for many."""
    if rows and rows[0].on_card and not rows[0].problem.is_conv:
        few = [row for row in rows if row.problem.n <= FEW]
        many = [row for row in rows if row.problem.n > FEW]
        tables = [(f"Up to {FEW} tokens", few), ("More tokens", many)]
        text = [["", f"{name}.", "", *means_table(some)] for name, some in tables if some]
        return [GEOMETRIC, *(line for part in text for line in part)]
    return [GEOMETRIC, "", *means_table(rows)]


def means_table(rows: list[Row]) -> list[str]:
    """The means themselves."""
    cells = []
    for direction in DIRECTIONS:
        for block in sorted({row.problem.block for row in rows}):
            some = [row for row in rows if (row.problem.direction, row.problem.block) == (direction, block)]
            if some:
                cells.append([direction, str(block), str(len(some)), *means(some, rows)])
    cells.append(["all", "", str(len(rows)), *means(rows, rows)])
    names = "pass | b | problems | over dense | smallest | lost"
    names += f" | over {sparse_name(rows)} | smallest | lost" if has_sparse(rows) else ""
    names += " | t / (d t_d)" + (" | of roofline" if has_roofline(rows) else "")
    return table(names, cells)


def has_sparse(rows: list[Row]) -> bool:
    """Whether a sparse library was timed; none has convolutions."""
    return any(row.sparse for row in rows)


def has_roofline(rows: list[Row]) -> bool:
    """Whether lines tell their share of it."""
    return any(row.share("roofline") is not None for row in rows)


def sparse_name(rows: list[Row]) -> str:
    """Of the sparse libraries on that device."""
    return "cuSPARSE" if rows and rows[0].on_card else "LIBXSMM"


def means(rows: list[Row], of: list[Row]) -> list[str]:
    """The cells of one line of the summary of a table."""
    cells = []
    for values in ([r.speed_up for r in rows], [r.over_sparse for r in rows])[: 1 + has_sparse(of)]:
        known = [v for v in values if v is not None]
        smallest = f"{min(known):.2f}x" if known else "-"
        cells += [geometric_mean(known), smallest, str(sum(v < 1 for v in known)) if known else "-"]
    ideal = [r.ideal for r in rows if r.ideal]
    cells.append(geometric_mean(ideal).rstrip("x"))
    shares = [share for r in rows if (share := r.share("roofline")) is not None]
    if has_roofline(of):
        cells.append(percent(statistics.fmean(shares) if shares else None))
    return cells


def percent(share: float | None) -> str:
    """Nothing for none."""
    return "" if share is None else f"{100 * share:.0f} %"


def details(rows: list[Row]) -> list[str]:
    """A table for each group."""
    sparse, with_sparse = sparse_name(rows), has_sparse(rows)
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    lines = []
    for group, members in groups.items():
        names = "pass | layout | b | density | us | dense us | by | over dense | t / (d t_d)"
        names += f" | {sparse} us | over {sparse}" if with_sparse else ""
        names += " | GFLOP/s | of peak | of roofline" if has_roofline(rows) else ""
        cells = [detail(row, with_sparse, has_roofline(rows)) for row in members]
        lines += ["", f"### {title(group)}", "", *table(names, cells)]
    return lines


def detail(row: Row, with_sparse: bool, with_roofline: bool) -> list[str]:
    """The cells of one problem."""
    dense, by = row.dense or (None, "")
    speed_up = row.speed_up
    cells = [
        row.problem.direction,
        f"`{row.problem.graph}`",
        str(row.problem.block),
        f"{100 * row.density:.3g} %",
        number(row.us),
        number(dense),
        by + ", grouped" * row.grouped,
        number(speed_up, losing_below=1),
        number(row.ideal),
    ]
    if with_sparse:
        cells += [sparse_cell(row), number(row.over_sparse, losing_below=1)]
    if with_roofline:
        cells += [number(row.record.get("gflops")), percent(row.share("peak")), percent(row.share("roofline"))]
    return cells


def sparse_cell(row: Row) -> str:
    """The fastest sparse library's time; on a card, and its format."""
    us, name = row.sparse or (None, "")
    if not row.on_card or not name:
        return number(us)
    padded = ", padded" if "padded" in row.record.get("notes", {}).get(name, "") else ""
    return f"{number(us)} ({name.removeprefix('cusparse_').upper()}{padded})"


def threads_table(rows: list[Row]) -> list[str]:
    """How much faster several threads are than one, where both were measured."""

    def alone(p: Problem) -> tuple[Any, ...]:
        return (p.direction, p.dtype, p.graph, p.n, p.block, p.seed, p.order, p.setting)

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
    """What a block of a layout with hubs costs, beside one of balanced and random layouts of about as many."""

    def twin(row: Row, graph: str) -> Row | None:
        same = (row.group, row.problem.direction, row.problem.block)
        some = [r for r in rows if kind(r.problem) == graph and (r.group, r.problem.direction, r.problem.block) == same]
        some = [r for r in some if abs(r.density / row.density - 1) < TWIN]
        return min(some, key=lambda r: abs(r.density - row.density), default=None)

    cells = []
    for row in rows:
        twins = [twin(row, graph) for graph in ("balanced", "random")] if kind(row.problem) == "ba" else []
        for other in filter(None, twins):
            blocks = row.density / other.density
            ratios = [number(row.record[k] / other.record[k] / blocks) if k in row.record else "" for k in TIMES]
            cells.append([f"`{row.problem.line}`", f"`{other.problem.graph}`", *ratios])
    if not cells:
        return []
    lines = ["", "## Layouts with hubs", "", "Time of a block over that of a block in a layout without.", ""]
    return lines + table("problem | layout | from memory | in cache", cells)


def plain_tables(rows: list[Row]) -> list[str]:
    """Ours beside plain Triton kernels: means by pass and block size, then each problem over all numbers of tokens."""
    if not rows:
        return []
    lines = ["", "## Beside plain Triton kernels", ""]
    lines += [
        "How many times as long kernels of 20 lines take (`benchmarks/peers/triton_plain.py`), in the fastest of a"
    ]
    lines += ["handful of shapes. From memory: weights are rotated, which a wgrad has not. Bold: they are faster."]
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.problem.direction, row.problem.block].append(row)
    cells = [[which, str(block), str(len(some)), *plain_means(some)] for (which, block), some in groups.items()]
    cells.sort(key=lambda line: (DIRECTIONS.index(line[0]), int(line[1])))
    cells.append(["all", "", str(len(rows)), *plain_means(rows)])
    names = "pass | b | problems | from memory | smallest | lost | in cache | smallest | lost"
    lines += ["", *table(names, cells)]
    for name, some in grouped_by_matrix(rows).items():
        tokens = sorted({row.problem.n for row in some})
        by_problem: dict[tuple[str, str, str, str], dict[int, str]] = defaultdict(dict)
        for row in some:
            p = row.problem
            ratios = (number(row.over_plain(hot=hot), losing_below=1) for hot in (False, True))
            line = (p.direction, f"`{p.graph}`", str(p.block), percent(row.density))
            by_problem[line][p.n] = " / ".join(ratios)
        cells = [[*line, *(times.get(n, "") for n in tokens)] for line, times in by_problem.items()]
        names = " | ".join(["pass", "layout", "b", "density", *(f"N = {n}" for n in tokens)])
        lines += ["", f"{name}, from memory / in cache.", "", *table(names, cells)]
    return lines


def plain_means(rows: list[Row]) -> list[str]:
    """Geometric mean, smallest, and how many below 1, from memory and in cache."""
    cells = []
    for hot in (False, True):
        ratios = [ratio for row in rows if (ratio := row.over_plain(hot=hot)) is not None]
        cells += [geometric_mean(ratios), f"{min(ratios):.2f}x" if ratios else "-", str(sum(r < 1 for r in ratios))]
    return cells


def python_table(results: Results) -> list[str]:
    """Libraries that are called from Python; times hold Python's own."""
    names = sorted({name for record in results.python.values() for name in record["vs"]})
    if not names:
        return []
    versions = next(iter(results.python.values()))["versions"]
    lines = ["", "## Beside Python libraries", ""]
    what = "of GPU time" if results.on_card else "a call from Python"
    lines += [f"Microseconds {what}, and in parentheses over ours; a run of its own, weights from memory."]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()) + ".", ""]
    cells = []
    for line, record in results.python.items():
        cells.append([f"`{line}`", number(record["us"]), *(python_cell(record, name) for name in names)])
    over = [[r["vs"][name] / r["us"] for r in results.python.values() if name in r["vs"]] for name in names]
    cells.append(["geometric mean, over ours", "", *(geometric_mean(ratios) for ratios in over)])
    lines += table(" | ".join(["problem", "blocksparse", *names]), cells)
    eager = [(line, record["us_eager"]) for line, record in results.python.items() if "us_eager" in record]
    if eager:
        names = sorted({name for _, times in eager for name in times})
        cells = [[f"`{line}`", *(number(times.get(name)) for name in names)] for line, times in eager]
        lines += ["", "Microseconds of a call from Python, weights in cache.", ""]
        lines += table(" | ".join(["problem", *names]), cells)
    return lines


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
    card = f", driver {h.get('driver', 'unknown')}, CUDA {h['cuda']}" if results.on_card else ""
    name = h["device"].split(": ", 1)[1] + ("" if results.on_card else f", {h['isa']}")
    built = f"commit {h['commit'] or 'unknown'}" + (f", {h['compiler']}" if "compiler" in h else "")
    lines = [f"# {name}, {h['date'][:10]}", ""]
    lines += [f"blocksparse {h['library']} ({built}), {h.get('os', 'system unknown')}{card}. {opponents}."]
    lines += [
        "Times are medians in microseconds, weights from memory; dense is the fastest dense library. t / (d t_d) is"
    ]
    lines += ["our time over density times the dense time: 1 or less is the aim. Bold: slower than the other library."]
    if any(row.grouped for row in rows):
        lines += ["Block-diagonal convolutions are beside grouped ones, which do as little."]
    lines += ["", *(f"![{p.stem}]({p.name})" for p in pictures)]
    if rows:
        lines += ["", "## In short", "", *summary(rows)]
    lines += [*threads_table(rows), *hubs_table(rows), *plain_tables(rows_beside_plain(results))]
    lines += python_table(results)
    if rows:
        lines += ["", "## Every problem", *details(rows)]
    return "\n".join(lines) + "\n"


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
        plain = rows_beside_plain(results)
        plots = (("speed-up", plot_speed_up, rows), ("roofline", plot_roofline, rows), ("plain", plot_plain, plain))
        for name, plot, of in plots:
            picture = folder / f"{options.results.stem}-{name}.png"
            if plot(of, picture):
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
