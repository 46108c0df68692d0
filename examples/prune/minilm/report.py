"""What came out: tables, pictures, and a page that shows them."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from .measure import ROWS
from .model import TOKENS
from .train import STAGES

ARM = ("model", "sentences/s", "times as fast", "cosine to dense", "halves found", "MB")
LAYER = ("layer", "out x in", "blocks", "dense ms", "block-sparse ms", "times as fast")
NAMES = {  # of BERT's matrices, in their order
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attention out",
    "intermediate.dense": "feed-forward up",
    "output.dense": "feed-forward down",
}
COLORS = {"dense": "#222222", "magnitude": "tab:red", "obs": "tab:blue", "distilled": "tab:green"}


@dataclass(frozen=True)
class Arm:
    """A model of the comparison.

    Attributes:
        title: in words.
        kind: dense, magnitude, obs or distilled.
        per_second: sentences.
        cosine: see `Quality`.
        found: see `Quality`.
        megabytes: of its parameters.
    """

    title: str
    kind: str
    per_second: float
    cosine: float
    found: float
    megabytes: float


@dataclass(frozen=True)
class LayerRow:
    """A layer of the pruned model: its times, in seconds, which are those of a layer like it (`Timing.measured`)."""

    name: str
    shape: tuple[int, int]
    density: float
    before_s: float
    after_s: float
    converted: bool
    measured: str = ""


@dataclass(frozen=True)
class Results:
    """All that the report shows."""

    source: str
    paragraphs: int
    tests: int
    threads: int
    arms: Sequence[Arm]  # dense first, distilled last
    layers: Sequence[LayerRow]
    masks: Mapping[str, Any]  # bool arrays
    losses: Sequence[float]
    train_seconds: float
    samples: Sequence[tuple[str, str, str]]  # query, nearest by the dense and by the pruned model
    sparsity: float
    block_size: int


# ---- Tables ----------------------------------------------------------------------------------------------------------


def arm_rows(results: Results) -> list[tuple[str, ...]]:
    """The models, a row each, as text."""
    dense = results.arms[0].per_second
    return [
        (
            arm.title,
            f"{arm.per_second:.0f}",
            f"{arm.per_second / dense:.2f}",
            f"{arm.cosine:.3f}",
            f"{100 * arm.found:.1f} %",
            f"{arm.megabytes:.1f}",
        )
        for arm in results.arms
    ]


def layer_rows(results: Results) -> list[tuple[str, ...]]:
    """The layers, a row for those that were timed as one, and all of them."""
    alike: dict[str, list[LayerRow]] = {}
    for row in results.layers:
        alike.setdefault(row.measured or row.name, []).append(row)
    rows = [
        (
            titled(name, len(members), row.converted),
            f"{row.shape[0]} x {row.shape[1]}",
            f"{100 * row.density:.0f} %",
            f"{1e3 * row.before_s:.2f}",
            f"{1e3 * row.after_s:.2f}",
            f"{row.before_s / row.after_s:.2f}",
        )
        for name, members in alike.items()
        for row in members[:1]
    ]
    before = sum(row.before_s for row in results.layers)
    after = sum(row.after_s if row.converted else row.before_s for row in results.layers)
    size = sum(row.shape[0] * row.shape[1] for row in results.layers)
    density = sum(row.density * row.shape[0] * row.shape[1] for row in results.layers) / max(size, 1)
    whole = f"{100 * density:.0f} %", f"{1e3 * before:.2f}", f"{1e3 * after:.2f}", f"{before / after:.2f}"
    return [*rows, ("all of them", "", *whole)]


def titled(name: str, count: int, converted: bool) -> str:
    """ "3 query and 23 like it"."""
    others = f" and {count - 1} like it" if count > 1 else ""
    return f"{short(name)}{others}{'' if converted else ' (stays dense)'}"


def short(name: str) -> str:
    """ "3 query" of "bert.encoder.layer.3.attention.self.query"."""
    _, _, rest = name.partition("encoder.layer.")
    number, _, inner = rest.partition(".")
    return f"{number} {NAMES.get(inner, inner)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


# ---- Pictures --------------------------------------------------------------------------------------------------------


def _figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)


def _save(figure: Any, file: Path) -> None:
    import matplotlib.pyplot as plt

    temporary = file.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=110)
    plt.close(figure)
    os.replace(temporary, file)


def draw_tradeoff(results: Results, file: Path) -> None:
    """Quality against speed, a point for each model."""
    figure, (axes,) = _figure(1, 2, 12, 4.8)
    dense = results.arms[0]
    for axis, values, name in (
        (axes[0], [arm.cosine for arm in results.arms], "cosine to the dense model's embeddings"),
        (axes[1], [100 * arm.found for arm in results.arms], "% of halves whose other half is found"),
    ):
        speeds = [arm.per_second / dense.per_second for arm in results.arms]
        for arm, x, y in zip(results.arms, speeds, values, strict=True):
            size = 130 if arm.kind in ("dense", "distilled") else 60
            axis.scatter(x, y, s=size, color=COLORS[arm.kind], zorder=3)
        top = 1.08 * max(values)
        for arm, x, y, at in zip(results.arms, speeds, values, _apart(values, 0.06 * top), strict=True):
            line = {"arrowstyle": "-", "color": "#cccccc", "linewidth": 0.8}
            place = (1.12 * max(speeds), at)
            axis.annotate(arm.title, (x, y), place, va="center", color=COLORS[arm.kind], arrowprops=line)
        # The distillation began with the arm before it.
        arrow = {"arrowstyle": "->", "color": COLORS["distilled"], "linestyle": ":"}
        axis.annotate("", (speeds[-1], values[-1]), (speeds[-2], values[-2]), arrowprops=arrow)
        axis.set(xlabel="times as fast as dense, whole model", ylabel=name, xlim=(0, 1.75 * max(speeds)))
        axis.set_xticks(np.arange(0, max(speeds) + 0.5, 0.5))
        axis.set_ylim(min(0, *values), top)
        axis.grid(alpha=0.3)
    _save(figure, file)


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Heights for labels, as near to the values as they can be without one above another."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed: list[float] = list(values)
    for below, i in pairwise(order):
        placed[i] = max(placed[i], placed[below] + least)
    return placed


def draw_layouts(masks: Mapping[str, Any], file: Path) -> None:
    """The blocks that survived: a row for each of BERT's layers, a column for each kind of matrix."""
    from matplotlib.colors import ListedColormap

    numbers = sorted({int(short(name).split()[0]) for name in masks})
    kinds = list(NAMES.values())
    ratio = {"width_ratios": [1, 1, 1, 1, 2, 4]}
    figure, axes = _figure(len(numbers), len(kinds), 15, 1.8 * len(numbers), gridspec_kw=ratio)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for name, mask in masks.items():
        number, _, kind = short(name).partition(" ")
        axis = axes[numbers.index(int(number))][kinds.index(kind)]
        look: Any = {"cmap": ListedColormap(["#f2f2f2", "tab:blue"]), "vmin": 0, "vmax": 1}
        axis.imshow(np.asarray(mask), aspect="auto", interpolation="nearest", **look)
        axis.set_title(f"{kind}: {int(np.asarray(mask).sum())}", fontsize=9)
    for number, row in zip(numbers, axes, strict=True):
        row[0].set_ylabel(f"layer {number}")
    _save(figure, file)


def draw_losses(losses: Sequence[float], file: Path) -> None:
    """The distillation's loss by step; dotted where a stage drops blocks."""
    from matplotlib.ticker import MaxNLocator

    figure, ((axis,),) = _figure(1, 1, 8, 3.4)
    width = max(1, len(losses) // 30)
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    axis.plot(losses, color=COLORS["distilled"], alpha=0.25)
    axis.plot(np.arange(len(smooth)) + width - 1, smooth, color=COLORS["distilled"])
    for begin in STAGES:
        axis.axvline(int(begin * len(losses)), color="#999999", linestyle=":", linewidth=1)
    axis.set(xlabel="step", ylabel="loss: layers and similarities")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    _save(figure, file)


# ---- Page ------------------------------------------------------------------------------------------------------------


def write(results: Results, folder: Path) -> Path:
    """Writes the pictures, the tables and the page into a folder; returns the page."""
    draw_tradeoff(results, folder / "quality_speed.png")
    draw_layouts(results.masks, folder / "layouts.png")
    draw_losses(results.losses, folder / "distillation.png")
    text = f"{table(ARM, arm_rows(results))}\n\n{table(LAYER, layer_rows(results))}\n"
    (folder / "table.txt").write_text(text, encoding="utf-8")
    page = folder / "index.html"
    page.write_text(_page(results), encoding="utf-8")
    return page


def _page(results: Results) -> str:
    dense, small = results.arms[0], results.arms[-1]
    fields = {
        "source": html.escape(results.source),
        "paragraphs": f"{results.paragraphs:,}",
        "tests": results.tests,
        "sparsity": f"{100 * results.sparsity:.0f}",
        "b": results.block_size,
        "faster": f"{small.per_second / dense.per_second:.2f}",
        "cosine": f"{small.cosine:.3f}",
        "dense_found": f"{100 * dense.found:.1f}",
        "small_found": f"{100 * small.found:.1f}",
        "rows": ROWS,
        "tokens": TOKENS,
        "threads": results.threads,
        "steps": len(results.losses),
        "minutes": f"{results.train_seconds / 60:.1f}",
        "arms": _html_table(ARM, arm_rows(results)),
        "layers": _html_table(LAYER, layer_rows(results)),
        "samples": "".join(_html_sample(*sample) for sample in results.samples),
    }
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return template.substitute(fields)


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{first}</tr>\n{body}</table>"


def _html_sample(query: str, dense: str, small: str) -> str:
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in (query, dense, small))
    return f"<tr>{cells}</tr>\n"
