"""Tables and pictures of a file of results: bits per byte against bytes and against seconds, and what was tried.

    python experiments/small_world_lstm/report.py experiments/small_world_lstm/results/cpu.jsonl

Both are written beside it.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sweeps import SETTINGS, bits

from blocksparse.models.lines import need_lines
from blocksparse.program import finish

COLORS = [f"tab:{name}" for name in ["blue", "red", "green", "orange", "purple", "cyan", "pink", "brown", "olive"]]
GRAYS = ["black", "dimgray", "darkgray", "lightgray"]  # of dense arms

Line = dict[str, Any]

KEYS = ("name", "arm", "sweep", "seed", "lr", "parameters", "graph", "hidden")  # of each line
KEYS_OF_RUNS = ("bytes", "valid", "seconds", "curve", "machine", "mix")  # that have not diverged


def runs_of(lines: list[Line]) -> list[Line]:
    """Whole runs that have not diverged."""
    return [line for line in lines if not line["sweep"] and not line.get("diverged")]


def diverged_of(lines: list[Line]) -> str:
    """A sentence behind a table, which names the whole runs that have diverged; "" without any."""
    names = [line["name"] for line in lines if not line["sweep"] and line.get("diverged")]
    return f"\nDiverged: {', '.join(names)}.\n" if names else ""


def longest_by_rate(runs: list[Line]) -> list[list[Line]]:
    """Of an arm's runs the longest, a list for each rate; first the rate that the text that chooses prefers."""
    longest = max(run["bytes"] for run in runs)
    rates: dict[float, list[Line]] = defaultdict(list)
    for run in runs:
        if run["bytes"] == longest:
            rates[run["lr"]].append(run)
    return sorted(rates.values(), key=lambda its: statistics.fmean(map(bits, its)))


def by_arm(lines: list[Line]) -> dict[str, list[Line]]:
    """Runs, the best arm first, but of those that diverged, which are named below the table.

    Runs of several lengths or rates are arms of their own.
    """
    arms: dict[str, list[Line]] = defaultdict(list)
    runs = runs_of(lines)
    several = len({run["bytes"] for run in runs}) > 1
    rates: dict[str, set[float]] = defaultdict(set)
    for run in runs:
        rates[run["arm"]].add(run["lr"])
    for run in runs:
        name = f"{run['arm']}, {run['bytes'] / 1e6:.1f} MB" if several else run["arm"]
        arms[f"{name}, rate {run['lr']:g}" if len(rates[run["arm"]]) > 1 else name].append(run)
    return dict(sorted(arms.items(), key=lambda item: mean(item[1], "valid")))


def mean(runs: list[Line], key: str) -> float:
    """Over the seeds."""
    return statistics.fmean(run[key] for run in runs)


def alone(runs: list[Line]) -> list[Line]:
    """Those whose seconds count: of one machine, the one with most of them."""
    machines = Counter(run["machine"] for run in runs if run.get("alone", True)).most_common(1)
    return [run for run in runs if run.get("alone", True) and run["machine"] == machines[0][0]]


def speed(runs: list[Line]) -> str:
    """Seconds of training and kB/s, the mean of runs whose seconds count: two cells."""
    if not (its := alone(runs)):
        return "beside others | "
    seconds = mean(its, "seconds")
    return f"{seconds:.0f} | {its[0]['bytes'] / 1000 / seconds:.0f}"


def table(arms: dict[str, list[Line]]) -> str:
    """Markdown."""
    rows = [
        "| arm | graph | b | units | parameters | rate | bits/byte, mean | each seed | seconds | kB/s | mix after 2 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, runs in arms.items():
        first = runs[0]
        each = ", ".join(f"{run['valid']:.4f}" for run in sorted(runs, key=lambda run: run["seed"]))
        graph = f"`{first['graph']}`" if first["graph"] else "-"
        mix = f"{100 * statistics.fmean(run['mix'][1] for run in runs):.0f} %" if first["mix"] else "100 %"
        rows.append(
            f"| {arm} | {graph} | {first.get('block', '') if first['graph'] else '-'} | "
            f"{first['hidden']} | {first['parameters']} | {first['lr']:g} | {mean(runs, 'valid'):.4f} | {each} | "
            f"{speed(runs)} | {mix} |"
        )
    return "\n".join(rows) + "\n"


def trials(lines: list[Line]) -> str:
    """Markdown: bits of the text that chooses by all values that were tried, an arm's best bold; "" without any."""
    tried: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        if line["sweep"]:
            updates = line["name"].split("-sweep-")[1].split("-")[0]
            tried[line["arm"], updates].append(line)
    if not tried:
        return ""
    rows = ["", "| arm | updates | swept | bits/byte | best |", "| --- | --- | --- | --- | --- |"]
    for (arm, updates), its in tried.items():
        best = its[0]  # has the usual values of all but the rate
        for setting in SETTINGS:
            others = [other.field for other in SETTINGS if other is not setting]
            found = [line for line in its if all(line.get(field) == best.get(field) for field in others)]
            of = {float(line.get(setting.field, 0)): line for line in found}  # older lines lack some
            if len(of) == 1 and setting.field != "lr":
                continue
            best = min(of.values(), key=bits)
            cells = ", ".join(f"{value:g}: {said(line, line is best)}" for value, line in sorted(of.items()))
            inside = setting.is_inside({value: bits(line) for value, line in of.items()})
            where = "inside" if inside else "at the edge" if len(of) > 1 else "the only one"
            if best.get("diverged"):
                where = "none"
            rows.append(f"| {arm} | {updates} | {setting.words} | {cells} | {where} |")
    return "\n".join(rows) + "\n"


def said(line: Line, is_best: bool) -> str:
    """Its bits in words."""
    if line.get("diverged"):
        return "diverged"
    return f"**{bits(line):.3f}**" if is_best else f"{bits(line):.3f}"


def colors_of(arms: Iterable[str]) -> dict[str, str]:
    """Dense ones are gray, from black on."""
    names = sorted(set(arms), key=lambda arm: (len(arm), arm))
    dense = [name for name in names if name.startswith("dense")]
    others = [name for name in names if name not in dense]
    return {**dict(zip(dense, cycle(GRAYS), strict=False)), **dict(zip(others, cycle(COLORS), strict=False))}


def plot(arms: dict[str, list[Line]], path: Path) -> None:
    """Two panels, one where no seconds count; a line for each seed. The legend is beside, for names are long."""
    colors = colors_of(run["arm"] for runs in arms.values() for run in runs)
    solid: dict[str, str] = {}  # of an arm with several lengths or rates: the longest, and of these the best
    for name, runs in sorted(arms.items(), key=lambda item: -item[1][0]["bytes"]):
        solid.setdefault(runs[0]["arm"], name)
    timed = any(alone(runs) for runs in arms.values())
    figure = Figure(figsize=(12 if timed else 7, 3.8), layout="constrained")
    panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
    chooses = any("choose" in run and run["choose"] != run["valid"] for runs in arms.values() for run in runs)
    scales = ((1e6, "MB of text"), (60, "minutes of training"))
    for column, (axes, (scale, label)) in enumerate(zip(panels, scales, strict=False)):
        for arm, runs in arms.items():
            for i, run in enumerate(runs if column == 0 else alone(runs)):
                x, y = [point[column] / scale for point in run["curve"]], [point[3] for point in run["curve"]]
                words = f"{arm} {mean(runs, 'valid'):.3f}" if i == 0 else None
                style = "-" if solid[run["arm"]] == arm else "--"
                axes.plot(x, y, style, color=colors[run["arm"]], label=words, linewidth=1.3, marker="o", markersize=2.5)
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("bits per byte, text that chooses" if chooses else "bits per byte, held-out text")
    title = "at the end, mean of seeds" + (",\ntext that is reported" if chooses else "")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, title=title)
    figure.savefig(path, dpi=140)


def read(path: Path) -> list[Line]:
    """The first line of each name. Raises ValueError where there are none, or others."""
    named: dict[str, Line] = {}
    for line in need_lines(path, KEYS):
        missing = [key for key in KEYS_OF_RUNS if key not in line]
        if missing and not line["sweep"] and not line.get("diverged"):
            raise ValueError(f"{path}: {line['name']} has no {', '.join(missing)}")
        named.setdefault(line["name"], line)
    return list(named.values())


def main() -> None:
    """Writes both beside the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    lines = read(options.results)
    text = trials(lines)
    if found := by_arm(lines):
        plot(found, options.results.with_suffix(".png"))
        text = table(found) + text
    text += diverged_of(lines)
    options.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    finish(main)
