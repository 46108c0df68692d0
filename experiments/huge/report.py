"""Tables and pictures of what feedforward.py, output_layer.py and memory.py have written.

    python experiments/huge/report.py feedforward experiments/huge/results/feedforward-card.jsonl

Writes FILE.md and FILE.png beside the lines. A row is an arm with a learning rate, over its seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import Line
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from blocksparse.models.lines import read_lines
from blocksparse.program import finish

Rows = dict[tuple[Any, ...], list[Line]]


def grouped(lines: list[Line], *names: str) -> Rows:
    """Lines that differ in their seeds alone, by what they have in common."""
    rows: Rows = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["seed"]):
        rows[tuple(line[name] for name in names)].append(line)
    return rows


def mean(runs: list[Line], key: str) -> float:
    """Over the seeds."""
    return statistics.fmean(run[key] for run in runs)


def machines_of(lines: list[Line]) -> list[str]:
    """What they ran on, that with the lines of most arms first."""
    arms: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        arms[line["machine"]].add(line["arm"])
    return sorted(arms, key=lambda machine: (-len(arms[machine]), machine))


def heads(lines: list[Line], unit: str) -> list[str]:
    """Of the columns of `times`; a machine that is the only one goes without saying."""
    machines = machines_of(lines)
    return [f"{unit} on {machine}" for machine in machines] if len(machines) > 1 else [unit]


def alone(runs: list[Line], machine: str) -> list[Line]:
    """Those that a machine did, and nothing else meanwhile. Lines of "beside_others" shared their card."""
    return [run for run in runs if run["machine"] == machine and not run.get("beside_others")]


def times(lines: list[Line], runs: list[Line], key: str, digits: int) -> list[str]:
    """The mean of the runs, for each machine of all lines: times of two machines are not averaged."""
    mine = [alone(runs, machine) for machine in machines_of(lines)]
    return [f"{mean(of, key):,.{digits}f}" if of else "" for of in mine]


def of_arm(lines: list[Line], arm: str) -> list[Line]:
    """Its lines with any rate, which says nothing about time."""
    return [line for line in lines if line["arm"] == arm]


def each(runs: list[Line], key: str) -> str:
    """The value of each seed."""
    return ", ".join(f"{run[key]:.4f}" if isinstance(run[key], float) else f"{run[key]}" for run in runs)


def peak(runs: list[Line]) -> str:
    """GB that were in use at most, on a card."""
    return f"{max(run['peak_bytes'] for run in runs) / 1e9:.1f}" if "peak_bytes" in runs[0] else ""


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def best_rates(rows: Rows, better: Callable[[list[Line]], float]) -> Rows:
    """Of each arm (the names but the last, which is the rate), the rate that did best."""
    found: Rows = {}
    for key, runs in rows.items():
        kept = found.get(key[:-1])
        if kept is None or better(runs) < better(kept):
            found[key[:-1]] = runs
    return found


# ---- Feed-forward parts and output layers ----------------------------------------------------------------------------


def feedforward_table(lines: list[Line]) -> str:
    """By features, then by bits per byte."""
    rows = grouped(lines, "arm", "rate")
    base = min((mean(runs, "loss") for (arm, _), runs in rows.items() if arm == "dense"), default=None)
    head = ["arm", "features", "FFN weights", "rate", "bits per byte", "each seed", "to dense", "used"]
    return markdown([*head, *heads(lines, "ms"), "GB"], [
        [
            arm, f"{runs[0]['features']:,}", f"{runs[0]['ffn_weights']:,}", f"{rate:g}", f"{mean(runs, 'loss'):.4f}",
            each(runs, "loss"), "" if base is None else f"{mean(runs, 'loss') - base:+.4f}",
            f"{mean(runs, 'used'):.0%}" if "used" in runs[0] else "",
            *times(lines, of_arm(lines, arm), "ms", 1), peak(runs),
        ]
        for (arm, rate), runs in sorted(rows.items(), key=lambda row: (row[1][0]["features"], mean(row[1], "loss")))
    ])  # fmt: skip


def output_layer_table(lines: list[Line]) -> str:
    """By loss."""
    head = ["output layer", "weights", "rate", "nats a word", "each seed", "frequent", "rare", "training"]
    return markdown([*head, *heads(lines, "ms"), "GB", "its MB"], [
        [
            arm, f"{runs[0]['head_weights']:,}", f"{rate:g}", f"{mean(runs, 'loss'):.4f}", each(runs, "loss"),
            f"{mean(runs, 'loss_frequent'):.3f}", f"{mean(runs, 'loss_rare'):.3f}",
            f"{statistics.fmean(run['curve'][-1][1] for run in runs):.3f}",
            *times(lines, of_arm(lines, arm), "ms", 1), peak(runs), f"{runs[0]['head_bytes'] / 1e6:,.0f}",
        ]
        for (arm, rate), runs in sorted(grouped(lines, "arm", "rate").items(), key=lambda row: mean(row[1], "loss"))
    ])  # fmt: skip


def losses_picture(lines: list[Line], path: Path, x: str, label: str, unit: str, scale: str = "linear") -> None:
    """Curves of the first seed, and what came of each arm against x, each with its best rate.

    Times are the means of arms on one machine, that which most arms ran on.
    """
    machine = machines_of(lines)[0]
    found = best_rates(grouped(lines, "arm", "rate"), lambda runs: mean(runs, "loss"))
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    lows, seconds = [], []
    for i, ((arm,), runs) in enumerate(found.items()):
        steps, losses = zip(*runs[0]["curve"], strict=True)
        color, style = ("black", "-") if arm == "dense" else (f"C{i % 10}", "-" if i < 10 else "--")
        left.plot(steps, losses, color=color, linestyle=style, linewidth=1.2, label=arm)
        mark = "osD^vP*X"[i % 8]
        at = alone(of_arm(lines, arm), machine) if x == "ms" else runs
        if at:
            places = [mean(at, x)] * len(runs)
            right.plot(places, [run["loss"] for run in runs], mark, color=color, label=arm, alpha=0.8)
        lows.append(min(losses))
        seconds.append(losses[min(len(losses) - 1, len(losses) // 6)])
    left.set(xlabel="steps", ylabel=f"{unit}, training", ylim=(min(lows) - 0.05, max(seconds)))
    right.set(xlabel=f"{label}, {machine}" if x == "ms" else label, ylabel=f"{unit}, held-out text", xscale=scale)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    right.xaxis.set_minor_formatter(NullFormatter())
    right.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(path, dpi=130)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def memory_table(lines: list[Line]) -> str:
    """By task and units."""
    rows = grouped(lines, "task", "arm", "rate")
    head = ["task", "arm", "units", "weights between units", "rate", "n reached", "each seed", "right at 8", "at 16"]

    def at(runs: list[Line], n: str) -> str:
        return f"{statistics.fmean(run['right'][n] for run in runs):.0%}" if n in runs[0]["right"] else ""

    def order(row: tuple[tuple[Any, ...], list[Line]]) -> tuple[Any, ...]:
        return row[0][0], row[1][0]["units_of_all"], row[0][2]

    return markdown([*head, *heads(lines, "ms"), "GB"], [
        [
            task, arm, f"{runs[0]['units_of_all']:,}", f"{runs[0]['recurrent_weights']:,}", f"{rate:g}",
            f"{mean(runs, 'reached'):g}", each(runs, "reached"), at(runs, "8"), at(runs, "16"),
            *times(lines, runs, "ms", 1), peak(runs),
        ]
        for (task, arm, rate), runs in sorted(rows.items(), key=order)
    ])  # fmt: skip


def memory_picture(lines: list[Line], path: Path) -> None:
    """How n has grown, each arm with its best rate, a panel for each task."""
    found = best_rates(grouped(lines, "task", "arm", "rate"), lambda runs: -mean(runs, "reached"))
    tasks = sorted({task for task, _ in found})
    figure = Figure(figsize=(5 * len(tasks), 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        mine = [(arm, runs) for (of, arm), runs in found.items() if of == task]
        for i, (arm, runs) in enumerate(sorted(mine, key=lambda row: row[1][0]["factor"])):
            for j, run in enumerate(runs):
                steps, lengths, _ = zip(*run["grown"], strict=True)
                label = f"{arm}, {run['units_of_all']:,} units" if j == 0 else None
                color = "black" if arm == "dense" else f"C{i}"
                axes.step([*steps, run["updates"]], [*lengths, lengths[-1]], where="post", color=color, label=label)
        axes.set(xlabel="updates", ylabel="n", title=task)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Writes FILE.md and FILE.png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("feedforward", "output_layer", "memory"))
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    lines, picture = read_lines(options.results), options.results.with_suffix(".png")
    if not lines:
        parser.error(f"{options.results} holds no line")
    if options.what == "feedforward":
        text = feedforward_table(lines)
        losses_picture(lines, picture, "ms", "ms a step", "bits per byte")
    elif options.what == "output_layer":
        text = output_layer_table(lines)
        losses_picture(lines, picture, "head_weights", "weights of the output layer", "nats a word", "log")
    else:
        text = memory_table(lines)
        memory_picture(lines, picture)
    options.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    finish(main)
