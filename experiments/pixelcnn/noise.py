"""Where the noise of pure colours in drawn images comes from.

    python experiments/pixelcnn/noise.py pictures experiments/pixelcnn/results/cifar-*.png
    python experiments/pixelcnn/noise.py model out/last.safetensors --data cifar10-jpg.tar.xz --shrink 2

A pure pixel has all its colours at 0 or 255, and is neither black nor white; an image with 6 of them is noisy.

pictures: of `run.py`, whose random numbers are known. Inside of noise, how often a colour is 0 or 255, and how often it
is the one that its random number says: 255 above 1/2. Both are near 1 if distributions are wider than the colours are.
model: the same images in float32 and in bfloat16, each compared with what one whole pass over it draws from its random
numbers; lower halves of test images below their upper ones, which are left as they are or have a patch of noise; the
log scales of the pixels below that patch. A line of JSON each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from blocksparse.models.pixelcnn import data, likelihood
from blocksparse.models.pixelcnn.network import PixelCNN
from blocksparse.models.pixelcnn.sampling import sample
from blocksparse.models.pixelcnn.training import load_model
from blocksparse.program import finish, positive

NOISY = 6
SIDE, COLUMNS, MIXTURE = 32, 8, 10  # of the pictures of `run.py` and their networks


def at_ends(images: Tensor) -> Tensor:
    """Which bytes are 0 or 255."""
    return (images == 0) | (images == 255)


def pure(images: Tensor) -> Tensor:
    """Which pixels of [n, 3, h, w] are pure, [n, h, w]."""
    return at_ends(images).all(1) & (images.amin(1) != images.amax(1))


def noisy(images: Tensor) -> list[int]:
    """Images that are."""
    found: list[int] = (pure(images).sum((1, 2)) >= NOISY).nonzero().flatten().tolist()
    return found


def inside(images: Tensor) -> Tensor:
    """Pixels that follow upon noise: of the twelve in two rows above and to the left nine are at ends, one is pure."""
    window = torch.tensor([[[[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]]]).float()
    seen = torch.stack((at_ends(images).all(1), pure(images)), 1).flatten(0, 1).unsqueeze(1).float()
    near = functional.conv2d(functional.pad(seen, (2, 2, 2, 0)), window)
    ends, mixed = near[::2, 0], near[1::2, 0]
    follow: Tensor = (ends >= 9) & (mixed >= 1)
    return follow


def pictures(paths: list[Path]) -> None:
    """A line of JSON for each."""
    for path in paths:
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB")))
        needed = COLUMNS * (SIDE + 1) - 1
        if pixels.shape[:2] != (needed, needed):
            raise ValueError(f"[pixelcnn] {path} is not of run.py with 64 images: it needs {needed} x {needed} pixels")
        places = [(SIDE + 1) * k for k in range(COLUMNS)]
        images = torch.stack([pixels[i : i + SIDE, j : j + SIDE].permute(2, 0, 1) for i in places for j in places])
        generator = torch.Generator().manual_seed(0)
        numbers = likelihood.random_numbers(len(images), 3, MIXTURE, (SIDE, SIDE), generator)[:, MIXTURE:]
        within, ends = inside(images).unsqueeze(1).expand_as(images), at_ends(images)
        as_said = ((images == 255) == (numbers > 0.5))[within & ends]
        cut = ((numbers <= likelihood.CLIP) | (numbers >= 1 - likelihood.CLIP)).flatten(1).any(1).nonzero().flatten()
        line: dict[str, Any] = {"picture": path.name, "noisy": noisy(images), "colours_inside": int(within.sum())}
        if line["colours_inside"]:
            line |= {"at_ends": share(ends[within]), "as_their_numbers_say": share(as_said)}
        print(json.dumps(line | {"images_with_a_number_cut_off": cut.tolist()}))


def share(of: Tensor) -> float:
    """Of true ones."""
    return round(float(of.float().mean()), 4)


@torch.no_grad()
def outputs_of(model: PixelCNN, images: Tensor, bf16: bool) -> Tensor:
    """By whole passes; on the CPU."""
    made = []
    for part in torch.split(images.to(next(model.parameters()).device), 64):
        with torch.autocast(part.device.type, torch.bfloat16, bf16):
            made.append(model(likelihood.to_range(part)).float().cpu())
    return torch.cat(made)


def log_scale(outputs: Tensor) -> Tensor:
    """The mixture's mean, [n, h, w]."""
    mixture = likelihood.mixture_of(outputs, 3)
    return (mixture.weights.softmax(1).unsqueeze(1) * mixture.log_scales).sum(2).mean(1)


def of_model(model: PixelCNN, test: Tensor) -> None:
    """Lines of JSON."""
    n, size = len(test), (test.size(2), test.size(3))
    numbers = likelihood.random_numbers(n, 3, model.config.mixture, size, torch.Generator().manual_seed(0))
    for name, bf16 in (("float32", False), ("bfloat16", True)):
        drawn = sample(model, n, size, bf16=bf16).cpu()
        again = likelihood.to_bytes(likelihood.draw(outputs_of(model, drawn, bf16), numbers, 3))
        away = (again.int() - drawn.int()).abs()
        line: dict[str, Any] = {"drawn": name, "noisy": noisy(drawn), "of": n}
        print(json.dumps(line | {"bytes_redrawn_as_others": share(away > 0), "by_more_than_8": share(away > 8)}))
    i, j = size[0] // 4, size[1] // 4
    patched = test.clone()
    patch = patched[:, :, i : 2 * i, j : 3 * j]
    patch.copy_(255 * torch.randint(0, 2, patch.shape, generator=torch.Generator().manual_seed(0)))
    for name, images in (("test images", test), ("with a patch of noise", patched)):
        width = float(log_scale(outputs_of(model, images, False))[:, 2 * i, j + 1 : 3 * j - 1].mean())
        below = sample(model, n, size, given=images, rows=2 * i).cpu()[:, :, 2 * i :]
        line = {"given": name, "pure_pixels": share(pure(images)), "noisy_below": len(noisy(below)), "of": n}
        print(json.dumps(line | {"log_scale_below": round(width, 2)}))


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("pictures").add_argument("pictures", type=Path, nargs="+")
    model = commands.add_parser("model")
    model.add_argument("checkpoint", type=Path)
    model.add_argument("--data", type=Path, nargs="+", required=True)
    model.add_argument("--shrink", type=positive, default=1)
    model.add_argument("--images", type=positive, default=256)
    model.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.command == "pictures":
        pictures(options.pictures)
    else:
        trained, _ = load_model(options.checkpoint, options.device)
        test = data.tensor_of(data.read_part(options.data, 3, options.shrink, "skip", "test"))
        of_model(trained, data.spread(test, options.images))


if __name__ == "__main__":
    finish(main)
