"""Images of files as a model takes them: bytes [n, channels, height, width]."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ..files import AnyPath, paths_of
from ..images import Broken, Bytes, Images, ImagesError, read_all, shrink

HELD_OUT = 10  # of so many images one, where there is no test part
SAID = 20  # pictures that are left out: what is wrong with so many


def tensor_of(images: Bytes) -> Tensor:
    """Bytes [n, height, width, channels] as [n, channels, height, width]."""
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def arrays_of(images: Tensor) -> Bytes:
    """Bytes [n, channels, height, width] as [n, height, width, channels], on the CPU."""
    made: Bytes = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return made


def spread(images: Tensor, number: int) -> Tensor:
    """So many of the images, evenly: files of a data set are often in the order of their classes."""
    n = len(images)
    return images[torch.arange(number) * n // number] if number < n else images


def read(
    paths: AnyPath | Iterable[AnyPath], channels: int, by: int = 1, broken: Broken = "stop", *, holds_out: bool = True
) -> Images:
    """Images of files, shrunk, with a test part; what was left out is said on standard error.

    Args:
        paths: see `images.read_images`.
        channels: 3 or 1.
        by: means of so many by so many pixels.
        broken: what happens to pictures that are.
        holds_out: whether every tenth image is for the test where there is no test part.

    Raises:
        OSError, ImagesError: see `images.read_all`.
    """
    found = read_all(paths, channels, broken)
    for line in found.left_out[:SAID]:
        print(f"left out: {line}", file=sys.stderr)
    if len(found.left_out) > SAID:
        print(f"left out: {len(found.left_out) - SAID} more", file=sys.stderr)
    train, test = found.train, found.test
    if holds_out and len(test) == 0 and len(train) >= HELD_OUT:
        train, test = np.delete(train, slice(HELD_OUT - 1, None, HELD_OUT), 0), train[HELD_OUT - 1 :: HELD_OUT]
    return Images(shrink(train, by), shrink(test, by))


def read_part(paths: AnyPath | Iterable[AnyPath], channels: int, by: int, broken: Broken, part: str) -> Bytes:
    """The part "train" or "test" of `read`, or "all".

    Raises:
        OSError, ImagesError: see `read`; or there are none.
    """
    files = paths_of(paths)
    found = read(files, channels, by, broken)
    chosen = np.concatenate((found.train, found.test)) if part == "all" else getattr(found, part)
    if len(chosen) == 0:
        raise ImagesError(f"[images] {', '.join(map(str, files))}: no images are of the part {part!r}")
    return chosen
