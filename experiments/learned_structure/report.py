"""Tables and pictures of what byte_lm.py and small_world.py have written.

python experiments/learned_structure/report.py byte_lm results/byte_lm.jsonl
python experiments/learned_structure/report.py small_world results/small_world.jsonl --masks out/small_world
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from blocksparse.models.lines import need_lines
from blocksparse.program import finish

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """The lines, of which there needs to be one."""
    return need_lines(path, ("arm", "method", "seed", "bits_per_byte"))


def byte_lm_table(lines: list[Line]) -> str:
    """Markdown: the best arms first, of each number of steps."""
    head = ["arm", "seed", "steps", "more steps", "FFN weights", "bits per byte", "to dense", "to dense that went on"]
    head += ["at once", "seconds"]
    rows = [f"| {' | '.join(head)} |", len(head) * "| --- " + "|"]
    dense: dict[tuple[Any, ...], list[float]] = {}  # runs again differ by 0.002: their mean is what others are beside
    for line in lines:
        if line["method"] == "dense":
            dense.setdefault((line["steps"], line["seed"], line.get("text")), []).append(line["bits_per_byte"])
    longer = {_lengths(d): d["bits_per_byte"] for d in lines if d["method"] == "dense-more"}
    for line in sorted(lines, key=lambda d: (d["steps"], d["bits_per_byte"])):
        goes_on = line["method"] in ("gmp-distil", "dense-more", "obs", "magnitude", "wanda")
        more = round(line["steps"] * line.get("more", 0.5)) if goes_on else 0
        cells = [line["arm"], str(line["seed"]), str(line["steps"]), str(more or ""), f"{line['ffn_weights']:,}"]
        cells.append(f"{line['bits_per_byte']:.4f}")
        beside = line["steps"], line["seed"], line.get("text")
        mean = float(np.mean(dense[beside])) if beside in dense else None
        for base in (mean, longer.get(_lengths(line)) if goes_on else None):
            cells.append(f"{100 * (line['bits_per_byte'] / base - 1):+.1f} %" if base else "")
        cells += [f"{line['before']:.4f}" if "before" in line else "", f"{line['seconds']:.0f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _lengths(line: Line) -> tuple[Any, ...]:
    """Of both parts of a training, their seed, and the text."""
    return line["steps"], line.get("more", 0.5), line.get("more_rate", 0.5), line["seed"], line.get("text")


def byte_lm_picture(lines: list[Line], path: Path) -> None:
    """Bits per byte of each method, a colour for each sparsity; of the lengths and the seed that most lines have."""
    kinds = [(*_lengths(line), line["seed"]) for line in lines]
    lines = [line for line, kind in zip(lines, kinds, strict=True) if kind == max(kinds, key=kinds.count)]
    dense = float(np.mean([line["bits_per_byte"] for line in lines if line["method"] == "dense"]))
    lines = sorted((line for line in lines if line["block"]), key=lambda d: d["bits_per_byte"])
    best = {line["method"]: line["bits_per_byte"] for line in reversed(lines) if line["sparsity"] == 0.9}
    places = {method: i for i, method in enumerate(sorted(best, key=best.__getitem__))}
    figure = Figure(figsize=(7, 1 + 0.28 * len(places)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(dense, color="black", linewidth=0.8)
    axes.annotate("dense", (dense, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    colours, markers = {0.8: "C0", 0.9: "C1", 0.95: "C2"}, {32: "s", 64: "o", 128: "D"}
    for line in lines:
        colour, marker = colours[line["sparsity"]], markers[line["block"]]
        axes.plot(line["bits_per_byte"], places[line["method"]], marker, color=colour, markersize=7, alpha=0.7)
    for name, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=f"{name:.0%} zeros")
    for block, marker in markers.items():
        axes.plot([], [], marker, color="grey", label=f"b = {block}")
    axes.set(yticks=range(len(places)), yticklabels=places, xlabel="bits per byte of held-out text")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    figure.savefig(path, dpi=130)


def small_world_table(lines: list[Line]) -> str:
    """Markdown: the best arms first."""
    head = ["arm", "weights between units", "bits per byte", "blocks in a row", "in a column", "diagonal", "mean path"]
    head += ["clustering", "mix after 2", "mix of a step", "seconds"]
    rows = [f"| {' | '.join(head)} |", len(head) * "| --- " + "|"]
    for line in sorted(lines, key=lambda d: d["bits_per_byte"]):
        cells = [line["arm"], f"{line['recurrent_weights']:,}", f"{line['bits_per_byte']:.4f}"]
        parts = [part for name, part in line["structure"].items() if name != "mix_of_a_step"]
        if parts:
            for degrees in ("out_degrees", "in_degrees"):
                least, most = (f(p[degrees][f.__name__] for p in parts) for f in (min, max))
                cells.append(f"{least} to {most}")
            cells.append(f"{np.mean([p['diagonal'] / (p['blocks'] / p['density']) ** 0.5 for p in parts]):.0%}")
            cells += [f"{np.mean([p[key] for p in parts]):.2f}" for key in ("mean_path", "clustering")]
            cells.append(f"{np.mean([(p['mix'] + [p['mix'][-1]])[1] for p in parts]):.0%}")
            cells.append(f"{np.mean([m[-1] for m in line['structure']['mix_of_a_step'].values()]):.0%}")
        else:
            cells += 7 * [""]
        cells.append(f"{line['seconds']:.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def layouts_picture(lines: list[Line], masks: Path, path: Path) -> None:
    """The blocks of each matrix, a row for each arm. Raises FileNotFoundError where there are none."""
    files = {line["arm"]: masks / f"masks-{line['arm']}-seed{line['seed']}.npz" for line in lines}
    found = {arm: np.load(file) for arm, file in files.items() if file.exists()}
    if not found:
        raise FileNotFoundError(f"{masks} has none of {', '.join(file.name for file in files.values())}")
    names = list(next(iter(found.values())).files)
    figure = Figure(figsize=(1.5 * len(names), 1.6 * len(found)), layout="constrained")
    for row, (arm, arrays) in zip(figure.subplots(len(found), len(names), squeeze=False), found.items(), strict=True):
        for axes, name in zip(row, names, strict=True):
            axes.imshow(arrays[name], cmap="Greys", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            if arm == next(iter(found)):
                axes.set_title(name, fontsize=8)
        row[0].set_ylabel(arm, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Writes a table, and a picture, beside the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("byte_lm", "small_world"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--masks", type=Path, help="folder of masks-*.npz")
    options = parser.parse_args()
    found = read(options.results)
    table = (byte_lm_table if options.what == "byte_lm" else small_world_table)(found)
    options.results.with_suffix(".md").write_text(table)
    if options.what == "byte_lm" and len({line["method"] for line in found}) > 4:
        byte_lm_picture(found, options.results.with_suffix(".png"))
    elif options.masks:
        layouts_picture(found, options.masks, options.results.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    finish(main)
