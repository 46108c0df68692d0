"""The text: where it comes from, and how it is cut into batches."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Tests repeat themselves, and site-packages are different on every machine.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class TextError(ValueError):
    """The text cannot be used; the message says why, and what would help."""


def standard_library() -> list[Path]:
    """The sources of Python's standard library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if LEFT_OUT.isdisjoint(file.relative_to(root).parts)]
    if not files:
        raise TextError(f"there are no Python sources in {root}: choose another text with --text FILE")
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def read_files(files: Sequence[Path]) -> bytes:
    """The bytes of the files, one after the other.

    Raises:
        TextError: a file is missing, unreadable or empty.
    """
    parts = []
    for file in files:
        try:
            parts.append(file.read_bytes())
        except FileNotFoundError:
            raise TextError(f"{file}: there is no such file") from None
        except OSError as error:
            raise TextError(f"{file}: cannot be read ({error.strerror})") from None
        if not parts[-1] and len(files) == 1:
            raise TextError(f"{file}: the file is empty")
    text = b"".join(parts)
    if not text:
        raise TextError("all files are empty")
    return text


@dataclass(frozen=True)
class Split:
    """Where a text of `length` bytes is cut: the last `test` bytes are never trained on."""

    length: int
    test: int

    @staticmethod
    def of(length: int, rows: int, time: int, test: int) -> Split:
        """`test` bytes for the test, less in a short text; each part has at least one batch of rows x time bytes.

        Raises:
            TextError: the text is too short for that.
        """
        batch = rows * (time + 1)
        if length < 2 * batch:
            raise TextError(
                f"the text has {length} bytes, needs at least {2 * batch}: one batch of {rows} rows of {time} bytes "
                "to train on, and one to test on"
            )
        return Split(length, max(batch, min(test, length // 10)))


def save(text: bytes, file: Path) -> None:
    """Writes the text where `load` finds it: all of it, or nothing."""
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(text)
    os.replace(temporary, file)


def load(file: Path, split: Split) -> tuple[Tensor, Tensor]:
    """(text to train on, text to test on), both uint8 and mapped from the file rather than read."""
    text = torch.from_numpy(np.memmap(file, np.uint8, "c"))  # copy on write: PyTorch warns of read-only arrays
    cut = split.length - split.test
    return text[:cut], text[cut:]


def digest(text: bytes) -> str:
    """What tells one text from another."""
    return hashlib.sha256(text).hexdigest()[:16]


class Batches:
    """A text cut into `rows` equal runs that are read side by side, `time` bytes at once."""

    def __init__(self, text: Tensor, rows: int, time: int) -> None:
        self.time = time
        length = len(text) // rows
        self.columns = text[: rows * length].view(rows, length)
        self.count = (length - 1) // time

    def __getitem__(self, index: int) -> Tensor:
        """Batch `index` [time + 1, rows]: the next byte is there as well. After the last one, the first again."""
        first = index % self.count * self.time
        return self.columns[:, first : first + self.time + 1].t().long()

    def starts_over(self, index: int) -> bool:
        """Whether batch `index` is the first of the text, so that no state is carried into it."""
        return index % self.count == 0
