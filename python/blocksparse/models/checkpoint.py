"""Checkpoints: one safetensors file, complete or not there at all, with a digest of all that it holds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..torch import tensor_file

FORMAT = "blocksparse-lm-2"  # names the only metadata, digest and header: of two, the file's order would be by chance
FORMAT_1 = "blocksparse-lm-1"  # a header alone, as the first version wrote it


def save(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Writes a checkpoint; see `write_whole` for what happens to the last one.

    Raises:
        OSError: the disk is full, say; the old file is then still there.
    """
    tensor_file.write(path, tensors, FORMAT, json.dumps(header), "lm")


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, header) on the CPU. Warns of files of older versions, which have no digest.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is damaged, or no checkpoint of ours.
    """
    with _opened(path) as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    digest, text = _parts(metadata, path)
    if digest is not None:
        tensor_file.check_digest(path, digest, tensors, text, "lm")
    header = _parsed(text, path)
    if digest is None:
        warnings.warn(f"{path} has no digest, so that damage to it cannot be noticed", stacklevel=2)
    return tensors, header


def load_header(path: Path) -> dict[str, Any]:
    """The header alone, which is not compared with the digest. Raises what `load` does."""
    with _opened(path) as file:
        return _parsed(_parts(file.metadata() or {}, path)[1], path)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if path.is_dir():
        last = path / "last.safetensors"
        raise IsADirectoryError(
            f"[lm] {path} is a folder, needs a checkpoint{f', as {last} is' if last.is_file() else ''}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"[lm] there is no checkpoint {path}")
    with tensor_file.opened(path, "lm", "checkpoint") as file:
        yield file


def _parts(metadata: dict[str, str], path: Path) -> tuple[str | None, str]:
    """(digest, header), both as they are written."""
    if metadata.keys() == {FORMAT}:
        return tensor_file.parts(metadata[FORMAT])
    if metadata.keys() == {FORMAT_1}:
        return None, metadata[FORMAT_1]
    raise ValueError(f"[lm] {path} is damaged or no checkpoint of a language model")


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except json.JSONDecodeError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"[lm] {path} is damaged: its header says {text[:40]!r}")
    return header
