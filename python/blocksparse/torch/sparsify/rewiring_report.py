"""What `Rewiring.report()` gives."""

from __future__ import annotations

from dataclasses import dataclass


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
