"""Table and pictures of a file of results: bits per dimension against images and against seconds.

python experiments/pixelcnn/report.py experiments/pixelcnn/results/cifar.jsonl [--logs out/cifar]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from run import KEYS, stem_of

from blocksparse.models.lines import read_lines
from blocksparse.program import finish

COLORS = {"dense": "black", "x2/g2": "tab:orange", "x4/g4": "tab:red", "x4 balanced": "tab:blue"}
FIRST = "the first test images"  # those of lines that do not say it: they are the oldest


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines by arm, in the order of the file; of each machine, if there are several: their times do not compare.

    Raises:
        OSError: there is no such file.
        ValueError: it has no lines of `run.py`, or others.
    """
    path.stat()  # where there is none, `read_lines` has no lines
    lines = read_lines(path)
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


def timed(run: dict[str, Any]) -> bool:
    """Whether its seconds count: not beside other work on its machine, and not of what is not complete."""
    return "machine" in run and bool(run.get("timed", True))


def mean(runs: list[dict[str, Any]], key: str, digits: int) -> str:
    """Over the seeds; empty where there are none."""
    return f"{statistics.fmean(run[key] for run in runs):.{digits}f}" if runs else ""


def less(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Mean difference in bits/dim over the seeds that both have: seeds are further apart than some of the arms."""
    of = {run["seed"]: run["valid"] for run in others}
    pairs = [run["valid"] - of[run["seed"]] for run in runs if run["seed"] in of]
    return f"{statistics.fmean(pairs):+.4f}" if pairs else ""


def table(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown, with the differences from each dense arm. Times are of those lines alone whose seconds count."""
    dense = {arm: runs for arm, runs in arms.items() if runs[0]["arm"] == "dense"}
    heads = ["arm", "parameters, M", "GMAC an image", "bits/dim, mean", "by seed", *(f"less {arm}" for arm in dense)]
    rows = [[*heads, "last weights", "ms", "s"], ["---"] * (len(heads) + 3)]
    for arm, runs in arms.items():
        first, counted = runs[0], [run for run in runs if timed(run)]
        row = [arm, f"{first['parameters'] / 1e6:.2f}", f"{first['macs'] / 1e9:.2f}", mean(runs, "valid", 4)]
        row.append(", ".join(f"{run['seed']}: {run['valid']:.4f}" for run in sorted(runs, key=lambda run: run["seed"])))
        row += ["" if others is runs else less(runs, others) for others in dense.values()]
        rows.append([*row, mean(runs, "valid_raw", 4), mean(counted, "step_ms", 2), mean(counted, "seconds", 0)])
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


def axes_of(figure: Figure, sets: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, str], Axes]:
    """By the test images of curves and by what they are drawn against: images, and seconds where those count."""
    keys = [(of, "images") for of in sets] + [(of, "seconds") for of, runs in sets.items() if any(map(timed, runs))]
    axes = dict(zip(keys, figure.subplots(1, len(keys), sharey=True, squeeze=False)[0], strict=True))
    for (of, what), axis in axes.items():
        axis.set(xlabel="thousand images" if what == "images" else "seconds of training", title=of)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return axes


def draw(arms: dict[str, list[dict[str, Any]]]) -> Figure:
    """Curves of averaged weights on some of the test images; a line for each seed.

    Those of other test images have axes of their own, for they do not compare. What is not complete is taken to be of
    the last ones. Dashed on a second machine, dotted where it is not complete.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for run in (run for runs in arms.values() for run in runs if "machine" in run):
        sets.setdefault(run.get("curve_of", FIRST), []).append(run)
    last = next(reversed(sets))
    figure = Figure(layout="constrained")
    axes, ends = axes_of(figure, sets), []
    figure.set_size_inches(4.6 * len(axes), 4.4)
    machines = list({run["machine"]: None for runs in sets.values() for run in runs})
    for arm, runs in arms.items():
        color = next((c for name, c in COLORS.items() if arm.startswith((name, stem_of(name, 0)[:-1]))), None)
        for run in runs:
            images, seconds, _, valid = zip(*run["curve"], strict=True)
            style, of = ":", last
            if "machine" in run:
                style, of = ("-", "--", "-.")[machines.index(run["machine"]) % 3], run.get("curve_of", FIRST)
                ends.append((min(valid), valid[len(valid) // 10]))
            label = f"{arm}, seed {run['seed']}" if "seed" in run else arm
            for what, x in (("images", [n / 1000 for n in images]), ("seconds", seconds)):
                if what == "images" or timed(run):
                    axes[of, what].plot(x, valid, label=label, linewidth=1.2, color=color, linestyle=style)
    low, high = min(end for end, _ in ends), max(early for _, early in ends)
    next(iter(axes.values())).set(ylabel="bits per dimension", ylim=(low - 0.02, high + 0.02))
    for (_, what), axis in axes.items():
        if what == "images":
            axis.legend(frameon=False)
    return figure


def main() -> None:
    """Writes FILE.md and FILE.png beside the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--logs", type=Path, help="folder of run.py: arms that are not complete are drawn, too")
    options = parser.parse_args()
    arms = read(options.results)
    text = table(arms)
    options.results.with_suffix(".md").write_text(text + "\n")
    figure = draw(arms | (unfinished(options.logs, arms) if options.logs else {}))
    figure.savefig(options.results.with_suffix(".png"), dpi=120)
    print(text)


if __name__ == "__main__":
    finish(main)
