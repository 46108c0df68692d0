"""Pictures of docs/guide/pixelcnn.md: python docs/pictures/pixelcnn.py [folder of `make pixelcnn`]."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from PIL import Image

from blocksparse.models.pixelcnn import layouts
from blocksparse.models.pixelcnn.architecture import architecture_of
from blocksparse.models.pixelcnn.config import ModelConfig

HERE = Path(__file__).parent
F, B, G = 32, 8, 4
ARMS = {
    "dense": ModelConfig(3, F, 1, 1),
    "4 groups": ModelConfig(3, F, 1, 4, "diagonal", G, B),
    "balanced(4,8,2)": ModelConfig(3, F, 1, 4, "balanced", G, B),
}


def seen(config: ModelConfig, name: str, in_order_of_x: bool) -> npt.NDArray[np.bool_]:
    """Which input channels each output channel sees, as they lie in x or as the layout has them."""
    kind = next(kind for kind in architecture_of(config).kinds if kind.name == name)
    if not config.layout:
        return np.ones((kind.outputs, kind.inputs), bool)
    layout = layouts.layouts_of(config, kind, 1, 0)[0]
    mask = np.kron(layout.mask(), np.ones((config.block, config.block), bool))
    order = layouts.order_of(config, kind)
    if order is None or not in_order_of_x:
        return mask
    made = np.zeros_like(mask)
    made[:, order.numpy()] = mask
    return made


def draw_layers() -> None:
    """The first convolution of a gated resnet, 2 F -> F, dense and in both sparse ways."""
    figure = Figure((10.5, 4.3), layout="constrained")
    axes = figure.subplots(2, 3)
    columns = [("dense", False), ("4 groups", False), ("balanced(4,8,2)", False)]
    for axis, (name, in_order) in zip(axes[0], columns, strict=True):
        _draw(axis, seen(ARMS[name], "u_1", in_order), f"{name}: as the layout has them")
    for axis, name in zip(axes[1], ARMS, strict=True):
        _draw(axis, seen(ARMS[name], "u_1", True), f"{name}: as they lie in elu([x, -x])")
    figure.savefig(HERE / "pixelcnn_layers.png", dpi=110)


def _draw(axis: object, mask: npt.NDArray[np.bool_], title: str) -> None:
    axis.imshow(mask, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="auto")  # type: ignore[attr-defined]
    for x in range(B, mask.shape[1], B):
        axis.axvline(x - 0.5, color="white", linewidth=1.6 if x == F else 0.5)  # type: ignore[attr-defined]
    for y in range(B, mask.shape[0], B):
        axis.axhline(y - 0.5, color="white", linewidth=0.5)  # type: ignore[attr-defined]
    axis.set_title(title, fontsize=10)  # type: ignore[attr-defined]
    axis.set(xticks=[F / 2 - 0.5, 1.5 * F - 0.5], xticklabels=["x", "-x"], yticks=[], ylabel="outputs")  # type: ignore[attr-defined]


def draw_samples(folder: Path) -> None:
    """What both networks of `make pixelcnn` draw, and their curves."""
    for name in ("dense", "sparse"):
        with Image.open(folder / f"{name}.png") as picture:
            picture.convert("L").save(HERE / f"pixelcnn_{name}.png", optimize=True)
    rows = []
    for name in ("given", "dense-completed", "sparse-completed"):
        with Image.open(folder / f"{name}.png") as picture:
            rows.append(np.asarray(picture.convert("L")))
    gap = np.full((4, rows[0].shape[1]), 255, np.uint8)
    Image.fromarray(np.concatenate([rows[0], gap, rows[1], gap, rows[2]])).save(
        HERE / "pixelcnn_halves.png", optimize=True
    )
    with Image.open(folder / "curves.png") as picture:  # seconds are of the machine that it was made on
        left = picture.crop((0, 0, round(0.525 * picture.width), picture.height))
        left.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(HERE / "pixelcnn_curves.png", optimize=True)


if __name__ == "__main__":
    draw_layers()
    if len(sys.argv) > 1:
        draw_samples(Path(sys.argv[1]))
