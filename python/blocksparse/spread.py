"""Animations of activation that spreads through a graph. Needs matplotlib: pip install 'blocksparse[viz]'."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from . import graphs
from .layout import Layout
from .models.bars import counting_bar
from .models.files import write_whole
from .viz import FLATTEST, check_picture

Nodes = npt.NDArray[np.int64]

SIDE = 768  # nodes a side, at most: each is a pixel
LINKED = 2500  # nodes, at most, among which single links can be seen
FRAMES = 150  # at most: of a longer spreading some steps are left out
PANELS, ACROSS = 6, 2  # of a strip, at most, and in a row: as wide as a phone
BYTES = 64  # that a block takes while a graph is made: 54 with 4.5 million blocks, 2026-11-26
SHOWN, LAST, ALL = 800, 3000, 20000  # ms that a frame is seen, the last one, and the others together, at most
UNREACHED, REACHED, NEW, LINK = "#ececec", "#e3a08f", "#9c3324", "#333333"


@dataclass(frozen=True)
class Torus:
    """A Watts-Strogatz graph on a torus: its nodes have rows and columns."""

    name: str
    height: int
    width: int
    neighbours: int

    @classmethod
    def of(cls, graph: str) -> Torus:
        """Reads a one-line name, without making the graph.

        Raises:
            ValueError: it is no such graph, or has more nodes than can be drawn.
            MemoryError: it does not fit into memory.
        """
        found = re.fullmatch(r"\s*ws2d\s*\((.*)\)\s*", graph)
        if not found:
            text = "needs one whose nodes have coordinates: ws2d(height,width,neighbours,rewire), as ws2d(16,24,8,0.2)"
            raise ValueError(f"[animate] {graph} is no graph on a torus, {text}")
        words = [word.rpartition("=") for word in found[1].split(",")]
        given = dict(zip(("height", "width", "neighbours"), (value for _, _, value in words), strict=False))
        given |= {key.strip(): value for key, _, value in words if key}
        try:
            height, width, neighbours = (int(float(given[key])) for key in ("height", "width", "neighbours"))
        except (KeyError, ValueError, OverflowError):
            Layout.from_graph(graph, 8)  # says what is wrong with the name
            raise
        if max(height, width) > SIDE:
            raise ValueError(f"[animate] {graph} has {height} x {width} nodes, needs {SIDE} a side at most to be drawn")
        needed, free = height * width * (neighbours + 1) * BYTES, _free_bytes()
        if needed > free:
            raise MemoryError(f"[animate] {graph} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")
        return cls(graph.strip(), height, width, neighbours)

    @property
    def nodes(self) -> int:
        """Blocks per side of its layout."""
        return self.height * self.width

    @property
    def centre(self) -> int:
        """Where activation begins."""
        return self.height // 2 * self.width + self.width // 2

    def places(self, nodes: Nodes) -> tuple[Nodes, Nodes]:
        """Row and column of each."""
        return nodes // self.width, nodes % self.width

    def shortest_lines(self, a: Nodes, b: Nodes) -> Nodes:
        """From a the shortest way to b, [lines, 2 ends, (column, row)].

        One that crosses an edge ends outside of the picture, and comes in again as another line.
        """
        ends = [np.stack(self.places(nodes)[::-1], -1) for nodes in (a, b)]
        size = np.array([self.width, self.height])
        way = (ends[1] - ends[0] + size // 2) % size - size // 2
        crosses = (ends[0] + way != ends[1]).any(1)
        again = np.stack([ends[1] - way, ends[1]], 1)[crosses]
        return np.asarray(np.concatenate([np.stack([ends[0], ends[0] + way], 1), again]))

    def is_shortcut(self, a: Nodes, b: Nodes) -> npt.NDArray[np.bool_]:
        """Whether two nodes are farther apart than neighbours are before links are moved."""

        def squares(down: Nodes, right: Nodes) -> Nodes:
            down, right = np.minimum(down, self.height - down), np.minimum(right, self.width - right)
            return np.asarray(down**2 + right**2)

        (a_row, a_column), (b_row, b_column) = self.places(a), self.places(b)
        nearest = np.sort(squares(*self.places(np.arange(self.nodes))))
        return np.asarray(squares(abs(a_row - b_row), abs(a_column - b_column)) > nearest[self.neighbours])


def steps_from(layout: Layout, start: int) -> Nodes:
    """After how many steps through a square layout each block is reached from one of them; -1: never."""
    out, in_ = layout.coordinates()
    order = np.argsort(in_, kind="stable")
    targets, begins = out[order], np.searchsorted(in_[order], np.arange(layout.grid[1] + 1))
    steps = np.full(layout.grid[0], -1, np.int64)
    steps[start], front, step = 0, np.array([start]), 0
    while front.size:
        step += 1
        linked = np.concatenate([targets[begins[node] : begins[node + 1]] for node in front])
        front = np.unique(linked[steps[linked] < 0])
        steps[front] = step
    return steps


def animate_spread(
    graph: str,
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    layout: Layout | None = None,
    report: graphs.Report | None = None,
) -> Path:
    """Draws how activation spreads from the centre of a graph on a torus, step by step.

    In each step a node that is reached passes activation on to all that it is linked to. A line is a link that was
    moved out of its neighbourhood and reaches a node before any neighbour does; in graphs of many nodes none is drawn.
    Opposite edges of the picture are one: a line that leaves it comes in again on the other side.

    Args:
        graph: one-line name: "ws2d(16,24,8,0.2)".
        path: of the file: all of it is there, or, if writing fails, what was there before. A GIF moves; a PNG or SVG
            holds some steps beside one another. Without an ending the file is a GIF.
        seed: of the graph.
        layout: of that graph and seed, if it is made already.
        report: of the layout, if it is known already.

    Returns:
        The path of the file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: the graph has no coordinates or too many nodes, or there are no pictures with such an ending.
        MemoryError: the graph does not fit into memory.
    """
    place = check_animation(path)
    torus = Torus.of(graph)
    layout = layout or Layout.from_graph(graph, 8, seed=seed)
    spread = _Spread(torus, layout, report or graphs.report(layout))
    if place.suffix.lower() in ("", ".gif"):
        write_whole(place, spread.write_gif, "animate")
    else:
        kind = place.suffix.removeprefix(".").lower()
        write_whole(place, lambda file: spread.strip().savefig(file, format=kind, dpi=240), "animate")
    return place


def check_animation(path: str | os.PathLike[str]) -> Path:
    """The path, ending with .gif if with nothing; raises what `animate_spread` does of a path before any work."""
    return check_picture(path, "animate", ".gif")


class _Spread:
    """The steps of a graph, and their pictures."""

    def __init__(self, torus: Torus, layout: Layout, report: graphs.Report) -> None:
        self.torus, self.report = torus, report
        self.steps = steps_from(layout, torus.centre)
        out, in_ = layout.coordinates()
        taken = (self.steps[in_] >= 0) & (self.steps[out] == self.steps[in_] + 1)
        to, from_ = out[taken], in_[taken]
        far = torus.is_shortcut(from_, to) if torus.nodes <= LINKED else np.zeros(to.size, bool)
        late = far & ~np.isin(to, to[~far])
        self.to, first = np.unique(to[late], return_index=True)
        self.from_ = from_[late][first]

    def write_gif(self, file: IO[bytes]) -> None:
        """All frames, with a bar; a frame is drawn when the one before is written."""
        shown = self._some(FRAMES)
        with interrupts() as check:
            frames = self._frames(shown, check)
            first = next(frames)
            durations = [min(SHOWN, ALL // len(shown))] * (len(shown) - 1) + [LAST]
            how = {"duration": durations if len(shown) > 1 else LAST, "append_images": frames}
            first.save(file, format="GIF", save_all=True, loop=0, **how)
            check()

    def strip(self) -> Any:
        """Some steps in one picture, a matplotlib.figure.Figure."""
        from matplotlib.figure import Figure

        shown = self._some(PANELS)
        across = min(ACROSS, len(shown))
        rows = -(-len(shown) // across)
        figure = Figure(figsize=(2.05 * max(across, 2), rows * (0.3 + self._high(1.95)) + 0.6), layout="constrained")
        axes = figure.subplots(rows, across, squeeze=False).ravel()
        for axis, step in zip(axes, shown, strict=False):
            self._draw(axis, step)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        figure.suptitle(self._title(), fontsize=11)
        figure.supxlabel(self._caption(), fontsize=10)
        return figure

    def _frames(self, shown: list[int], check: Callable[[], None]) -> Iterator[Any]:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image

        with counting_bar(len(shown), unit="", name="frames") as done:
            for count, step in enumerate(shown, 1):
                figure = Figure(figsize=(4.2, self._high(4.0) + 0.9), dpi=130, layout="constrained")
                self._draw(figure.subplots(), step)
                figure.suptitle(self._title(), fontsize=11)
                figure.supxlabel(self._caption(), fontsize=10)
                canvas: Any = FigureCanvasAgg(figure)
                canvas.draw()
                image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
                yield image.quantize(64, dither=Image.Dither.NONE)
                done(count)
                check()

    def _draw(self, axis: Any, step: int) -> None:
        from matplotlib.collections import LineCollection
        from matplotlib.colors import ListedColormap

        state = np.where((self.steps < 0) | (self.steps > step), 0, np.where(self.steps < step, 1, 2))
        torus = self.torus
        axis.imshow(
            state.reshape(torus.height, torus.width),
            cmap=ListedColormap([UNREACHED, REACHED, NEW]),
            vmin=0,
            vmax=2,
            interpolation="nearest",
            aspect="auto" if self._is_flat() else "equal",
        )
        now = self.steps[self.to] == step
        if now.any():
            lines = torus.shortest_lines(self.from_[now], self.to[now])
            axis.add_collection(LineCollection(list(lines), colors=LINK, linewidths=0.6, alpha=0.8), autolim=False)
        share = float(((self.steps >= 0) & (self.steps <= step)).mean())
        axis.set_title(f"step {step}: {graphs.percent(share)} reached", fontsize=10)
        axis.set(xticks=[], yticks=[])
        for spine in axis.spines.values():
            spine.set_visible(False)

    def _some(self, most: int) -> list[int]:
        """So many steps, evenly, the first and the last among them."""
        last = int(self.steps.max())
        return sorted({round(step) for step in np.linspace(0, last, min(last + 1, most))})

    def _title(self) -> str:
        return self.torus.name if len(self.torus.name) <= 40 else f"{self.torus.name[:37]}..."

    def _caption(self) -> str:
        lines = ", lines: moved links" if self.torus.nodes <= LINKED else ""
        unlinked = self.report.unreachable
        paths = f"average path length {self.report.mean_path:.2f}" if unlinked < 1 else "no paths"
        if 0 < unlinked < 1:
            paths += f", {graphs.percent(unlinked)} of pairs without a path"
        return f"{paths}\ndark: new, light: before{lines}"

    def _is_flat(self) -> bool:
        height, width = self.torus.height, self.torus.width
        return max(height, width) > FLATTEST * min(height, width)

    def _high(self, wide: float) -> float:
        return wide * min(max(self.torus.height / self.torus.width, 1 / FLATTEST), 1.25)


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """A check that raises KeyboardInterrupt if Ctrl-C came: Python drops the one that comes within a destructor."""
    came = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_mine = usual and threading.current_thread() is threading.main_thread()
    if is_mine:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        if is_mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _free_bytes() -> int:
    """Memory that can be had without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
