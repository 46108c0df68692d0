"""Which family of CUDA kernels does a product, by tokens and block size: the choice itself, on an H100 or H200.

PYTHONPATH=benchmarks python docs/pictures/families.py [--bench build/release/tools/blocksparse-bench]

A panel for each pass and density, bf16, 4096 x 4096. Dots: problems of the crossover tables, where families were timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from crossover import FAMILIES, read
from style import INK, PHONE, phone_figure, save

ROOT = Path(__file__).resolve().parents[2]
SIDE = 4096
PASSES, DENSITIES, BLOCKS = ("fprop", "dgrad", "wgrad"), (0.02, 0.1, 0.25), (8, 16, 32, 64, 128)
TOKENS = sorted({round(2**power) for power in np.arange(0, 13.01, 0.5)} | {65, 129, 513, 1025, 2049})
COLOURS = ("blue", "orange", "green", "red", "purple", "brown", "cyan", "olive", "pink", "gray")
Key = tuple[str, float, int, int]


def line(key: Key) -> str:
    """The problem as the crossover tables have it."""
    direction, density, block, n = key
    return f"linear:{direction} bf16 n={n} b={block} random({SIDE // block},{density:g})"


def choices(bench: Path, keys: list[Key]) -> dict[Key, str]:
    """The family of each, asked in one run."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as problems:
        problems.write("\n".join(map(line, keys)))
        problems.flush()
        command = [str(bench), "--choice", "hopper", "--json", "--file", problems.name]
        answers = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {key: json.loads(answer)["kernel"] for key, answer in zip(keys, answers, strict=True)}


def timed() -> set[str]:
    """Lines of problems that two families and more were timed with."""
    families: dict[str, set[str]] = {}
    for card in ("h100", "h200"):
        for time in read(ROOT / "src/gemm/cuda/crossover" / f"{card}.csv").values():
            families.setdefault(time.problem, set()).add(time.family)
    return {problem for problem, some in families.items() if len(some) > 1}


def draw(axis: Any, family: dict[Key, str], direction: str, density: float, colours: dict[str, Any]) -> None:
    """One panel: a row for each block size, as wide as its tokens on a scale of powers of two."""
    names = list(colours)
    grid = [[names.index(family[direction, density, block, n]) for n in TOKENS] for block in BLOCKS]
    edges = np.append(np.log2(TOKENS), 13.5)
    axis.pcolormesh(
        edges,
        np.arange(len(BLOCKS) + 1),
        grid,
        cmap=ListedColormap(list(colours.values())),
        vmin=-0.5,
        vmax=len(names) - 0.5,
    )
    for row in range(1, len(BLOCKS)):
        axis.axhline(row, color="white", linewidth=1)
    there = timed()
    dots = [
        (n, row) for row, block in enumerate(BLOCKS) for n in TOKENS if line((direction, density, block, n)) in there
    ]
    if dots:
        x, y = np.array(dots).T
        axis.plot(np.log2(x), y + 0.5, ".", color="white", markersize=2.5)
    axis.set_xticks([0, 5, 10], ["1", "32", "1024"])
    axis.set_yticks(np.arange(len(BLOCKS)) + 0.5, [str(block) for block in BLOCKS])
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def main() -> None:
    """Writes families.png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bench", type=Path, default=ROOT / "build/release/tools/blocksparse-bench")
    options = parser.parse_args()
    keys = [(p, d, b, n) for p in PASSES for d in DENSITIES for b in BLOCKS for n in TOKENS]
    family = choices(options.bench, keys)
    used = [name for name in FAMILIES if name in family.values()]
    colours = {name: f"tab:{COLOURS[i % len(COLOURS)]}" for i, name in enumerate(used)}
    if "generic" in colours:
        colours["generic"] = INK
    figure = phone_figure(PHONE * 1.55)
    axes = figure.subplots(len(PASSES), len(DENSITIES), sharex=True, sharey=True)
    for row, direction in zip(axes, PASSES, strict=True):
        for axis, density in zip(row, DENSITIES, strict=True):
            draw(axis, family, direction, density, colours)
            axis.set_title(f"{direction}, {density:.0%}")
    axes[1, 0].set_ylabel("block size")
    axes[-1, 1].set_xlabel("tokens")
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    save(figure, "families")


if __name__ == "__main__":
    main()
