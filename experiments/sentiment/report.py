"""Bar chart of errors, and histograms of best units that another machine found.

    python experiments/sentiment/report.py experiments/sentiment/results/{baseline,h200}.jsonl \
        --out experiments/sentiment/results/h200-error.png
    python experiments/sentiment/report.py --units out/sentiment/*.npz --out experiments/sentiment/results

Features whose names differ by a seed at their end are a bar, the mean, with a dot each. A seed has one or two digits.
"""

from __future__ import annotations

import argparse
import re
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blocksparse.models.files import write_whole
from blocksparse.models.lines import need_lines
from blocksparse.models.sentiment import Unit, colour_text, plot_unit
from blocksparse.program import finish
from blocksparse.viz import check_picture

SETS = ("cr", "mr", "sst", "imdb", "subj", "mpqa")
BASELINE = "1- and 2-grams"
BALANCED = "sparse, two matrices, stride 1, balanced"
ARMS = {  # in the order of their bars: name in the legend, colour
    BASELINE: ("words and pairs of words", "lightgray"),
    "dense": ("dense, six matrices", "black"),
    "dense-inner2": ("dense, two matrices, rate 2e-3", "dimgray"),
    "dense-inner2-lr0.004": ("dense, two matrices, rate 4e-3", "gray"),
    "dense-inner2-lr0.008": ("dense, two matrices, rate 8e-3", "darkgray"),
    "ba": ("sparse, six matrices, stride 2, BA", "tab:blue"),
    "random": ("sparse, six matrices, stride 2, random", "tab:purple"),
    "ws": ("sparse, six matrices, stride 2, Watts-Strogatz", "tab:cyan"),
    "ba-stride1-inner2": ("sparse, two matrices, stride 1, BA, 18,432 units", "tab:red"),
    "balanced-stride1-inner2-b128": (f"{BALANCED}, 18,432 units", "tab:green"),
    "balanced-stride1-inner2-b128-8192": (f"{BALANCED}, 8,192 units, rate 4e-3", "tab:orange"),
    "balanced-stride1-inner2-b128-8192-lr0.008": (f"{BALANCED}, 8,192 units, rate 8e-3", "gold"),
}

SEED = re.compile(r"-\d{1,2}$")  # longer numbers are units
OF_UNIT = ("values", "labels", "title", "index", "threshold", "sign")
OF_TEXT = ("text", "of_bytes", "lengths")

Errors = dict[str, dict[str, list[float]]]  # of an arm, of a set, each training


def read(paths: list[Path], prefix: str) -> Errors:
    """Errors in percent of all texts: of words, and of the features whose names begin so.

    Raises:
        ValueError: there are none, or with a prefix none but those of words.
    """
    errors: Errors = defaultdict(lambda: defaultdict(list))
    names = set()
    for path in paths:
        for line in need_lines(path, ("set", "features", "limit", "accuracy")):
            features = line["features"]
            if line["limit"] is not None:
                continue
            if line["set"] not in SETS:
                raise ValueError(f"{path} has a set {line['set']}, needs one of {', '.join(SETS)}")
            names.add(features)
            if features == BASELINE or features.startswith(prefix):
                arm = features if features == BASELINE else SEED.sub("", features.removeprefix(prefix))
                errors[arm][line["set"]].append(100 - line["accuracy"])
    if not names:
        raise ValueError(f"{', '.join(map(str, paths))}: no line is of all texts, needs one without --limit")
    if prefix and not errors.keys() - {BASELINE}:
        there = ", ".join(sorted(names - {BASELINE})) or "words alone"
        raise ValueError(f"--prefix is {prefix}, needs the beginning of a name that is there: {there}")
    order = list(ARMS)
    return dict(sorted(errors.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def plot(errors: Errors, title: str, path: Path) -> None:
    """A group of bars for each set."""
    sets = [name for name in SETS if any(name in of_arm for of_arm in errors.values())]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes: Axes = figure.add_subplot()
    width, narrow = 0.8 / len(errors), len(errors) > 5  # numbers are wider than these bars
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
                fontsize=7,
                rotation=90 if narrow else 0,
            )
            if len(of_arm[name]) > 1:
                axes.plot(
                    [x] * len(of_arm[name]), of_arm[name], "o", color="white", markeredgecolor="black", markersize=2.5
                )
    axes.set_xticks(range(len(sets)), [name.upper() for name in sets])
    axes.set(ylabel="error, %", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01, y=0.1 if narrow else 0.05)
    figure.legend(frameon=False, ncols=min(len(errors), 3), loc="outside lower center", fontsize=8)
    kind = path.suffix.removeprefix(".").lower() or "png"
    write_whole(path, lambda file: figure.savefig(file, format=kind, dpi=140), "report")


def draw_unit(kept: Path, folder: Path) -> list[Path]:
    """The histogram of a file that run.py has left, and sentences in the unit's colours; older files have none.

    Raises:
        OSError: there is none, or the picture cannot be written.
        ValueError: it is another kind of file.
    """
    try:
        with np.load(kept) as file:
            what: dict[str, Any] = {name: file[name] for name in (*OF_UNIT, *(OF_TEXT if "text" in file else ()))}
    except (AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{kept} is no histogram of run.py, needs an .npz file with {', '.join(OF_UNIT)}") from error
    unit = Unit(int(what["index"]), float(what["threshold"]), int(what["sign"]))
    path = folder / f"{kept.stem}.png"
    plot_unit(what["values"].astype(np.float32), what["labels"], unit, str(what["title"]), path)
    if "text" not in what:
        return [path]
    ends = np.cumsum(what["lengths"])[:-1]
    texts = [text.tobytes() for text in np.split(what["text"], ends)]
    in_colours = folder / f"{kept.stem}-text.png"
    colour_text(texts, np.split(what["of_bytes"], ends), unit, str(what["title"]), in_colours)
    return [path, in_colours]


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
    if bool(options.results) == bool(options.units):
        given = "both are given" if options.units else "neither is given"
        parser.error(f"{given}, needs either files of results or --units")
    for kept in options.units:
        print(*draw_unit(kept, options.out), sep="\n")
    if options.results:
        picture = check_picture(options.out, "report")
        plot(read(options.results, options.prefix), options.title, picture)
        print(picture)
    return 0


if __name__ == "__main__":
    finish(main)
