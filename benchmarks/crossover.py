"""Where one family of CUDA kernels becomes faster than another: the tables in src/gemm/cuda/crossover.

    python benchmarks/crossover.py add RESULTS.jsonl... --csv src/gemm/cuda/crossover/h200.csv
    python benchmarks/crossover.py show --csv src/gemm/cuda/crossover/h200.csv
    python benchmarks/crossover.py without FAMILY... --csv src/gemm/cuda/crossover/h200.csv
    python benchmarks/crossover.py drop FAMILY --before 2026-11-24 --csv src/gemm/cuda/crossover/h200.csv

A table is of one card, which its name says. Each of its rows is one family's time for one problem. Results come from
`blocksparse-bench --device cuda --cuda-kernel each --json --file benchmarks/problems/crossover/cuda.txt`, into a file
whose name begins with the date; a line's "kernel" is the family, or an older name of it. `add` keeps the newest time of
a problem, family and state of the L2 cache. `without` says what deleting families would cost: how much longer the
fastest of the others takes where one of them is the fastest. `drop` takes out the times of a kernel that has changed
since. Times of another tool are typed into the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from records import Problem, Record

ROOT = Path(__file__).resolve().parent.parent
_ROWS = (ROOT / "src/gemm/cuda/families.inc").read_text(encoding="utf-8")
FAMILIES = tuple(re.findall(r"^BS_FAMILY\((\w+),", _ROWS, re.MULTILINE))
# Older names that meant one family; `few` and `many` meant several.
_FAMILY_OF = {
    "regions": "wgrad_in_registers",
    "tiled": "tiled_f32",
    "rows": "row_wgmma",
    "sweep": "stream_x",
    "resident": "w_in_smem",
}
# The words of a linear problem behind its graph, as src/ops/linear/problem.cc writes them, and what needs no word.
_WORDS = {
    "seed": "0",
    "out": "0",
    "in": "0",
    "empty_row": "-1",
    "empty_col": "-1",
    "full_row": "-1",
    "full_col": "-1",
    "t": None,
    "x": "last",
    "y": "last",
    "r": "last",
    "pad": "0",
    "rpad": "-1",
    "offset": "0",
    "w_offset": "0",
    "bias": None,
    "residual": None,
    "act": "none",
    "gates": None,
    "pairs": "1",
    "accumulate": None,
    "dw": "",
    "dgates": None,
    "tf32": None,
    "values": "normal",
    "odd": "0",
}


@dataclass(frozen=True)
class Time:
    """A row of a table."""

    problem: str  # canonical, without device=cuda
    family: str
    us: float  # median
    commit: str
    date: str  # YYYY-MM-DD
    l2: str  # cold: weights come from memory; hot: one set of weights is used again and again
    source: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What a table has one time of."""
        return self.problem, self.family, self.l2


Table = dict[tuple[str, str, str], Time]


def canonical(line: str) -> str:
    """The line of a linear problem as the library writes it, without device=cuda and threads.

    Raises:
        ValueError: it is no linear problem, or a word in it means nothing.
    """
    problem = Problem.parse(line)
    if problem.op != "linear":
        raise ValueError(f"{line!r} is not of the linear op")
    given = {}
    for word in line.split()[1:]:
        key = word.partition("=")[0]
        if "(" not in word and key not in (problem.dtype, "n", "b", "threads", "device"):
            given[key] = word
            if key not in _WORDS or (_WORDS[key] is None) != (word == key):
                raise ValueError(f"{line!r}: {word!r} means nothing")
    graph = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):g}", problem.graph)
    words = [f"linear:{problem.direction}", problem.dtype, f"n={problem.n}", f"b={problem.block}", graph]
    return " ".join(words + [given[key] for key in _WORDS if key in given and given[key] != f"{key}={_WORDS[key]}"])


def family_of(kernel: str, line: str) -> str:
    """The family that a kernel's name means for a problem.

    Raises:
        ValueError: no kernel has or had that name.
    """
    problem = Problem.parse(line)
    if kernel in FAMILIES:
        return kernel
    if kernel == "many":
        return "wgrad_wgmma" if problem.direction == "wgrad" else "wgmma"
    if kernel == "few":
        if problem.direction == "wgrad":
            return "wgrad_stream"
        return "stream_w_f32" if problem.dtype == "f32" and "tf32" not in problem.others else "stream_w"
    if kernel not in _FAMILY_OF:
        raise ValueError(f"there is no family {kernel!r}; there are {', '.join(FAMILIES)}")
    return _FAMILY_OF[kernel]


@dataclass(frozen=True)
class _File:
    """A file of results and what holds for all of its lines."""

    source: str
    commit: str
    made: str  # day, with a time behind it where there is a header
    records: list[Record]

    @classmethod
    def read(cls, path: Path, commit: str = "") -> _File:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
        header = records.pop(0) if records and "header" in records[0] else {}
        name = re.match(r"(\d{4}-\d\d-\d\d-)?(.*)", path.name)
        day, rest = name.groups() if name else (None, path.name)
        made = str(header.get("date") or (day or "").rstrip("-"))
        if not re.match(r"\d{4}-\d\d-\d\d", made):
            raise ValueError(f"{path} has no date, neither in a header nor in its name")
        return cls(rest, str(header.get("commit", commit)), made, records)

    def times(self, card: str) -> Iterator[Time]:
        """Of that card, of linear problems and by our kernels."""
        for record in self.records:
            ours = "by" not in record and record.get("kernel")
            if not ours or not record["problem"].startswith("linear:") or card not in record["device"].lower():
                continue
            problem = canonical(record["problem"])
            family = family_of(record["kernel"], problem)
            for key, l2 in (("us", "cold"), ("us_hot", "hot")):
                if record.get(key) is not None:
                    yield Time(problem, family, float(record[key]), self.commit, self.made[:10], l2, self.source)


def read(path: Path) -> Table:
    """A table.

    Raises:
        ValueError: its columns are others, or a family or a problem is none.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        names = [field.name for field in fields(Time)]
        if rows.fieldnames != names:
            raise ValueError(f"{path} has columns {rows.fieldnames}, needs {names}")
        table: Table = {}
        for row in rows:
            time = Time(
                row["problem"], row["family"], float(row["us"]), row["commit"], row["date"], row["l2"], row["source"]
            )
            if time.family not in FAMILIES or time.l2 not in ("cold", "hot") or time.problem != canonical(time.problem):
                raise ValueError(f"{path}, line {rows.line_num}: {row}")
            if time.key in table:
                raise ValueError(f"{path}, line {rows.line_num}: {time.key} a second time")
            table[time.key] = time
        return table


def write(path: Path, table: Table) -> None:
    """Writes a table, problems in their order, so that what is added is all that differs."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Time)], lineterminator="\n")
        rows.writeheader()
        for time in sorted(table.values(), key=lambda time: (_order(time.problem), time.l2, time.family)):
            rows.writerow({**asdict(time), "us": f"{time.us:g}"})


def _order(line: str) -> tuple[Any, ...]:
    """Small before large: numbers are compared as such, which are every other part."""
    parts = re.split(r"(\d+(?:\.\d+)?)", line)
    return tuple(float(part) if i % 2 else part for i, part in enumerate(parts))


def merge(table: Table, times: Iterable[Time]) -> int:
    """Adds times, or replaces older ones. Returns how many."""
    added = 0
    for time in times:
        old = table.get(time.key)
        if old is None or (time.date >= old.date and time != old):
            table[time.key] = time
            added += 1
    return added


def by_problem(table: Table) -> Iterator[tuple[str, str, list[Time]]]:
    """Problem, state of the L2 cache, and the families that were timed, fastest first."""
    groups: dict[tuple[str, str], list[Time]] = {}
    for time in sorted(table.values(), key=lambda time: (_order(time.problem), time.l2, time.us)):
        groups.setdefault((time.problem, time.l2), []).append(time)
    for (problem, l2), times in groups.items():
        yield problem, l2, times


def show(table: Table) -> None:
    """Prints a line for each problem: the fastest family, the second, and how many times as long it takes."""
    for problem, l2, times in by_problem(table):
        text = f"{problem:60} {l2:4}  {times[0].family:18} {times[0].us:8g}"
        if len(times) > 1:
            text += f"   {times[1].family:18} {times[1].us:8g}  {times[1].us / times[0].us:5.2f}"
        print(text)


def drop(table: Table, family: str, before: str) -> int:
    """Takes out a family's times of before a day. Returns how many."""
    old = [time.key for time in table.values() if time.family == family and time.date < before]
    for key in old:
        del table[key]
    return len(old)


@dataclass(frozen=True)
class Loss:
    """A problem that a family does fastest, and the fastest of those that would be left."""

    best: Time
    other: Time | None  # none was timed

    @property
    def ratio(self) -> float:
        """How many times as long the other takes."""
        return self.other.us / self.best.us if self.other else float("nan")

    @property
    def group(self) -> tuple[str, int, int]:
        """Type and pass, block size, and which of the ranges of tokens."""
        p = Problem.parse(self.best.problem)
        kind = "16 bits" if p.dtype in ("bf16", "f16") else "tf32" if "tf32" in p.others else p.dtype
        pairs = next((int(word.partition("=")[2]) for word in p.others if word.startswith("pairs=")), 1)
        tokens = sum(p.n * pairs > most for most in _MOST_TOKENS)
        return f"{kind} {'wgrad' if p.direction == 'wgrad' else 'fprop, dgrad'}", p.block, tokens


_MOST_TOKENS = (64, 256, 1024, 2048)
_RANGES = ("1 to 64", "65 to 256", "257 to 1024", "1025 to 2048", "more")


def losses(table: Table, families: Iterable[str]) -> list[Loss]:
    """Of all problems that one of these is the fastest for."""
    gone = set(families)
    found = []
    for _, _, times in by_problem(table):
        if times[0].family in gone:
            found.append(Loss(times[0], next((time for time in times if time.family not in gone), None)))
    return found


def without(table: Table, families: Sequence[str]) -> list[str]:
    """A table of what deleting them would cost, by type, block size and tokens. A problem counts by its worse state.

    Losses are in per cent of the time that is recorded now. `alone`: problems that no other family was timed with.
    """
    groups: dict[tuple[str, int, int], dict[str, Loss]] = {}
    alone: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for loss in losses(table, families):
        problem = loss.best.problem
        worst = groups.setdefault(loss.group, {})
        if loss.other is None:
            alone[loss.group].add(problem)
        elif problem not in worst or loss.ratio > worst[problem].ratio:
            worst[problem] = loss
    names = (
        "type, pass | b | tokens | problems | alone | median | worst | > 3 % | > 10 % | worst problem | by | then by"
    )
    rules = "--- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | ---"
    lines = [f"| {names} |", f"| {rules} |"]
    for group in sorted(groups):
        kind, block, tokens = group
        some = sorted(groups[group].values(), key=lambda loss: loss.ratio)
        cells = [kind, str(block), _RANGES[tokens], str(len(some)), str(len(alone[group] - set(groups[group])) or "")]
        last = some[-1] if some else None
        if last and last.other:
            cells += [f"{100 * statistics.median(loss.ratio for loss in some) - 100:.1f} %"]
            cells += [f"{100 * last.ratio - 100:.1f} %"]
            cells += [str(sum(loss.ratio > most for loss in some)) for most in (1.03, 1.1)]
            cells += [f"`{last.best.problem}` {last.best.l2}"]
            cells += [f"{time.family} {time.us:g} us" for time in (last.best, last.other)]
        else:
            cells += [""] * 7
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="merge files of results")
    adding.add_argument("results", nargs="+", type=Path, metavar="RESULTS.jsonl")
    adding.add_argument("--commit", default="", help="that the results without a header are of")
    showing = commands.add_parser("show", help="the best and the second family of each problem")
    deleting = commands.add_parser("without", help="what deleting families would cost")
    deleting.add_argument("families", nargs="+", choices=FAMILIES, metavar="FAMILY")
    dropping = commands.add_parser("drop", help="take out times of a kernel that has changed")
    dropping.add_argument("family", choices=FAMILIES)
    dropping.add_argument("--before", required=True, metavar="YYYY-MM-DD")
    for command in (adding, showing, deleting, dropping):
        command.add_argument("--csv", required=True, type=Path, help="the card's table, h200.csv say")
    options = parser.parse_args(arguments)
    path: Path = options.csv
    try:
        table = read(path)
        if options.command == "show":
            show(table)
        elif options.command == "without":
            print("\n".join(without(table, options.families)))
        elif options.command == "drop":
            print(f"{drop(table, options.family, options.before)} times dropped")
            write(path, table)
        else:
            files = [_File.read(results, options.commit) for results in options.results]
            for results in sorted(files, key=lambda results: results.made):
                print(f"{results.source}: {merge(table, results.times(path.stem.lower()))} times")
            write(path, table)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
