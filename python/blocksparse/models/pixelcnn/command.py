"""The command line: python -m blocksparse pixelcnn train|eval|sample."""

from __future__ import annotations

import argparse
import json
import sys

import torch
from torch import Tensor

from ..bars import counting_bar
from ..distributed import joined
from ..files import check_writable
from ..images import write_png
from . import data, train_command
from .config import check_numbers
from .network import PixelCNN
from .sampling import sample
from .training import bits_per_dim, load_model


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked for; the exit status. Raises ValueError or OSError with what is wrong."""
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.pixelcnn_command == "train":
        with joined(arguments.device) as (world, device):
            return train_command.run(arguments, world, device)
    if arguments.pixelcnn_command == "eval":
        _evaluate(arguments)
    else:
        _sample(arguments)
    return 0


def _images(arguments: argparse.Namespace, model: PixelCNN, size: tuple[int, int]) -> Tensor:
    """Those of --data. Images of another size than the model was trained on are possible, but are often a mistake."""
    how = (arguments.shrink, arguments.broken, arguments.part)
    images = data.tensor_of(data.read_part(arguments.data, model.config.channels, *how))
    height, width = images.shape[2:]
    if (height, width) != size:
        trained = f"{size[0]} x {size[1]}"
        print(f"note: images have {height} x {width} pixels; the model was trained on {trained}", file=sys.stderr)
    return images


def _evaluate(arguments: argparse.Namespace) -> None:
    model, size = load_model(arguments.checkpoint, arguments.device, averaged=not arguments.raw)
    images = _images(arguments, model, size)
    with counting_bar(len(images), 0, " images", "images") as done:
        bits = bits_per_dim(model, images, arguments.batch, bf16=arguments.bf16, progress=done)
    print(json.dumps({"images": len(images), "bits_per_dim": round(bits, 4)}))


def _sample(arguments: argparse.Namespace) -> None:
    out = arguments.out
    if out.suffix.lower() != ".png":
        raise ValueError(f"[pixelcnn] {out} needs to end with .png")
    if out.is_file() and not arguments.force:
        raise ValueError(f"[pixelcnn] {out} is there already: --force overwrites it, --out names another")
    check_numbers(images=arguments.images)
    if arguments.complete != bool(arguments.data):
        raise ValueError("[pixelcnn] --complete and --data need each other: lower halves of which images are drawn")
    check_writable(out, "pixelcnn")
    model, size = load_model(arguments.checkpoint, arguments.device)
    given, rows = None, 0
    if arguments.complete:
        given = data.spread(_images(arguments, model, size), arguments.images)
        size, rows = (given.size(2), given.size(3)), given.size(2) // 2
    number = arguments.images if given is None else len(given)
    with counting_bar(size[0] * size[1], 0, " pixels", "pixels") as done:
        how = {"seed": arguments.seed, "bf16": arguments.bf16, "plain": arguments.plain, "progress": done}
        made = sample(model, number, size, given=given, rows=rows, **how)
    write_png(out, data.arrays_of(made))
    print(json.dumps({"file": str(out), "images": number}))
