"""What came out: a table, curves, images, and a page that shows them."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from torch import Tensor

from blocksparse.models.files import write_whole
from blocksparse.models.images import write_png
from blocksparse.models.pixelcnn import layouts
from blocksparse.models.pixelcnn.architecture import Counts, architecture_of, count
from blocksparse.models.pixelcnn.data import arrays_of

from .arms import ARMS, TITLES, Job

COLORS = {"dense": "black", "sparse": "tab:red"}
COLUMNS = (
    "network",
    "resnets",
    "parameters",
    "M multiply-adds",
    "images",
    "seconds",
    "ms an update",
    "bits/dim",
    "last weights",
)
ZOOM = 4


@dataclass(frozen=True)
class Result:
    """Of an arm."""

    job: Job
    log: list[dict[str, Any]]
    counts: Counts
    drawn: Tensor
    completed: Tensor

    @property
    def name(self) -> str:
        """The arm's."""
        return self.job.name


def read_log(job: Job) -> list[dict[str, Any]]:
    """Its lines, that have been evaluated."""
    lines = [json.loads(line) for line in job.log.read_text().splitlines()]
    return [line for line in lines if "valid" in line]


def counts_of(name: str) -> Counts:
    """What the arm has and does."""
    return count(ARMS[name], layouts.density_of(ARMS[name]), (14, 14))


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The table, a row an arm, as text."""
    made = []
    for result in results:
        last, config = result.log[-1], ARMS[result.name]
        plan = architecture_of(config)
        resnets = sum(len(level) for stream in (plan.u, plan.ul) for side in (stream.down, stream.up) for level in side)
        ms = 1000 * last["seconds"] / last["update"]
        numbers = f"{result.counts.macs / 1e6:.1f}", f"{last['images']}", f"{last['seconds']:.0f}", f"{ms:.0f}"
        bits = f"{last['valid']:.3f}", f"{last['valid_raw']:.3f}"
        made.append((TITLES[result.name], str(resnets), f"{result.counts.parameters:,}", *numbers, *bits))
    return made


def table(results: list[Result]) -> str:
    """The table for a terminal."""
    lines = [COLUMNS, *rows(results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def draw_curves(results: list[Result], path: Path) -> None:
    """Bits per dimension of the same test images, against images and against seconds."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for result in results:
        points = [line for line in result.log if "curve" in line]
        bits, how = [line["curve"] for line in points], {"color": COLORS[result.name], "label": TITLES[result.name]}
        left.plot([line["images"] for line in points], bits, "o-", **how)
        right.plot([line["seconds"] for line in points], bits, "o-", **how)
    left.set(xlabel="images", ylabel="bits per dimension")
    right.set(xlabel="seconds of training, on one core")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def draw_layers(path: Path) -> None:
    """Which channels each output of a resnet's second convolution sees: dense, and by groups with a shuffle."""
    from matplotlib.figure import Figure

    figure = Figure((10, 3.4), layout="constrained")
    for axes, (name, config) in zip(figure.subplots(1, len(ARMS)), ARMS.items(), strict=True):
        kind = next(kind for kind in architecture_of(config).kinds if kind.name == "u_2")
        mask = np.ones((kind.outputs, kind.inputs), bool)
        if config.layout:
            mask = np.zeros_like(mask)
            order = layouts.order_of(config, kind)
            layout = layouts.layouts_of(config, kind, 1, 0)[0]
            dense = np.kron(layout.mask(), np.ones((config.block, config.block), bool))
            mask[:, np.arange(kind.inputs) if order is None else order.numpy()] = dense
        axes.imshow(mask, cmap="Greys", vmin=0, vmax=1.6, interpolation="nearest")
        axes.set(title=TITLES[name], xlabel="input channels, x and -x", ylabel="output channels, p and q")
    figure.savefig(path, dpi=110)


def write(results: list[Result], given: Tensor, folder: Path) -> Path:
    """Writes the pictures, the table and the page into a folder; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_curves(results, folder / "curves.png")
    draw_layers(folder / "layers.png")
    write_png(folder / "given.png", enlarged(given), len(given))
    for result in results:
        write_png(folder / f"{result.name}.png", enlarged(result.drawn), 12)
        write_png(folder / f"{result.name}-completed.png", enlarged(result.completed), len(given))
    write_whole(folder / "table.txt", f"{table(results)}\n".encode(), "pixelcnn")
    head, *body = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in [COLUMNS, *rows(results)]]
    text = Template((Path(__file__).parent / "page.html").read_text())
    names = {result.name: result for result in results}
    difference = names["sparse"].log[-1]["valid"] - names["dense"].log[-1]["valid"]
    page = text.substitute(
        table=f"<tr>{head.replace('td>', 'th>')}</tr>" + "".join(f"<tr>{row}</tr>" for row in body),
        images=f"{results[0].log[-1]['images']:,}",
        difference=f"{abs(difference):.3f} bits a pixel {'less' if difference < 0 else 'more'}",
    )
    write_whole(folder / "index.html", page.encode(), "pixelcnn")
    return folder / "index.html"


def enlarged(images: Tensor) -> Any:
    """Bytes as arrays, each pixel a square."""
    return arrays_of(images).repeat(ZOOM, 1).repeat(ZOOM, 2)
