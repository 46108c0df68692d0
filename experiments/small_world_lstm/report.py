"""Table and pictures of a file of results: bits per byte against bytes and against seconds.

python experiments/small_world_lstm/report.py experiments/small_world_lstm/results/cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLORS = {
    "dense": "black",
    "dense-1152": "gray",
    "dense-3208": "gray",
    "ba": "tab:blue",
    "ws": "tab:green",
    "random": "tab:purple",
    "diagonal": "tab:red",
    "ring": "tab:orange",
}


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs by arm, the best arm first; sweeps are left out."""
    arms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if not entry["sweep"]:
            arms[entry["arm"]].append(entry)
    return dict(sorted(arms.items(), key=lambda item: mean(item[1], "valid")))


def mean(runs: list[dict[str, Any]], key: str) -> float:
    """Over the seeds."""
    return statistics.fmean(run[key] for run in runs)


def alone(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose seconds count, if there are any."""
    return [run for run in runs if run.get("alone", True)] or runs


def table(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown."""
    rows = [
        "| arm | graph | units | parameters | rate | bits/byte, mean | each seed | seconds | mix after 2 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, runs in arms.items():
        first = runs[0]
        each = ", ".join(f"{run['valid']:.4f}" for run in sorted(runs, key=lambda run: run["seed"]))
        mix = f"{100 * statistics.fmean(run['mix'][1] for run in runs):.0f} %" if first["mix"] else "100 %"
        rows.append(
            f"| {arm} | {first['graph'] or '-'} | {first['hidden']} | {first['parameters']} | {first['lr']:g} | "
            f"{mean(runs, 'valid'):.4f} | {each} | {mean(alone(runs), 'seconds'):.0f} | {mix} |"
        )
    return "\n".join(rows) + "\n"


def plot(arms: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Two panels, a line for each seed."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, column, scale, label in zip(
        figure.subplots(1, 2, sharey=True), (0, 1), (1e6, 60), ("MB of text", "minutes of training"), strict=True
    ):
        for arm, runs in arms.items():
            for i, run in enumerate(runs if column == 0 else alone(runs)):
                x, y = [point[column] / scale for point in run["curve"]], [point[3] for point in run["curve"]]
                name = f"{arm} {mean(runs, 'valid'):.3f}" if i == 0 else None
                axes.plot(x, y, color=COLORS.get(arm), label=name, linewidth=1.3, marker="o", markersize=2.5)
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("bits per byte, held-out text")
    figure.axes[1].legend(frameon=False, title="at the end, mean of seeds")
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Table and pictures of a file of results.")
    parser.add_argument("results", type=Path)
    source = parser.parse_args().results
    by_arm = read(source)
    plot(by_arm, source.with_suffix(".png"))
    source.with_suffix(".md").write_text(table(by_arm))
    print(table(by_arm))
