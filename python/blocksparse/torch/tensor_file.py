"""Files of named tensors: safetensors, complete or not there at all, with a digest of all that they hold.

The metadata has one entry, whose name is the format's and whose value is the digest and a header: of two entries, the
file's order would be by chance.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.files import write_whole


def write(path: Path, tensors: Mapping[str, Tensor], kind: str, header: str, op: str) -> None:
    """Writes a file of a kind; see `write_whole` for what happens to the last one.

    Raises:
        OSError: the disk is full, say; the old file is then still there.
        ImportError: safetensors is not installed.
    """
    _need_safetensors(op)
    from safetensors.torch import save as to_bytes

    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, to_bytes(held, {kind: f"{digest_of(held, header)} {header}"}), op)


@contextmanager
def opened(path: Path, op: str, what: str) -> Iterator[Any]:
    """The file as safetensors opens it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, cut off, say. `what` says what is needed.
        ImportError: safetensors is not installed.
    """
    _need_safetensors(op)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"[{op}] {path} is damaged or no {what}: {error}") from error


def _need_safetensors(op: str) -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError(f"[{op}] needs safetensors: pip install safetensors", name="safetensors")


def parts(value: str) -> tuple[str, str]:
    """(digest, header) of the metadata's entry."""
    digest, _, header = value.partition(" ")
    return digest, header


def check_digest(path: Path, digest: str, tensors: Mapping[str, Tensor], header: str, op: str) -> None:
    """Raises ValueError unless the digest is that of what the file holds."""
    if digest != digest_of(tensors, header):
        raise ValueError(f"[{op}] {path} is damaged: what it holds does not match its digest. Take another copy of it")


def digest_of(tensors: Mapping[str, Tensor], header: str) -> str:
    """Of the header as it is written, and of each tensor's name, dtype, shape and bytes, in the order of names."""
    made = hashlib.blake2b(header.encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        made.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        made.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()
