"""How far sparse arms are below dense ones of the same form, in bits per byte, against the bytes that they have read.

    python experiments/small_world_lstm/lead.py results/12M.jsonl,dense-inner2,balanced --out results/lead.png

Of each arm its longest runs, with the rate that the text that chooses prefers, as the mean of seeds. Both arms are
compared where both have a point of their curve, on the text that chooses. Runs that diverged are named.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from blocksparse.program import finish
from blocksparse.viz import check_picture
from report import Line, longest_by_rate, read, runs_of


@dataclass(frozen=True)
class Lead:
    """Of one sparse arm: what the legend says, and points of bytes and bits below dense."""

    label: str
    points: list[tuple[float, float]]


def curve_of(lines: list[Line], arm: str) -> tuple[dict[float, float], list[Line]]:
    """Bits of the text that chooses by bytes read, the mean of its runs; and those.

    Raises:
        ValueError: the arm has no run.
    """
    whole = runs_of(lines)
    if not (its := [run for run in whole if run["arm"] == arm]):
        arms = ", ".join(sorted({run["arm"] for run in whole}))
        raise ValueError(f"there is no run of {arm}, but of {arms or 'no arm'}")
    runs = longest_by_rate(its)[0]
    curves = [{point[0]: point[3] for point in run["curve"]} for run in runs]
    shared = set.intersection(*map(set, curves))
    return {at: fmean(curve[at] for curve in curves) for at in sorted(shared)}, runs


def lead_of(path: Path, dense: str, sparse: str) -> Lead:
    """Raises ValueError where two arms have no point in common, or are not of one form, length and text."""
    lines = read(path)
    (of_dense, dense_runs), (of_sparse, runs) = curve_of(lines, dense), curve_of(lines, sparse)
    if dense_runs[0]["graph"] or not runs[0]["graph"]:
        raise ValueError(f"{path}: {dense} needs to be a dense arm and {sparse} one with a graph")
    for key in ("bytes", "text", "inner", "stride"):
        one, other = (its[0].get(key) for its in (dense_runs, runs))
        if None not in (one, other) and one != other:  # older lines lack some
            raise ValueError(f"{path}: {dense} has {key} {one} and {sparse} {other}, needs to be the same")
    for name in (line["name"] for line in lines if line["arm"] in (dense, sparse) and line.get("diverged")):
        print(f"left out, for it diverged: {name}")
    points = [(at, of_dense[at] - of_sparse[at]) for at in of_dense if at in of_sparse]
    if not points:
        raise ValueError(f"{path}: {dense} and {sparse} were not evaluated after the same bytes")
    seeds = f"seeds {len(runs)}, dense {len(dense_runs)}"
    shape = f"{runs[0]['hidden']:,} units, b = {runs[0].get('block', 'not said')}"
    return Lead(f"{runs[0]['parameters'] / 1e6:.1f}M, {shape} ({seeds})", points)


def plot(leads: list[Lead], path: Path) -> None:
    """A line for each."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for lead in leads:
        x, y = zip(*lead.points, strict=True)
        axes.plot([at / 1e6 for at in x], y, marker="o", markersize=2.5, linewidth=1.3, label=lead.label)
    axes.axhline(0, color="black", linewidth=0.9)
    axes.set_xscale("log")
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128]
    low, high = axes.get_xlim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("MB of text")
    axes.set_ylabel("bits per byte below dense")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    """Writes the picture, and prints the last point of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "pairs", nargs="+", metavar="RESULTS,DENSE,SPARSE", help="a file of results, and two arms of it"
    )
    parser.add_argument("--out", type=Path, required=True, help="PNG, SVG or PDF")
    options = parser.parse_args()
    path = check_picture(options.out, "lead")
    leads = []
    for pair in options.pairs:
        if len(parts := pair.rsplit(",", 2)) != 3:
            parser.error(f"{pair} needs two commas: RESULTS,DENSE,SPARSE")
        leads.append(lead_of(Path(parts[0]), *parts[1:]))
        print(f"{leads[-1].label}: {leads[-1].points[-1][1]:+.4f} after {leads[-1].points[-1][0] / 1e6:.1f} MB")
    plot(leads, path)


if __name__ == "__main__":
    finish(main)
