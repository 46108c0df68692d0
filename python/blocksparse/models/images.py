"""Images of other people's files, as bytes: CIFAR-10's batches, MNIST's format, folders, tar files, sheets of rows.

- folder with data_batch_*: CIFAR-10 by its authors, pickled (Python) or .bin. test_batch* are for the test and may be
  alone.
- folder with ``*-idx3-ubyte[.gz]``: MNIST's format, as Debian packs Fashion-MNIST. t10k-* are for the test.
- folder or .tar[.gz|.xz|.bz2]: pictures of any kind that Pillow reads, of 8 bits. Those below test/ are for the test.
  Links to files and folders are followed.
- .png file: a sheet. Each row of pixels is an image, its rows one after the other.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import pickle
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .files import AnyPath, paths_of, write_whole

FASHION = Path("/usr/share/datasets/fashion-mnist")
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff"}
CIFAR = ("data_batch_[0-9]*", "test_batch*")
Bytes = npt.NDArray[np.uint8]
Broken = Literal["stop", "skip"]


class ImagesError(ValueError):
    """There are no such images, or they are damaged or of another kind."""


@dataclass
class Images:
    """Bytes [n, height, width, channels] to be trained on and to be tested with, the latter perhaps none.

    Attributes:
        train: to be trained on.
        test: to be tested with.
        left_out: what was wrong with those that were skipped.
    """

    train: Bytes
    test: Bytes
    left_out: list[str] = field(default_factory=list)


def read_images(path: AnyPath, channels: int, broken: Broken = "stop") -> Images:
    """All images of a file or folder, in the order of their names.

    Args:
        path: see above.
        channels: 3 or 1: others are made so. Grey of red, green and blue is Pillow's.
        broken: whether a picture that cannot be read, or has another size than most, ends it or is left out.

    Raises:
        OSError: there is no such file.
        ImagesError: what is there are no images, or one of them is broken.
        ModuleNotFoundError: pictures need Pillow.
    """
    path = Path(path)
    left_out: list[str] = []
    if path.is_dir() and any(file.is_file() for name in CIFAR for file in path.glob(name)):
        train, test = _cifar(path)
    elif path.is_dir() and any(path.glob("*-images-idx3-ubyte*")):
        train, test = (_idx(path, part) for part in ("train", "t10k"))
    elif path.is_dir() or (path.is_file() and is_archive(path)):
        train, test = _pictures(path, channels, broken, left_out)
    elif not path.exists():
        raise FileNotFoundError(f"[images] there is no {path}")
    elif path.suffix.lower() == ".png":
        train = _sheet(path)
        test = train[:0]
    else:
        raise ImagesError(f"[images] {path} is no folder, tar file or PNG sheet of images")
    return Images(of_channels(train, channels), of_channels(test, channels), left_out)


def read_all(paths: AnyPath | Iterable[AnyPath], channels: int, broken: Broken = "stop") -> Images:
    """`read_images` of several, one after the other. Raises ImagesError where their sizes differ."""
    files = paths_of(paths)
    parts = [read_images(path, channels, broken) for path in files]
    sizes = {part.train.shape[1:] for part in parts} | {part.test.shape[1:] for part in parts if len(part.test)}
    if len(sizes) != 1:
        found = ", ".join(f"{h} x {w}" for h, w, _ in sorted(sizes))
        raise ImagesError(f"[images] {', '.join(map(str, files))} hold images of {found} pixels, need one size")
    train, test = (np.concatenate(p) for p in ([x.train for x in parts], [x.test for x in parts]))
    return Images(train, test, [line for part in parts for line in part.left_out])


def of_channels(images: Bytes, channels: int) -> Bytes:
    """With 1 or 3 channels."""
    if images.shape[-1] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, -1)
    weights = np.array([19595, 38470, 7471], np.uint32)  # of 65536: Pillow's, from ITU-R 601
    return ((images.astype(np.uint32) @ weights + 32768) >> 16).astype(np.uint8)[..., None]


def shrink(images: Bytes, by: int) -> Bytes:
    """Means over squares of by x by pixels, rounded."""
    n, height, width, channels = images.shape
    if by < 1 or height % by or width % by:
        raise ImagesError(f"[images] {height} x {width} pixels cannot be shrunk by {by}: needs a divisor of both")
    sums = images.reshape(n, height // by, by, width // by, by, channels).sum((2, 4), dtype=np.uint32)
    return ((sums + by * by // 2) // (by * by)).astype(np.uint8)


# ---- CIFAR-10 and MNIST ----------------------------------------------------------------------------------------------


class _ArraysOnly(pickle.Unpickler):
    """CIFAR-10's batches are pickles: of them, only what arrays are made of is let in."""

    def find_class(self, module: str, name: str) -> Any:
        arrays = (module.split(".")[0], name) in (("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"))
        if arrays or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise ImagesError(f"holds a {module}.{name}, which no batch of CIFAR-10 does")


def read_batch(path: AnyPath) -> tuple[Bytes, Bytes]:
    """Images [n, 32, 32, 3] and classes [n] of one of CIFAR-10's batches, pickled or .bin."""
    path = Path(path)
    data = path.read_bytes()
    if path.suffix == ".bin":
        if not data or len(data) % 3073:
            raise ImagesError(f"[images] {path} has {len(data)} bytes, needs a multiple of 3073")
        rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
        pixels, classes = rows[:, 1:], rows[:, 0]
    else:
        try:
            batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
            pixels, classes = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"], np.uint8)
        except ImagesError as error:
            raise ImagesError(f"[images] {path} {error}") from error
        except Exception as error:  # pickles that are cut off fail in many ways
            raise ImagesError(f"[images] {path} is no batch of CIFAR-10: {error!r}") from error
        if pixels.dtype != np.uint8 or pixels.shape != (len(classes), 3072):
            found = f"{pixels.dtype} {list(pixels.shape)} and {len(classes)} classes"
            raise ImagesError(f"[images] {path} has data of {found}, needs uint8 [n, 3072] and n")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), classes


def _cifar(folder: Path) -> tuple[Bytes, Bytes]:
    """data_batch_* and test_batch*."""
    parts = [sorted(folder.glob(name)) for name in CIFAR]
    train, test = (
        np.concatenate([read_batch(path)[0] for path in paths]) if paths else np.zeros((0, 32, 32, 3), np.uint8)
        for paths in parts
    )
    return train, test


def read_idx(path: AnyPath, sizes: int) -> Bytes:
    """MNIST's format, gzipped or not: two zeros, type 8 (bytes), the number of sizes, the sizes, the bytes."""
    path = Path(path)
    packed = path if path.exists() else path.with_name(path.name + ".gz")
    try:
        data = packed.read_bytes()
        data = gzip.decompress(data) if packed.suffix == ".gz" else data
    except FileNotFoundError:
        raise FileNotFoundError(f"[images] {packed} is missing: Debian's dataset-fashion-mnist has it") from None
    except (OSError, EOFError) as error:
        raise ImagesError(f"[images] {packed}: {error}") from error
    shape = np.frombuffer(data, ">u4", sizes, 4).tolist() if len(data) >= 4 + 4 * sizes else []
    if data[:4] != bytes((0, 0, 8, sizes)) or len(data) != 4 + 4 * sizes + math.prod(shape):
        raise ImagesError(f"[images] {packed} is no file of {sizes} sizes in the format of MNIST")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * sizes).reshape(shape)


def _idx(folder: Path, part: str) -> Bytes:
    path = folder / f"{part}-images-idx3-ubyte"
    images = read_idx(path, 3)
    if 0 in images.shape[1:]:
        raise ImagesError(f"[images] {path} has images of {images.shape[1]} x {images.shape[2]} pixels, needs some")
    return images[..., None]


# ---- Pictures --------------------------------------------------------------------------------------------------------


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need Pillow: pip install 'blocksparse[pixelcnn]'") from None
    return Image


def is_archive(path: AnyPath) -> bool:
    """Whether it has the name of a tar file, packed or not. What is in it is another matter."""
    path = Path(path)
    return ".tar" in path.suffixes[-2:] or path.suffix in (".tgz", ".txz", ".tbz2")


def _files(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, what Pillow opens) of all pictures. A link that leads nowhere is a broken one."""
    if path.is_dir():
        for file in _below(path):
            if file.suffix.lower() in SUFFIXES and (file.is_file() or not file.exists()):
                yield file.relative_to(path).as_posix(), file
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                is_file = member.isfile() or member.islnk() or member.issym()
                if is_file and PurePosixPath(member.name).suffix.lower() in SUFFIXES:
                    yield member.name, _held(archive, member)
            _need_end(path, archive)
    except ImagesError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        first, *_ = str(error).splitlines() or [repr(error)]
        raise ImagesError(f"[images] {path} is damaged: {first.rstrip(':')}") from error


def _below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Whatever is in a folder and no folder; links to folders are followed, but not to one that they are in."""
    real = folder.resolve()
    if real in above:
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _below(path, (*above, real))
        else:
            yield path


def _held(archive: tarfile.TarFile, member: tarfile.TarInfo) -> io.BytesIO:
    """A file of an archive, or what a link leads to: nothing if it leads out of it, or to itself."""
    held = None
    with suppress(KeyError, RecursionError):
        held = archive.extractfile(member)
    return io.BytesIO(held.read() if held else b"")


def _need_end(path: Path, archive: tarfile.TarFile) -> None:
    """Raises unless the archive has the block of zeros that ends it, and its file all that was packed."""
    file: Any = archive.fileobj
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ImagesError(f"[images] {path} is cut off")
    while file.read(1 << 20):
        pass  # what is behind the end is part of the checksum


def _pictures(path: Path, channels: int, broken: Broken, left_out: list[str]) -> tuple[Bytes, Bytes]:
    """Those below a folder test/, or of such a name in a tar file, are for the test."""
    pillow = _pillow()
    found: dict[str, Bytes] = {}
    for name, file in _files(path):
        try:
            found[name] = decoded(pillow, file, channels)
        except ImagesError as error:
            complaint = f"{path}: {name} {error}"
            if broken == "stop":
                raise ImagesError(f"[images] {complaint}") from error
            left_out.append(complaint)
    names = sorted(found)
    if not names:
        raise ImagesError(f"[images] {path} holds no pictures that can be read")
    ((size, _),) = Counter(found[name].shape for name in names).most_common(1)
    like = next(name for name in names if found[name].shape == size)
    for name in names:
        if found[name].shape != size:
            (h, w, _), (needed_h, needed_w, _) = found[name].shape, size
            complaint = f"{path}: {name} has {h} x {w} pixels, needs {needed_h} x {needed_w} as {like} has"
            if broken == "stop":
                raise ImagesError(f"[images] {complaint}")
            left_out.append(complaint)
    kept = [name for name in names if found[name].shape == size]
    parts = [[n for n in kept if ("test" in PurePosixPath(n).parts[:-1]) is tests] for tests in (False, True)]
    train, test = (np.stack([found[n] for n in part]) if part else np.zeros((0, *size), np.uint8) for part in parts)
    return train, test


def decoded(pillow: Any, file: Any, channels: int) -> Bytes:
    """A picture as bytes [height, width, channels]. Raises ImagesError that ends a sentence about it."""
    try:
        with pillow.open(file) as picture:
            deep = ";16" in str(picture.tile)  # of which Pillow makes 8 bits where there are colours
            picture.load()
            mode = picture.mode
            if deep or mode.startswith(("I", "F")):
                raise ImagesError(f"has pixels of {'floats' if mode == 'F' else '16 or 32 bits'}, needs 8 bits")
            if "A" in mode or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                if picture.getextrema()[3][0] < 255:
                    raise ImagesError("has transparent pixels, needs opaque ones")
            made = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    except ImagesError:
        raise
    except Exception as error:  # of a broken picture Pillow raises whatever its decoders do
        raise ImagesError(f"is broken: {error}") from error
    return made.reshape(*made.shape[:2], channels)


def _sheet(path: Path) -> Bytes:
    """Images of a sheet, whose sides are equal."""
    try:
        rows = decoded(_pillow(), path, 3)
    except ImagesError as error:
        raise ImagesError(f"[images] {path} {error}") from error
    side = round(rows.shape[1] ** 0.5)
    if side * side != rows.shape[1] or side < 2:
        raise ImagesError(
            f"[images] {path} is {rows.shape[1]} pixels wide, a sheet needs a square number: 32 x 32 = 1024"
        )
    return rows.reshape(-1, side, side, 3)


def write_png(path: AnyPath, images: Bytes, columns: int = 0, gap: int = 1) -> None:
    """Writes a grid of images as a PNG file; see `files.write_whole` for what happens to the last one.

    Args:
        path: of the file.
        images: [n, height, width, 1 or 3], side by side, row after row.
        columns: how many; 0: as many as rows, nearly.
        gap: white pixels between two.

    Raises:
        OSError: it cannot be written.
        ModuleNotFoundError: pictures need Pillow.
    """
    made = io.BytesIO()
    _pillow().fromarray(grid(images, columns, gap)).save(made, "PNG")
    write_whole(path, made.getvalue(), "images")


def grid(images: Bytes, columns: int = 0, gap: int = 1) -> Bytes:
    """Images [n, height, width, channels] as one picture [height, width, 3]."""
    n, height, width, _ = images.shape
    columns = columns or max(1, int(np.ceil(np.sqrt(n))))
    rows = -(-n // columns)
    made = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, image in enumerate(of_channels(images, 3)):
        y, x = i // columns * (height + gap), i % columns * (width + gap)
        made[y : y + height, x : x + width] = image
    return made
