"""Draws the README's picture, speed-up against density, from files of results.

python benchmarks/readme_picture.py --card CARD.jsonl ... --cpu CPU.jsonl [--output docs/pictures/speed.png]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pictures import colours, draw_speed_up, pyplot
from records import Results
from rows import Row, kind, rows_of


@dataclass(frozen=True)
class Panel:
    """Which rows of a file are drawn, and under what name."""

    title: str
    on_card: bool
    direction: str
    dtype: str
    shape: tuple[int, int]
    n: int

    def takes(self, row: Row) -> bool:
        """Whether it is of this panel: a random pattern, features-last, a dense time beside it."""
        problem, record = row.problem, row.record
        plain = kind(problem) == "random" and problem.order == "features-last" and not problem.others
        same = (problem.direction, problem.dtype, problem.n) == (self.direction, self.dtype, self.n)
        alone = row.on_card or problem.threads == 1
        return plain and same and alone and (record["out"], record["in"]) == self.shape and row.speed_up is not None


PANELS = (
    Panel("H200, bf16, 12288 x 12288, 32 tokens: fprop", True, "fprop", "bf16", (12288, 12288), 32),
    Panel("H200, bf16, 4096 x 4096, 4096 tokens: fprop", True, "fprop", "bf16", (4096, 4096), 4096),
    Panel("H200, bf16, 4096 x 4096, 4096 tokens: wgrad", True, "wgrad", "bf16", (4096, 4096), 4096),
    Panel("one Zen 5 core, f32, 1024 x 1024, 64 tokens: fprop", False, "fprop", "f32", (1024, 1024), 64),
)


def main() -> None:
    """Writes the file, and says where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--card", type=Path, nargs="+", required=True, help="JSON lines of blocksparse-bench --device cuda"
    )
    parser.add_argument("--cpu", type=Path, required=True, help="of a CPU")
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/speed.png"))
    options = parser.parse_args()
    of_cards = [row for card in options.card for row in rows_of(Results.read(card))]
    rows = {True: of_cards, False: rows_of(Results.read(options.cpu))}
    plt = pyplot()
    colour = colours((8, 16, 32, 64, 128))
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained", sharex=True, sharey=True)
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        some = [row for row in rows[panel.on_card] if panel.takes(row)]
        if not some:
            given = ", ".join(map(str, options.card)) if panel.on_card else options.cpu
            parser.error(f"{given}: no line of {panel.title!r}")
        draw_speed_up(axis, some, colour, [0.2, 0.5, 1, 2, 5, 10, 20, 50])
        axis.set_title(panel.title, fontsize=10)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.supxlabel("share of the blocks that are there", fontsize=10)
    figure.supylabel("times as fast as dense (cuBLAS; OpenBLAS or oneDNN)", fontsize=10)
    figure.savefig(options.output, dpi=90)
    print(options.output)


if __name__ == "__main__":
    main()
