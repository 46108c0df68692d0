"""Makes docs/performance/<machine>.md and its pictures from files of results; machines.py says which.

python benchmarks/machine_pages.py [--check] [MACHINE ...]

--check compares only, without matplotlib, and fails where a page is not what the files of results make.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import crossover
from grids import LATER, LEAST, grid, matrices, speed_up
from machines import MACHINES, Machine, Source
from pictures import plot_roofline, plot_speed_up
from programs import feed_forward, pixelcnn
from records import Problem, Record, Results
from report import hubs_table, number, python_table, summary, table, threads_table
from rows import DIRECTIONS, FEW, PLAIN, TORCH, Row, kind, numbers_of, rows_beside_plain, rows_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = ROOT / "docs/performance"
TABLES = ROOT / "src/gemm/cuda/crossover"
MOST_PANELS = 4
BEGIN, END = "<!-- overview: made by benchmarks/machine_pages.py -->", "<!-- end of the overview -->"
OTHERS = {  # in results, on pages
    "cusparse_bsr": "cuSPARSE, BSR",
    "cusparse_ell": "cuSPARSE, Blocked-ELL",
    "torch_bsr": "PyTorch, BSR",
    "torchao_bsr": "torchao, BSR",
    "stk": "STK",
    "torch_2_4": "cuSPARSELt, 2:4",
    "torch_bmm": "`torch.bmm`",
    "torch_grouped_mm": "PyTorch, grouped",
}
MEANS = """\
Geometric means, the smallest ratio, and how many problems are lost. `t / (d t_d)` is our time over density times dense
time: 1 is ideal scaling. The roofline is the larger of flops at the measured peak and bytes at the measured rate. A
wgrad reads no weights, so little of what it needs may come from memory, and its share may be above 100 %."""
TO_RESULTS, TO_SOURCE = "../../benchmarks/results", "../../src/gemm/cuda"


class Page:
    """What a machine's files hold, read once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.times = crossover.read(TABLES / f"{machine.crossover}.csv") if machine.crossover else {}
        self.timed = {(problem, state): times for problem, state, times in crossover.by_problem(self.times)}
        self.results: dict[Source, Results] = {}
        self.programs: list[Record] = []  # lines that are of no problem
        for source in machine.sources:
            path = RESULTS / f"{source.name}.jsonl"
            if '"problem"' in path.read_text(encoding="utf-8"):
                self.results[source] = Results.read(path)
            else:
                header, *records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
                self.programs += [{**record, "commit": header.get("commit", "")} for record in records]
        lines: dict[str, Row] = {}
        for source, results in self.results.items():
            alone = not source.name.endswith(("-threads", "-peers", "-stk"))
            day = results.header["date"][:10]
            lines.update({row.problem.line: self.newest(row, day) for row in rows_of(results) if alone})
        self.rows = [row for row in lines.values() if row.problem.threads == 1]
        self.threaded = [row for results in self.results.values() for row in rows_of(results)]
        self.beside_plain = [row for results in self.results.values() for row in rows_beside_plain(results)]

    def newest(self, row: Row, day: str) -> Row:
        """With our time of the family that a later run of the card than that day's recorded as faster."""
        if not row.on_card or row.problem.is_conv:
            return row
        problem = crossover.canonical(row.problem.line)
        kernel = crossover.family_of(row.record["kernel"], problem)
        state = "cold" if row.record.get("us") else "hot"
        times = self.timed.get((problem, state), [])
        best = times[0] if times else None  # the fastest
        # The same family counts where it has changed; less than a tenth may be another day's noise.
        if best is None or best.us >= (0.9 if best.family == kernel else 1) * row.us or best.date <= day:
            return row
        share = {key: row.record[key] * row.us / best.us for key in ("roofline_fraction",) if key in row.record}
        return Row(
            row.problem, {**row.record, **share, ("us" if state == "cold" else "us_hot"): best.us, "later": best}
        )

    def markdown(self) -> str:
        """The whole page."""
        machine = self.machine
        lines = [
            f"<!-- Made by benchmarks/machine_pages.py from {TO_RESULTS[6:]}: change these, not this page. -->",
            "",
        ]
        lines += [f"# {machine.title}", "", machine.about]
        lines += ["", *(f"- {remark}" for remark in machine.remarks)] if machine.remarks else []
        linear = [row for row in self.rows if not row.problem.is_conv]
        conv = [row for row in self.rows if row.problem.is_conv]
        for title, rows in (("Linear layers", linear), ("Convolutions", conv)):
            if rows:
                lines += ["", f"## {title}", "", *self.section(title, rows)]
        lines += threads_table(self.threaded) if machine.sources and not self.times else []
        lines += hubs_table(linear)
        lines += self.plain()
        lines += self.others_on_card() if self.times else self.python()
        lines += self.families()
        lines += feed_forward(self.programs)
        lines += pixelcnn(self.programs)
        lines += self.sources()
        return "\n".join(lines).replace(" device=cuda`", "`") + "\n"

    def sources(self) -> list[str]:
        """The files and how they were made."""
        cells = []
        for source in self.machine.sources:
            header = json.loads((RESULTS / f"{source.name}.jsonl").read_text(encoding="utf-8").split("\n", 1)[0])
            versions = ", ".join(f"{name} {version}" for name, version in header["opponents"].items())
            commit = f"`{header['commit'][:7]}`" if header.get("commit") else ""
            system = [f"CUDA {header['cuda']}"] if "cuda" in header else [header["isa"]]
            system += [f"driver {header['driver']}"] if "." in header.get("driver", "") else []
            system += [header["compiler"]] if "compiler" in header else []
            name = f"[{source.what}]({TO_RESULTS}/{source.name}.jsonl)"
            cells.append([name, header["date"][:10], commit, ", ".join(system), versions, f"`{source.command}`"])
        if not cells:
            return []
        names = "file | date | commit | system | beside | command"
        return ["", "## Files of results", "", *table(names, cells, numbers=False)]

    def section(self, title: str, rows: list[Row]) -> list[str]:
        """Means, pictures, and every problem."""
        lines = [MEANS, *summary(rows)[1:]]
        for path, _, of in self.pictures():
            if (of[0].problem.is_conv if of else False) == (title == "Convolutions"):
                alt = "Speed-up over dense against density" if "speed" in path.name else "Share of the roofline"
                lines += ["", f"![{alt}, {self.machine.title}]({path.name})"]
        lines += ["", f"### Every problem: {title.lower()}", "", *self.legend(rows)]
        for name, some in matrices(rows):
            lines += ["", f"{name}:", "", *grid(some, speed_up)]
        if any(row.sparse for row in rows) and not self.times:
            lines += ["", f"### Beside LIBXSMM: {title.lower()}", ""]
            lines += ["How many times as long the fastest of LIBXSMM's products takes. Bold: it is faster."]
            for name, some in matrices([row for row in rows if row.sparse]):
                lines += ["", f"{name}:", "", *grid(some, lambda row: number(row.over_sparse, losing_below=1))]
        return lines

    def legend(self, rows: list[Row]) -> list[str]:
        """What a cell says."""
        conv, on_card = rows[0].problem.is_conv, rows[0].on_card
        library = ("cuDNN's" if conv else "cuBLAS's") if on_card else "the faster library's"
        lines = [f"Times as fast as {library} dense {'convolution' if conv else 'product'}, and our time in us."]
        lines += ["Bold: dense is faster."]
        lines += [
            "Calls are in graphs of 20 and use one weight." if conv and on_card else "Weights come from memory.",
            "A pattern without a name is random.",
        ]
        later = sorted({row.record["later"].date for row in rows if "later" in row.record})
        if later:
            days = ", ".join(later)
            lines += [f"{LATER}: our time is that of a later run ({days}), by another family or one that has changed."]
        if any(row.grouped for row in rows):
            lines += [
                "A block-diagonal layout stands beside a grouped convolution, which computes no more than it does."
            ]
        return lines

    def pictures(self) -> Iterator[tuple[Path, Callable[[list[Row], Path], bool], list[Row]]]:
        """Where each lies, how it is drawn, and of what."""
        for suffix, convolutions in (("", False), ("-conv", True)):
            rows = [row for row in self.rows if row.problem.is_conv == convolutions]
            rows.sort(key=lambda row: (row.dtype not in ("bf16", "f32"), row.dtype, row.size, row.problem.n))
            large = {group for group in {r.group for r in rows} if sum(r.group == group for r in rows) >= LEAST}
            shown = [row for row in rows if row.group in large and row.share("roofline") is not None]
            if any(row.speed_up and kind(row.problem) == "random" for row in rows):
                yield PAGES / f"{self.machine.page}{suffix}-speed.png", plot_machine, rows
            if shown:
                yield PAGES / f"{self.machine.page}{suffix}-roofline.png", plot_roofline, shown

    def python(self) -> list[str]:
        """Libraries that are called from Python, file by file."""
        lines = list[str]()
        for source, results in self.results.items():
            some = python_table(results)
            if some:
                some[1] = f"## {source.what[0].upper()}{source.what[1:]}"
                lines += some
        return lines

    def others_on_card(self) -> list[str]:
        """Libraries for sparse products beside our newest times, where one was timed."""
        ours = {row.problem.line: row.us for row in self.rows}
        cells: dict[str, dict[str, str]] = {}
        for results in self.results.values():
            records = [*results.python.items(), *results.bench.items()]
            for line, library, us in ((line, *item) for line, r in records for item in r.get("vs", {}).items()):
                if line in ours and library in OTHERS:
                    ratio = number(us / ours[line], losing_below=1)
                    cells.setdefault(line, {})[OTHERS[library]] = f"{ratio} ({number(us)})"
        if not cells:
            return []
        names = [name for name in OTHERS.values() if any(name in of for of in cells.values())]
        lines = ["", "## Beside other libraries for sparse products", ""]
        lines += [
            "How many times as long they take, and their time in us; bold: they are faster. Ours are the times of the"
        ]
        lines += ["tables above, theirs of runs of their own. 2:4 has half of the weights, whatever the layout has."]
        rows = [[f"`{line}`", *(of.get(name, "") for name in names)] for line, of in cells.items()]
        return [*lines, "", *table(" | ".join(["problem", *names]), rows)]

    def plain(self) -> list[str]:
        """Ours beside PyTorch's dense product and plain Triton kernels: means, and every problem."""
        rows = self.beside_plain
        if not rows:
            return []
        lines = ["", "## Beside dense and plain Triton kernels", ""]
        lines += [
            "How many times as long cuBLAS's dense product takes, how many times as long plain Triton kernels take,",
            "and our time in us. Those kernels have 20 lines (`benchmarks/peers/triton_plain.py`), in the fastest of a",
            "handful of shapes. Weights come from memory. Bold: the other is faster.",
        ]
        groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in rows:
            groups[row.problem.direction, row.problem.block].append(row)
        order = sorted(groups, key=lambda key: (DIRECTIONS.index(key[0]), key[1]))
        cells = [[key[0], str(key[1]), *means_over(groups[key])] for key in order]
        names = "pass | b | problems | over dense | smallest | lost | over Triton | smallest | lost"
        lines += ["", *table(names, [*cells, ["all", "", *means_over(rows)]])]
        for name, some in matrices(rows):
            lines += ["", f"{name}: over dense, over Triton (us).", "", *grid(some, plain_cell)]
        return lines

    def families(self) -> list[str]:
        """The fastest family that is recorded for each problem of one matrix."""
        if not self.times:
            return []
        cells: dict[tuple[str, int, str], dict[int, str]] = defaultdict(dict)
        for (text, state), times in self.timed.items():
            problem = Problem.parse(text)
            plain = problem.dtype == "bf16" and not problem.others and problem.order == "features-last"
            if not re.fullmatch(rf"random\({4096 // problem.block},[\d.]+\)", problem.graph) or not plain:
                continue
            if state == "hot" and len(times) > 1:
                text = f"{number(times[0].us)} {times[0].family} ({times[1].us / times[0].us:.2f})"
                cells[problem.direction, problem.n, f"{100 * numbers_of(problem)[-1]:g} %"][problem.block] = text
        name = self.machine.crossover
        lines = ["", "## Families of kernels, side by side", ""]
        lines += [
            "4096 x 4096, bf16, random patterns, weights in cache: the fastest family that was timed, its time in us,"
        ]
        lines += [
            f"and how many times as long the next one takes. [{name}.csv]({TO_SOURCE}/crossover/{name}.csv) has all"
        ]
        lines += [f"times, and the [notes of each family]({TO_SOURCE}/NOTES.md) say how it works."]
        for which in DIRECTIONS:
            some = {key: of for key, of in cells.items() if key[0] == which}
            blocks = sorted({block for of in some.values() for block in of})
            order = sorted(some, key=lambda key: (key[1], -float(key[2][:-2])))
            rows = [[str(n), share, *(some[_, n, share].get(b, "") for b in blocks)] for _, n, share in order]
            names = " | ".join(["tokens", "density", *(f"b = {b}" for b in blocks)])
            lines += ["", f"{which}:", "", *table(names, rows)] if rows else []
        return lines


def over(row: Row, library: str) -> float | None:
    """How many times our time another library takes."""
    us = row.of(library)
    return None if us is None else us / row.us


def means_over(rows: list[Row]) -> list[str]:
    """How many problems; over dense and over plain Triton kernels, mean, smallest ratio, and how many are lost."""
    cells = [str(len(rows))]
    for library in (TORCH, PLAIN):
        ratios = [ratio for row in rows if (ratio := over(row, library)) is not None]
        cells += [f"{statistics.geometric_mean(ratios):.2f}x", f"{min(ratios):.2f}x", str(sum(r < 1 for r in ratios))]
    return cells


def plain_cell(row: Row) -> str:
    """The cell of a problem."""
    return f"{', '.join(number(over(row, of), losing_below=1) for of in (TORCH, PLAIN))} ({number(row.us)})"


def kind_of(row: Row) -> tuple[int, str]:
    """What it counts to in the overview, and where that stands."""
    if row.problem.is_conv:
        return 4, f"convolutions, {row.dtype}"
    place = 0 if row.dtype in ("bf16", "f32") else 2
    if not row.on_card:
        return place, f"linear, {row.dtype}"
    few = row.problem.n <= FEW
    return place + (not few), f"linear, {row.dtype}, " + (f"up to {FEW} tokens" if few else "more tokens")


def overview(pages: list[Page]) -> list[str]:
    """A line for each machine and kind of problem: means, what 10 % of the blocks give, and losses."""
    cells = []
    for page in pages:
        kinds: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in [*page.rows, *page.beside_plain]:
            if (row.speed_up or over(row, TORCH)) and not row.grouped:
                kinds[kind_of(row)].append(row)
        for (_, name), rows in sorted(kinds.items()):
            if len(rows) < 2 * LEAST:
                continue
            every = [(row.speed_up or over(row, TORCH) or 0.0, row.density) for row in rows]
            ratios = [ratio for ratio, _ in every]
            tenth = [ratio for ratio, density in every if abs(density - 0.1) < 0.005]
            ranged = f"{min(tenth):.1f} to {max(tenth):.1f}" if tenth else ""
            lost = sum(ratio < 1 for ratio in ratios)
            text = f"**{lost}**" if lost else "0"
            link = f"[{page.machine.title}]({page.machine.page}.md)"
            cells.append([link, name, str(len(rows)), f"{statistics.geometric_mean(ratios):.1f}", ranged, text])
    return table("machine | problem | problems | times as fast as dense | with 10 % of the blocks | dense wins", cells)


def with_overview(text: str, pages: list[Page]) -> str:
    """The page that links to all, with the overview between its marks."""
    before, mark, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}")
    if not mark or not end:
        raise ValueError(f"docs/performance/index.md needs {BEGIN} and {END}")
    return before + mark + "\n".join(["", *overview(pages), ""]) + end + after


def plot_machine(rows: list[Row], path: Path) -> bool:
    """Speed-up of fprop and wgrad, of the groups with the most problems."""
    return plot_speed_up(rows, path, directions=("fprop", "wgrad"), most=MOST_PANELS)


def differing(pages: list[Page]) -> list[str]:
    """Which pages and pictures are not what the results make."""
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    wrong = [PAGES / "index.md"] if len(pages) == len(MACHINES) and index != with_overview(index, pages) else []
    for page in pages:
        path = PAGES / f"{page.machine.page}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != page.markdown():
            wrong.append(path)
        wrong += [picture for picture, _, _ in page.pictures() if not picture.exists()]
    return [
        f"{path.relative_to(ROOT)} differs from its results: run python benchmarks/machine_pages.py" for path in wrong
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=", ".join(machine.page for machine in MACHINES))
    parser.add_argument("--check", action="store_true", help="compare with the pages that are there")
    options = parser.parse_args(arguments)
    chosen = [machine for machine in MACHINES if machine.page in (options.machines or [m.page for m in MACHINES])]
    if len(chosen) < len(set(options.machines)):
        parser.error(f"there are {', '.join(machine.page for machine in MACHINES)}")
    pages = [Page(machine) for machine in chosen]
    if options.check:
        wrong = differing(pages)
        print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
        return 1 if wrong else 0
    for page in pages:
        for picture, plot, rows in page.pictures():
            if plot(rows, picture):
                print(picture.relative_to(ROOT))
        path = PAGES / f"{page.machine.page}.md"
        path.write_text(page.markdown(), encoding="utf-8")
        print(path.relative_to(ROOT))
    if len(pages) == len(MACHINES):
        index = PAGES / "index.md"
        index.write_text(with_overview(index.read_text(encoding="utf-8"), pages), encoding="utf-8")
        print(index.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
