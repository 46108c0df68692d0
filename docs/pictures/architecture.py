"""The map of src: folders as boxes, and who includes whom as arrows, from the tables of scripts/check_includes.py.

python docs/pictures/architecture.py

Arrows that follow from others are left out: ops include core, but so does gemm, which they include. The script fails
where a folder of src has no place here, or where an arrow would point upwards.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_suffix(".png")
sys.path.insert(0, str(ROOT / "scripts"))
import check_includes  # noqa: E402

WIDTH, HEIGHT = 4.0625, 7.5  # inches: 390 pixels of a phone, at which letters have 9 points
INK, LINE, GROUND = "#333333", "#9c3324", "#f4f1ee"
Box = tuple[float, float, float, float]  # left, bottom, width, height

# Folders of src, from the top: who includes stands above who is included.
BOXES: dict[str, Box] = {
    "adapters": (0.1, 5.85, 1.2, 0.58),
    "capi": (1.45, 5.85, 1.2, 0.58),
    "no_cuda": (2.8, 5.85, 1.16, 0.58),
    "ops": (0.1, 4.15, 3.86, 1.4),
    "gemm": (0.1, 1.6, 2.7, 2.2),
    "cpu": (0.1, 0.8, 1.15, 0.5),
    "cuda": (1.4, 0.8, 1.4, 0.5),
    "graphs": (2.95, 0.8, 1.01, 0.5),
    "core": (0.1, 0.05, 3.86, 0.45),
}
SAYS = {
    "adapters": "PyTorch, JAX,\nTensorFlow",
    "capi": "c_api.h",
    "no_cuda": "without nvcc",
    "cpu": "vectors, threads",
    "cuda": "cards, ring, ptx/",
    "core": "layouts, checks, problem lines",
    "graphs": "generators",
}
OPS: dict[str, Box] = {
    "sequence": (0.75, 4.95, 1.2, 0.34),
    "linear": (2.2, 4.95, 0.75, 0.34),
    "conv": (3.1, 4.95, 0.72, 0.34),
    "lstm": (0.25, 4.3, 0.75, 0.34),
    "norm": (1.15, 4.3, 0.8, 0.34),
    "glu": (2.2, 4.3, 0.75, 0.34),
    "bias": (3.1, 4.3, 0.72, 0.34),
}
ENGINE: dict[str, Box] = {"cpu": (0.2, 1.7, 0.85, 1.82), "cuda": (1.15, 1.7, 1.55, 1.82)}


def group_of(folder: str) -> str | None:
    """The box that a folder of the whitelist lies in: `src/ops/conv/cpu` -> `ops`."""
    name = folder.removeprefix("src/").split("/")[0].split(".")[0]
    return name if name in BOXES else None


def includes(levels: int) -> set[tuple[str, str]]:
    """Pairs of boxes (1 level) or of ops (2 levels), of which the first includes the second."""
    pairs = set()
    for folder, entries in check_includes.MAY_INCLUDE.items():
        for entry in entries.split():
            if levels == 1:
                pair = (group_of(folder), group_of("src/" + entry))
            else:
                pair = (op_of(folder), op_of("src/" + entry))
            if None not in pair and pair[0] != pair[1]:
                pairs.add(pair)
    return {(above, below) for above, below in pairs if above and below}


def op_of(folder: str) -> str | None:
    """`src/ops/conv/cpu` -> `conv`."""
    found = re.match(r"src/ops/(\w+)", folder)
    return found[1] if found and found[1] in OPS else None


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without those that follow from two others or more."""
    below: dict[str, set[str]] = {}
    for a, b in pairs:
        below.setdefault(a, set()).add(b)

    def reach(a: str) -> set[str]:
        return {c for b in below.get(a, set()) for c in ({b} | reach(b))}

    return {(a, b) for a, b in pairs if not any(b in reach(c) for c in below[a] - {b})}


def draw_box(axis: Axes, box: Box, title: str, text: str = "", *, inner: bool = False, top: bool = False) -> None:
    """A box with its name, and what is in it."""
    left, bottom, width, height = box
    style = "round,pad=0,rounding_size=0.06"
    axis.add_patch(
        FancyBboxPatch(
            (left, bottom), width, height, style, facecolor="white" if inner else GROUND, edgecolor=INK, lw=0.8
        )
    )
    middle = left + width / 2
    y = bottom + height - 0.13 if top else bottom + height / 2 + 0.09 * (1 + text.count("\n") * 0.75) * bool(text)
    axis.text(middle, y, title, ha="center", va="center", weight="bold", size=9)
    if text:
        y = bottom + (height - 0.22) / 2 if top else bottom + height / 2 - 0.1
        axis.text(middle, y, text, ha="center", va="center", size=7.5, linespacing=1.25)


def draw_arrow(axis: Axes, above: Box, below: Box, *, both: bool = False) -> None:
    """From the bottom of one to the top of the other, as straight down as they allow."""
    x = [max(above[0], below[0]), min(above[0] + above[2], below[0] + below[2])]
    if x[0] < x[1]:
        start = end = sum(x) / 2
    else:
        start, end = above[0] + above[2] / 2, below[0] + below[2] / 2
    tops = (start, above[1]), (end, below[1] + below[3])
    if tops[0][1] <= tops[1][1]:
        raise SystemExit(f"an include would point upwards: {above} to {below}")
    arrow = {
        "arrowstyle": "<|-|>" if both else "-|>",
        "color": LINE,
        "lw": 1.1,
        "shrinkA": 0,
        "shrinkB": 0,
        "mutation_scale": 9,
    }
    axis.annotate("", tops[1], tops[0], arrowprops=arrow)


def families() -> str:
    """Names of the families, two a line where they fit."""
    rows = (ROOT / "src/gemm/cuda/families.inc").read_text(encoding="utf-8")
    names = re.findall(r"^BS_FAMILY\((\w+),", rows, re.M)
    lines, line = [], ""
    for name in names:
        if line and len(line) + len(name) > 22:
            lines.append(line + ",")
            line = ""
        line += (", " if line else "") + name
    return "\n".join([*lines, line])


def main(path: Path = PICTURE) -> None:
    """Writes the picture, and says where."""
    missing = {path.name for path in (ROOT / "src").iterdir() if path.is_dir()} - BOXES.keys()
    missing |= {path.name for path in (ROOT / "src/ops").iterdir() if path.is_dir()} - OPS.keys()
    if missing:
        raise SystemExit(f"docs/pictures/architecture.py has no place for {', '.join(sorted(missing))}")
    figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axis.set_axis_off()
    python = (0.1, 6.75, 3.86, 0.6)
    draw_box(
        axis, python, "python/blocksparse", "_core: ctypes.  torch, jax, keras, tensorflow: front ends", inner=True
    )
    for name in ("adapters", "capi"):
        draw_arrow(axis, python, BOXES[name])
    for name, box in BOXES.items():
        draw_box(axis, box, f"src/{name}", SAYS.get(name, ""), top=name in ("ops", "gemm"))
    for above, below in reduced(includes(1)):
        draw_arrow(axis, BOXES[above], BOXES[below])
    for name, box in OPS.items():
        draw_box(axis, box, name, inner=True)
    pairs = includes(2)
    mutual = {(a, b) for a, b in pairs if (b, a) in pairs}
    for above, below in reduced(pairs - mutual) | {pair for pair in mutual if OPS[pair[0]][1] > OPS[pair[1]][1]}:
        draw_arrow(axis, OPS[above], OPS[below], both=(above, below) in mutual)
    kernels = "driver\nplan\nkernels.inc\n\nproduct\noutputs\nfew_tokens\ntaps\ngradient\namx/"
    draw_box(axis, ENGINE["cpu"], "cpu", kernels, inner=True, top=True)
    draw_box(axis, ENGINE["cuda"], "cuda", "driver, families.inc, walk\n\n" + families(), inner=True, top=True)
    figure.savefig(path, dpi=144)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
