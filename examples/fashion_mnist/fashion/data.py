"""Fashion-MNIST as Debian packs it, and CIFAR-10 as its authors or as folders of pictures."""

from __future__ import annotations

import gzip
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FASHION = Path("/usr/share/datasets/fashion-mnist")
_Bytes = npt.NDArray[np.uint8]


class DataError(Exception):
    """There is no data set here, or it is damaged."""


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
    """The format of MNIST: two zeros, type 8 (bytes), the number of sizes, the sizes, the bytes."""

    def read(name: str, sizes: int) -> _Bytes:
        path = folder / f"{part}-{name}-idx{sizes}-ubyte.gz"
        try:
            data = gzip.decompress(path.read_bytes())
        except FileNotFoundError:
            raise DataError(f"{path} is missing: make fashion installs Debian's dataset-fashion-mnist") from None
        except (OSError, EOFError) as error:
            raise DataError(f"{path}: {error}") from error
        shape = np.frombuffer(data, ">i4", sizes, 4) if len(data) >= 4 + 4 * sizes else np.zeros(0, np.int32)
        if data[:4] != bytes((0, 0, 8, sizes)) or len(data) != 4 + 4 * sizes + shape.prod():
            raise DataError(f"{path} is no file of {sizes} sizes in the format of MNIST")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * sizes).reshape(shape)

    return read("images", 3)[:, None], read("labels", 1)


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


class _ArraysOnly(pickle.Unpickler):
    """CIFAR-10's batches are pickles: of them, only what arrays are made of is let in."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in (("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise DataError(f"the batch holds a {module}.{name}, which no batch of CIFAR-10 does")


def _batch(path: Path) -> tuple[_Bytes, _Bytes]:
    data = path.read_bytes()
    if path.suffix == ".bin":
        if len(data) % 3073:
            raise DataError(f"{path} has {len(data)} bytes, needs a multiple of 3073")
        rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
        return np.asarray(batch[b"data"]).reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"], np.uint8)
    except (pickle.UnpicklingError, KeyError, ValueError, EOFError, TypeError) as error:
        raise DataError(f"{path} is no batch of CIFAR-10: {error}") from error


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
