"""Generators of layouts, and a report of what a layout connects.

Every generator is a pure function of its arguments and seed: the same on every platform. By one-line name, through
`Layout.from_graph`:

    dense(out[,in])                 random(out[,in],density)              balanced(out[,in],degree[,diagonal=1])
    ws(nodes,neighbours,rewire)     ws2d(height,width,neighbours,rewire)  ba(nodes,links[,extra=E | blocks=B])
    diagonal(nodes[,group])         banded(nodes,width)                   butterfly(nodes)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._core import library, structs
from ._core.arguments import to_list, to_number_text
from ._core.text import percentage
from .layout import Layout, need_layout


def dense(out_blocks: int, in_blocks: int | None = None, *, block_size: int) -> Layout:
    """Every block of a grid of out_blocks x in_blocks (default: square)."""
    return _graph("dense", block_size, 0, out_blocks, _or(in_blocks, out_blocks))


def random(out_blocks: int, in_blocks: int | None = None, *, density: float, block_size: int, seed: int = 0) -> Layout:
    """round(density * out_blocks * in_blocks) blocks, every such set equally likely.

    Raises:
        ValueError: density is outside of [0, 1].
    """
    return _graph("random", block_size, seed, out_blocks, _or(in_blocks, out_blocks), density)


def balanced_random(
    out_blocks: int,
    in_blocks: int | None = None,
    *,
    degree: int,
    block_size: int,
    seed: int = 0,
    diagonal: bool = False,
) -> Layout:
    """`degree` blocks in every row; the columns' counts differ by one at most.

    Args:
        out_blocks: rows of blocks.
        in_blocks: columns of blocks (default: as many).
        degree: blocks in a row.
        block_size: edge of a block, in features.
        seed: of the randomness.
        diagonal: each row of a square grid has its diagonal block among them, which recurrent matrices need.

    Raises:
        ValueError: degree is outside of [0, in_blocks], or a diagonal is asked for where there is none.
    """
    return _graph("balanced", block_size, seed, out_blocks, _or(in_blocks, out_blocks), degree, int(diagonal))


def watts_strogatz(nodes: int, neighbours: int, rewire: float, *, block_size: int, seed: int = 0) -> Layout:
    """A ring whose nodes are linked to their nearest neighbours, with some links moved to random nodes.

    Exactly nodes * (neighbours + 1) blocks: the links in both directions, and the diagonal.

    Args:
        nodes: blocks per side.
        neighbours: links of a node before rewiring, an even number.
        rewire: probability that a link is moved.
        block_size: edge of a block, in features.
        seed: same seed, same layout, on every platform.

    Raises:
        ValueError: an argument is outside of its range.

    Source: Watts and Strogatz, Nature 393:440 (1998), doi:10.1038/30918.
    """
    return _graph("ws", block_size, seed, nodes, neighbours, rewire)


def watts_strogatz_torus(
    height: int, width: int, neighbours: int, rewire: float, *, block_size: int, seed: int = 0
) -> Layout:
    """`watts_strogatz` on a torus of height x width nodes, "nearest" by Euclidean distance.

    Raises:
        ValueError: an argument is outside of its range, or the torus too small for so many neighbours.
    """
    return _graph("ws2d", block_size, seed, height, width, neighbours, rewire)


def barabasi_albert(
    nodes: int, links: int, *, block_size: int, extra: int = 0, blocks: int | None = None, seed: int = 0
) -> Layout:
    """Scale-free layout: nodes join one by one, each linked to `links` earlier ones with probability ~ their degree.

    The links in both directions, the diagonal, and a dense corner of the first `links` nodes; then `extra` links from
    the node of lowest degree to a random one.

    Args:
        nodes: blocks per side.
        links: links that a new node brings, 1 <= links < nodes.
        block_size: edge of a block, in features.
        extra: further links; links * (links + 1) / 2 of them make nodes * (2 * links + 1) blocks.
        blocks: the number of blocks to end with, instead of `extra`.
        seed: same seed, same layout, on every platform.

    Raises:
        ValueError: links is outside of [1, nodes), or `blocks` cannot be reached.

    Source: Barabasi and Albert, Science 286:509 (1999), doi:10.1126/science.286.5439.509.
    """
    count = "" if blocks is None else f",blocks={_text(blocks)}"
    return Layout.from_graph(f"ba({_text(nodes)},{_text(links)},{_text(extra)}{count})", block_size, seed=seed)


def block_diagonal(nodes: int, group: int = 1, *, block_size: int) -> Layout:
    """Groups of `group` consecutive blocks, each connected to itself alone."""
    return _graph("diagonal", block_size, 0, nodes, group)


def banded(nodes: int, width: int, *, block_size: int) -> Layout:
    """Blocks (i, j) with abs(i - j) <= width."""
    return _graph("banded", block_size, 0, nodes, width)


def butterfly(nodes: int, *, block_size: int) -> Layout:
    """The union of the factors of a butterfly network; nodes is a power of two.

    Source: Dao et al., Pixelated Butterfly, ICLR 2022 ("flat block butterfly").
    """
    return _graph("butterfly", block_size, 0, nodes)


@dataclass(frozen=True)
class Degrees:
    """How many blocks the rows, or the columns, of a layout have."""

    min: int
    median: float
    max: int


@dataclass(frozen=True)
class Report:
    """What a layout connects. Everything from `mean_path` on is of square layouts alone, and 0 or empty for others."""

    blocks: int
    density: float
    out_degrees: Degrees
    in_degrees: Degrees
    symmetric: bool
    mean_path: float
    diameter: int
    unreachable: float
    clustering: float
    mix: tuple[float, ...]
    sampled: bool

    def __str__(self) -> str:
        def degrees(d: Degrees) -> str:
            return f"{d.min} / {d.median:g} / {d.max}"

        lines = [
            ("blocks", f"{self.blocks} ({percentage(self.density)})"),
            ("blocks in a row, min / median / max", degrees(self.out_degrees)),
            ("blocks in a column", degrees(self.in_degrees)),
        ]
        if self.mix:
            lines += [
                ("symmetric", "yes" if self.symmetric else "no"),
                ("mean shortest path", f"{self.mean_path:.2f}"),
                ("longest shortest path", str(self.diameter)),
                ("pairs without a path", f"{self.unreachable:.2%}"),
                ("clustering", f"{self.clustering:.3f}"),
                ("reached after 1, 2, ... steps", ", ".join(map(percent, self.mix))),
            ]
        if self.sampled:
            lines.append(("paths, clustering and mix", "of evenly spaced starts"))
        return "\n".join(f"{name:<38}{value}" for name, value in lines)


def report(layout: Layout) -> Report:
    """Degrees, shortest paths, clustering and mix of a layout."""
    need_layout("report", layout)
    r = structs.Report()
    library.call("bs_layout_report", layout.pointer, ctypes.byref(r))
    return Report(
        blocks=r.blocks,
        density=r.density,
        out_degrees=Degrees(r.out.min, r.out.median, r.out.max),
        in_degrees=Degrees(r.in_.min, r.in_.median, r.in_.max),
        symmetric=bool(r.symmetric),
        mean_path=r.mean_path,
        diameter=r.diameter,
        unreachable=r.unreachable,
        clustering=r.clustering,
        mix=tuple(r.mix[: r.mix_steps]),
        sampled=bool(r.sampled),
    )


def mix(layouts: Sequence[Layout]) -> list[float]:
    """Share of blocks reached from one (mean over starts) after each step, step i going through layouts[i].

    Raises:
        ValueError: the layouts are not square and of one size.
    """
    steps = to_list("mix", "layouts", layouts, "a list of layouts")
    hosts = [need_layout("mix", layout).host() for layout in steps]  # as long as their pointers are used
    pointers = (ctypes.c_void_p * len(hosts))(*[layout.pointer.value for layout in hosts])
    shares = np.empty(len(steps))
    library.call("bs_layout_mix", pointers, len(hosts), shares.ctypes.data)
    return [float(share) for share in shares]


def percent(share: float) -> str:
    """Rounded down, so that 100.0 % is all."""
    return f"{math.floor(share * 1000) / 10:.1f}%"


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _graph(name: str, block_size: int, seed: int, *arguments: float) -> Layout:
    return Layout.from_graph(f"{name}({','.join(map(_text, arguments))})", block_size, seed=seed)


def _text(number: float) -> str:
    return to_number_text("graph", number)
