"""Checkpoints: one safetensors file, complete or not there at all, with a digest of all that it holds."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import write_whole

FORMAT = "blocksparse-lm-2"  # names the only metadata, digest and header: of two, the file's order would be by chance
FORMAT_1 = "blocksparse-lm-1"  # a header alone, as the first version wrote it


def save(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Writes a checkpoint; see `write_whole` for what happens to the last one.

    Raises:
        OSError: the disk is full, say; the old file is then still there.
    """
    from safetensors.torch import save as to_bytes

    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(header)
    write_whole(path, to_bytes(held, {FORMAT: f"{_digest_of(held, text)} {text}"}))


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
    if digest is not None and digest != _digest_of(tensors, text):
        raise ValueError(f"[lm] {path} is damaged: what it holds does not match its digest. Take another copy of it")
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
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        last = path / "last.safetensors"
        raise IsADirectoryError(
            f"[lm] {path} is a folder, needs a checkpoint{f', as {last} is' if last.is_file() else ''}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"[lm] there is no checkpoint {path}")
    try:
        with safe_open(str(path), "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"[lm] {path} is damaged or no checkpoint: {error}") from error


def _parts(metadata: dict[str, str], path: Path) -> tuple[str | None, str]:
    """(digest, header), both as they are written."""
    if metadata.keys() == {FORMAT}:
        digest, _, text = metadata[FORMAT].partition(" ")
        return digest, text
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


def _digest_of(tensors: dict[str, Tensor], header: str) -> str:
    """Of the header as it is written, and of each tensor's name, dtype, shape and bytes, in the order of names."""
    made = hashlib.blake2b(header.encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        made.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        made.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()
