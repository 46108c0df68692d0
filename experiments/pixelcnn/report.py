"""Table and pictures of a file of results: bits per dimension against images and against seconds.

python experiments/pixelcnn/report.py experiments/pixelcnn/results/cifar.jsonl [--logs out/cifar]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from run import KEYS, lines_of, stem_of

COLORS = {"dense": "black", "x2/g2": "tab:orange", "x4/g4": "tab:red", "x4 balanced": "tab:blue"}


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines by arm, in the order of the file; of each machine, if there are several: their times do not compare.

    Raises:
        OSError: there is no such file.
        ValueError: it has no lines of `run.py`, or others.
    """
    path.stat()  # where there is none, `lines_of` has no lines
    lines = lines_of(path)
    if not lines or not all(isinstance(line, dict) and {"arm", "curve", "machine"} <= line.keys() for line in lines):
        raise ValueError(f"[pixelcnn] {path} is no file of results of run.py")
    several = len({line["machine"] for line in lines}) > 1
    arms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        arms[f"{line['arm']}, {card(line['machine'])}" if several else line["arm"]].append(line)
    return dict(arms)


def card(machine: str) -> str:
    """A short name."""
    return machine.removeprefix("NVIDIA ").split(" ")[0]


def mean(runs: list[dict[str, Any]], key: str) -> float:
    """Over the seeds."""
    return statistics.fmean(run[key] for run in runs)


def table(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown, with the differences from each dense arm."""
    dense = {arm: mean(runs, "valid") for arm, runs in arms.items() if runs[0]["arm"] == "dense"}
    heads = ["arm", "parameters, M", "GMAC an image", "bits/dim, mean", "each seed", *(f"less {arm}" for arm in dense)]
    rows = [[*heads, "last weights", "ms", "s"], ["---"] * (len(heads) + 3)]
    for arm, runs in arms.items():
        first, bits = runs[0], mean(runs, "valid")
        row = [arm, f"{first['parameters'] / 1e6:.2f}", f"{first['macs'] / 1e9:.2f}", f"{bits:.4f}"]
        row.append(", ".join(f"{run['valid']:.4f}" for run in sorted(runs, key=lambda run: run["seed"])))
        row += [f"{bits - other:+.4f}" for other in dense.values()]
        times = f"{mean(runs, 'step_ms'):.2f}", f"{mean(runs, 'seconds'):.0f}"
        rows.append([*row, f"{mean(runs, 'valid_raw'):.4f}", *times])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def unfinished(folder: Path, arms: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Curves of what has a log in the folder of `run.py`, but is not complete, by the names of their folders."""
    complete = {stem_of(run["arm"], run["seed"]) for runs in arms.values() for run in runs}
    made = {}
    for log in sorted(folder.glob("*/log.jsonl")):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        curve = [[line[key] for key in KEYS] for line in lines if "curve" in line]
        if curve and log.parent.name not in complete:
            made[f"{log.parent.name}, not complete"] = [{"curve": curve}]
    return made


def draw(arms: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Curves of averaged weights on some of the test images; a line for each seed.

    Dashed on a second machine, dotted where it is not complete.

    Raises:
        ValueError: they are not of the same images. What is not complete is taken to be of the others'.
    """
    of = {run.get("curve_of", "the first test images") for runs in arms.values() for run in runs if "machine" in run}
    if len(of) > 1:
        raise ValueError(f"[pixelcnn] curves are not of the same images, but of {'; '.join(sorted(of))}")
    figure = Figure((11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    ends = []
    machines = list({run["machine"]: None for runs in arms.values() for run in runs if "machine" in run})
    for arm, runs in arms.items():
        for i, run in enumerate(runs):
            images, seconds, _, valid = zip(*run["curve"], strict=True)
            ends.append((min(valid), valid[len(valid) // 10]))
            color = next((c for name, c in COLORS.items() if arm.startswith((name, stem_of(name, 0)[:-1]))), None)
            style = ("-", "--", "-.")[machines.index(run["machine"]) % 3] if "machine" in run else ":"
            how: dict[str, Any] = {"color": color, "linestyle": style}
            for axis, x in ((left, [n / 1000 for n in images]), (right, seconds)):
                axis.plot(x, valid, label=arm if i == 0 else None, linewidth=1.2, **how)
    low, high = min(end for end, _ in ends), max(early for _, early in ends)
    left.set(xlabel="thousand images", ylabel="bits per dimension", ylim=(low - 0.02, high + 0.02))
    right.set(xlabel="seconds of training")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Writes FILE.md and FILE.png beside the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--logs", type=Path, help="folder of run.py: arms that are not complete are drawn, too")
    options = parser.parse_args()
    arms = read(options.results)
    text = table(arms)
    options.results.with_suffix(".md").write_text(text + "\n")
    draw(arms | (unfinished(options.logs, arms) if options.logs else {}), options.results.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
