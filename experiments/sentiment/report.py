"""Bar chart of errors, and histograms of best units that another machine found.

    python experiments/sentiment/report.py experiments/sentiment/results/{baseline,h200}.jsonl \
        --out experiments/sentiment/results/h200-error.png
    python experiments/sentiment/report.py --units out/sentiment/*.npz --out experiments/sentiment/results

Features whose names differ by a seed at their end are a bar, the mean, with a dot each.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blocksparse.models.lines import need_lines
from blocksparse.models.sentiment import Unit, plot_unit

SETS = ("cr", "mr", "sst", "imdb", "subj", "mpqa")
BASELINE = "1- and 2-grams"
ARMS = {  # in the order of their bars: name in the legend, colour
    BASELINE: ("words and pairs of words", "lightgray"),
    "dense": ("dense, six matrices", "black"),
    "dense-inner2": ("dense, two matrices", "dimgray"),
    "ba": ("sparse, six matrices, stride 2, BA", "tab:blue"),
    "random": ("sparse, six matrices, stride 2, random", "tab:purple"),
    "ws": ("sparse, six matrices, stride 2, Watts-Strogatz", "tab:cyan"),
    "ba-stride1-inner2": ("sparse, two matrices, stride 1, BA, 18,432 units", "tab:red"),
    "balanced-stride1-inner2-b128": ("sparse, two matrices, stride 1, balanced, 18,432 units", "tab:green"),
    "balanced-stride1-inner2-b128-8192": ("sparse, two matrices, stride 1, balanced, 8,192 units", "tab:orange"),
}

Errors = dict[str, dict[str, list[float]]]  # of an arm, of a set, each training


def read(paths: list[Path], prefix: str) -> Errors:
    """Errors in percent of all texts: of words, and of the features whose names begin so."""
    errors: Errors = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for line in need_lines(path, ("set", "features", "limit", "accuracy")):
            features = line["features"]
            if line["limit"] is not None or not (features == BASELINE or features.startswith(prefix)):
                continue
            arm = features if features == BASELINE else re.sub(r"-\d+$", "", features.removeprefix(prefix))
            errors[arm][line["set"]].append(100 - line["accuracy"])
    order = list(ARMS)
    return dict(sorted(errors.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def plot(errors: Errors, title: str, path: Path) -> None:
    """A group of bars for each set."""
    sets = [name for name in SETS if any(name in of_arm for of_arm in errors.values())]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes: Axes = figure.add_subplot()
    width = 0.8 / len(errors)
    for k, (arm, of_arm) in enumerate(errors.items()):
        for i, name in enumerate(sets):
            if name not in of_arm:
                continue
            x, mean = i + (k - (len(errors) - 1) / 2) * width, float(np.mean(of_arm[name]))
            words, color = ARMS.get(arm, (arm, None))
            axes.bar(x, mean, width * 0.92, color=color, label=words if name == sets[0] else None)
            axes.annotate(
                f"{mean:.1f}",
                (x, max(of_arm[name])),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=min(7, 32 / len(errors)),
            )
            if len(of_arm[name]) > 1:
                axes.plot(
                    [x] * len(of_arm[name]), of_arm[name], "o", color="white", markeredgecolor="black", markersize=2.5
                )
    axes.set_xticks(range(len(sets)), [name.upper() for name in sets])
    axes.set(ylabel="error, %", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    figure.legend(frameon=False, ncols=min(len(errors), 3), loc="outside lower center", fontsize=8)
    figure.savefig(path, dpi=140)


def draw_unit(kept: Path, folder: Path) -> Path:
    """The histogram of a file that run.py has left."""
    with np.load(kept) as file:
        what: dict[str, Any] = {name: file[name] for name in file.files}
    unit = Unit(int(what["index"]), float(what["threshold"]), int(what["sign"]))
    path = folder / f"{kept.stem}.png"
    plot_unit(what["values"].astype(np.float32), what["labels"], unit, str(what["title"]), path)
    return path


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="JSON lines that run.py has written")
    parser.add_argument("--prefix", default="", help="of the features to be drawn, such as 100M-")
    parser.add_argument(
        "--units", type=Path, nargs="+", default=[], metavar="NPZ", help="histograms are drawn of these"
    )
    parser.add_argument("--out", type=Path, required=True, help="PNG of the bars; or folder of the histograms")
    title = "Error of linear models trained on the features of dense and sparse generative models"
    parser.add_argument("--title", default=title)
    options = parser.parse_args()
    for kept in options.units:
        print(draw_unit(kept, options.out))
    if options.results:
        errors = read(options.results, options.prefix)
        if not errors:
            raise ValueError(f"no lines of all texts and of features named {options.prefix}... in there")
        plot(errors, options.title, options.out)
        print(options.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
