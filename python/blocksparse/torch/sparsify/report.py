"""What `report()` gives, as rows and as a table: `Report` of a pruner, `RewiringReport` of SET and RigL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One weight.

    Attributes:
        name: of the target.
        shape: (out, in).
        block_size: edge of a block.
        blocks: of the grid.
        live: how many of them are not zero.
        norm_kept: |W live|_F / |W|_F, where W has the dropped blocks as they were when they were dropped.
        now_s: seconds of a forward call of the layer as it is; None: not measured.
        expected_s: seconds of a forward call of its block-sparse form; None: not measured.
    """

    name: str
    shape: tuple[int, int]
    block_size: int
    blocks: int
    live: int
    norm_kept: float
    now_s: float | None = None
    expected_s: float | None = None

    @property
    def density(self) -> float:
        """live / blocks."""
        return self.live / self.blocks

    @property
    def sparsity(self) -> float:
        """1 - density."""
        return 1 - self.density


@dataclass(frozen=True)
class Report:
    """Rows, and a table of them: `print(report)`."""

    step: int
    rows: Sequence[Row]

    @property
    def density(self) -> float:
        """Live blocks / blocks of all rows, each block counted with its b^2 numbers."""
        return sum(r.live * r.block_size**2 for r in self.rows) / sum(r.blocks * r.block_size**2 for r in self.rows)

    def __str__(self) -> str:
        head = ["layer", "out x in", "b", "live", "blocks", "sparsity", "density", "norm kept"]
        timed = any(row.expected_s is not None for row in self.rows)
        lines = [head + ["time now", "expected", "faster"] * timed]
        for row in self.rows:
            cells = [row.name, f"{row.shape[0]} x {row.shape[1]}", str(row.block_size), str(row.live), str(row.blocks)]
            cells += [f"{row.sparsity:.2%}", f"{row.density:.2%}", f"{row.norm_kept:.2%}"]
            lines.append(cells + _times(row) * timed)
        width = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = [
            "  ".join(_aligned(cell, w, i) for i, (cell, w) in enumerate(zip(line, width, strict=True)))
            for line in lines
        ]
        return "\n".join([*text, f"step {self.step}: {self.density:.2%} of all blocks are live"])


def _times(row: Row) -> list[str]:
    if row.now_s is None or row.expected_s is None:
        return ["-", "-", "-"]
    return [
        *(f"{s * 1e3:.2f} ms" if s > 1e-3 else f"{s * 1e6:.1f} us" for s in (row.now_s, row.expected_s)),
        f"{row.now_s / row.expected_s:.2f}x",
    ]


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


@dataclass(frozen=True)
class RewiringRow:
    """A layer."""

    name: str
    shape: tuple[int, int]
    """(out, in), in features or channels."""
    block_size: int
    blocks: int
    density: float
    grown: float
    """Share of the blocks that are not where the training began."""


@dataclass(frozen=True)
class RewiringReport:
    """Prints as a table."""

    rows: tuple[RewiringRow, ...]
    steps: int
    skipped: int
    """Updates that moved no block because something was not finite."""

    def __str__(self) -> str:
        head = ("layer", "shape", "b", "blocks", "density", "grown")
        body = [
            (
                r.name,
                f"{r.shape[0]} x {r.shape[1]}",
                f"{r.block_size}",
                f"{r.blocks}",
                f"{r.density:.2%}",
                f"{r.grown:.2%}",
            )
            for r in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in (head, *body)
        ]
        return "\n".join([*lines, f"{self.steps} steps, {self.skipped} updates left out"])
