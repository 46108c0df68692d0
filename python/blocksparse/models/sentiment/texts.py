"""Texts for language models and classifiers: prepared in one way, from label files and from the IMDB archive."""

from __future__ import annotations

import csv
import html
import io
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..files import AnyPath

ESCAPE = "surrogateescape"  # bytes that are no UTF-8 come out as they went in


def prepare(text: str) -> bytes:
    """A text as models read it: one line, a new line and a space in front, a space behind.

    Source: openai/generating-reviews-discovering-sentiment, `utils.py`.
    """
    line = html.unescape(text.replace("<br />", " ")).replace("\n", " ").strip()
    return f"\n {line} ".encode("utf-8", ESCAPE)


_JOINED = (
    (re.compile(r" (n't|'(?:s|re|ve|ll|d|m))\b"), r"\1"),  # do n't -> don't
    (re.compile(r" (n|') '?(t|s|re|ve|ll|d|m)\b"), r"\1'\2"),  # does n 't -> doesn't
    (re.compile(r"-lrb- ?"), "("),
    (re.compile(r" ?-rrb-"), ")"),
    (re.compile(r"`` ?| ''"), '"'),
    (re.compile(r" ([.,;:!?)\]%])"), r"\1"),
    (re.compile(r"([(\[$#]) "), r"\1"),
)


def detokenise(text: str) -> str:
    """Tokens, as the label files of old have them, as one would write them."""
    for pattern, joined in _JOINED:
        text = pattern.sub(joined, text)
    return text


@dataclass
class Examples:
    """Prepared texts with labels of 0 and 1, and what was wrong with rows that were left out."""

    texts: list[bytes] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def y(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The labels as an array."""
        return np.array(self.labels, np.int64)

    def __len__(self) -> int:
        return len(self.texts)


def read_labelled(path: AnyPath, *, skip_bad_rows: bool = False, tokenised: bool = False) -> Examples:
    """A file of rows "label text", or a CSV file with the columns label and sentence. Labels are 0 and 1.

    Args:
        path: ends with .csv, or is read as lines.
        skip_bad_rows: leave them out and note each in `left_out`; else the first one ends it.
        tokenised: texts are tokens with spaces between, to be put together.

    Raises:
        OSError: the file cannot be read.
        ValueError: a row is bad, with its line; or no rows are left.
    """
    path = Path(path)
    content = path.read_bytes().decode("utf-8", ESCAPE).removeprefix("\ufeff")  # spreadsheets write one in front
    rows = _csv_rows(path, content) if path.suffix == ".csv" else _line_rows(content)
    examples = Examples()
    for line, label, text in rows:
        text = text.strip()
        if label in ("0", "1") and text:
            examples.texts.append(prepare(detokenise(text) if tokenised else text))
            examples.labels.append(int(label))
            continue
        wrong = f"the label is {label[:20]!r}, needs 0 or 1" if label not in ("0", "1") else "there is no text"
        examples.left_out.append(f"[lm] {path}, line {line}: {wrong}")
        if not skip_bad_rows:
            raise ValueError(examples.left_out[0])
    if not examples.texts:
        raise ValueError(f"[lm] {path}: no labelled texts in there")
    return examples


def _line_rows(content: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            label, _, text = line.strip("\r").partition(" ")
            yield number, label, text


def _csv_rows(path: Path, content: str) -> Iterator[tuple[int, str, str]]:
    rows = csv.reader(io.StringIO(content, newline=""))
    names = next(rows, [])
    if not {"label", "sentence"} <= set(names):
        raise ValueError(f"[lm] {path}, line 1: the columns are {', '.join(names)}, needs label and sentence")
    at = [names.index(name) for name in ("label", "sentence")]
    try:
        for row in rows:
            if row:
                label, text = (row[i] if i < len(row) else "" for i in at)
                yield rows.line_num, label.strip(), text
    except csv.Error as error:
        raise ValueError(f"[lm] {path}, line {rows.line_num}: {error}") from error


# ---- The IMDB reviews ------------------------------------------------------------------------------------------------

# Overwritten by reviews of mobile apps in the copy of the archive that is easiest to find.
ALTERED = frozenset(
    f"{folder}/{name}"
    for folder, names in {
        "train/pos": ("0_9", "7_7"),
        "train/neg": ("2_1", "9_1"),
        "test/pos": ("0_10", "2_7", "7_9", "9_7"),
    }.items()
    for name in names
)


def read_imdb(archive: AnyPath, folders: Iterable[str]) -> dict[str, list[bytes]]:
    """Prepared reviews of some folders, such as "train/pos" or "train/unsup", in the order of their numbers.

    Args:
        archive: aclImdb as .tar.xz or .tar.gz.
        folders: below aclImdb.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or has nothing in a folder.
    """
    found: dict[str, list[tuple[int, bytes]]] = {folder: [] for folder in folders}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, name = member.name.partition("aclImdb/")
                folder, _, file = name.rpartition("/")
                stream = tar.extractfile(member) if folder in found and file.endswith(".txt") else None
                if stream is not None and name.removesuffix(".txt") not in ALTERED:
                    found[folder].append((int(file.split("_")[0]), prepare(stream.read().decode("utf-8", ESCAPE))))
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:  # the last three of one that was cut
        why = " ".join(str(error).split())  # tarfile has a line for each kind of archive
        raise ValueError(f"[lm] {archive} is damaged: {why}") from error
    for folder, reviews in found.items():
        if not reviews:
            raise ValueError(f"[lm] {archive} has no reviews in aclImdb/{folder}")
    return {folder: [text for _, text in sorted(reviews)] for folder, reviews in found.items()}
