"""What drawn pictures share: letters for a phone's width, and a white ground of their own for light and dark pages."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image

HERE = Path(__file__).parent
PHONE = 390 / 96  # inches: 390 pixels of a phone, at which letters have 9 points
BLOCK, PALE, INK = "#9c3324", "#ececec", "#333333"

mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "text.color": INK,
        "figure.facecolor": "white",
    }
)


def phone_figure(height: float) -> Figure:
    """A figure of a phone's width, so many inches high."""
    return Figure(figsize=(PHONE, height), layout="constrained")


def save(figure: Figure, name: str) -> None:
    """Writes a PNG beside the scripts, 2.5 pixels for each of a phone's, and says where."""
    path = HERE / f"{name}.png"
    figure.savefig(path, dpi=240)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(path)
