"""Speed-up over dense products against density, from files of results.

PYTHONPATH=benchmarks python docs/pictures/speed.py [--card FILE.jsonl ...] [--cpu FILE.jsonl]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pictures import colours, draw_speed_up
from records import Results
from rows import Row, kind, rows_of
from style import phone_figure, save

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CARD = [RESULTS / "2026-11-22-nvidia-h200.jsonl", RESULTS / "2026-11-24-nvidia-h200-many.jsonl"]
CPU = RESULTS / "2026-11-22-amd-epyc-zen5.jsonl"


@dataclass(frozen=True)
class Panel:
    """Which rows of a file are drawn, and under what name."""

    title: str
    on_card: bool
    direction: str
    dtype: str
    side: int
    n: int

    def takes(self, row: Row) -> bool:
        """Whether it is of this panel: a random pattern, features-last, a dense time beside it."""
        problem, record = row.problem, row.record
        plain = kind(problem) == "random" and problem.order == "features-last" and not problem.others
        same = (problem.direction, problem.dtype, problem.n) == (self.direction, self.dtype, self.n)
        alone = row.on_card or problem.threads == 1
        square = record["out"] == record["in"] == self.side
        return plain and same and alone and square and row.speed_up is not None


PANELS = (
    Panel("H200, bf16", True, "fprop", "bf16", 12288, 32),
    Panel("H200, bf16", True, "fprop", "bf16", 4096, 4096),
    Panel("H200, bf16", True, "wgrad", "bf16", 4096, 4096),
    Panel("one Zen 5 core, f32", False, "fprop", "f32", 1024, 64),
)


def main() -> None:
    """Writes speed.png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--card", type=Path, nargs="+", default=CARD, help="lines of blocksparse-bench --device cuda")
    parser.add_argument("--cpu", type=Path, default=CPU, help="lines of a CPU")
    options = parser.parse_args()
    of_cards = [row for card in options.card for row in rows_of(Results.read(card))]
    rows = {True: of_cards, False: rows_of(Results.read(options.cpu))}
    colour = colours((8, 16, 32, 64, 128))
    figure = phone_figure(5.4)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        some = [row for row in rows[panel.on_card] if panel.takes(row)]
        if not some:
            given = ", ".join(map(str, options.card)) if panel.on_card else options.cpu
            parser.error(f"{given}: no line of {panel}")
        draw_speed_up(axis, some, colour, [0.5, 1, 2, 5, 10, 20, 50])
        axis.set_xticks([0.02, 0.1, 0.5], ["2 %", "10 %", "50 %"])
        axis.set_title(f"{panel.title}, {panel.direction}\n{panel.side:,} wide, {panel.n:,} tokens")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("density")
    figure.supylabel("times as fast as dense", fontsize=9)
    save(figure, "speed")


if __name__ == "__main__":
    main()
