"""Fashion-MNIST as Debian packs it, and CIFAR-10 as its authors or as folders of pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blocksparse.models.images import FASHION, read_batch, read_idx
from blocksparse.models.images import ImagesError as DataError

_Bytes = npt.NDArray[np.uint8]


@dataclass
class Images:
    """Pixels [n, channels, height, width] of mean 0 and variance 1, channels-last, and classes [n]."""

    pixels: Tensor
    classes: Tensor

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.classes.to(device))


def load(folder: Path | None) -> tuple[str, Images, Images]:
    """(name, training images, test images) of Fashion-MNIST, or of the CIFAR-10 in a folder."""
    if folder is None:
        name = "Fashion-MNIST"
        train, test = (_idx(FASHION, part) for part in ("train", "t10k"))
    else:
        name = "CIFAR-10"
        train, test = _cifar(folder)
    images = [Images(_floats(pixels), torch.from_numpy(classes.astype(np.int64))) for pixels, classes in (train, test)]
    deviation, mean = torch.std_mean(images[0].pixels, (0, 2, 3), keepdim=True)
    for part in images:
        part.pixels.sub_(mean).div_(deviation)
    return name, images[0], images[1]


def _floats(pixels: _Bytes) -> Tensor:
    return torch.from_numpy(pixels.copy()).to(torch.float32, memory_format=torch.channels_last)


def _idx(folder: Path, part: str) -> tuple[_Bytes, _Bytes]:
    try:
        images, classes = (
            read_idx(folder / f"{part}-{name}-idx{n}-ubyte", n) for name, n in (("images", 3), ("labels", 1))
        )
    except FileNotFoundError as error:
        raise DataError(f"{error}: make fashion installs it") from None
    return images[:, None], classes


def _cifar(folder: Path) -> tuple[tuple[_Bytes, _Bytes], tuple[_Bytes, _Bytes]]:
    """data_batch_* and test_batch (pickled or .bin), or train/<class>/* and test/<class>/* of pictures."""
    batches = sorted(folder.glob("data_batch_[0-9]*"))
    if batches:
        tests = sorted(folder.glob("test_batch*"))
        if not tests:
            raise DataError(f"{folder} has no test_batch")
        return _join([_batch(path) for path in batches]), _join([_batch(path) for path in tests])
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        parts = (folder / "train", folder / "test")
        names = sorted({path.name for part in parts for path in part.iterdir() if path.is_dir()})
        return _pictures(folder / "train", names), _pictures(folder / "test", names)
    raise DataError(f"{folder} holds neither data_batch_* and test_batch nor train/ and test/")


def _join(parts: list[tuple[_Bytes, _Bytes]]) -> tuple[_Bytes, _Bytes]:
    images, classes = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(classes)


def _batch(path: Path) -> tuple[_Bytes, _Bytes]:
    images, classes = read_batch(path)
    return images.transpose(0, 3, 1, 2), classes


def _pictures(folder: Path, names: list[str]) -> tuple[_Bytes, _Bytes]:
    from PIL import Image

    images, classes = [], []
    for number, name in enumerate(names):
        for path in sorted((folder / name).glob("*.[jp][pn]*g")):
            try:
                with Image.open(path) as picture:
                    images.append(np.asarray(picture.convert("RGB")).transpose(2, 0, 1))
            except OSError as error:
                raise DataError(f"{path}: {error}") from error
            classes.append(number)
    if not images or len({image.shape for image in images}) != 1:
        raise DataError(f"{folder} holds {len(images)} pictures, needs some, all of one size")
    return np.stack(images), np.asarray(classes, np.uint8)
