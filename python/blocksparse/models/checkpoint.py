"""Checkpoints: one safetensors file, complete or not there at all, with a digest of all that it holds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..torch import tensor_file
from .files import AnyPath


@dataclass(frozen=True)
class Kind:
    """Whose checkpoints they are.

    Attributes:
        op: how errors begin.
        what: it is a checkpoint of.
        format: names the only metadata, digest and header: of two, the file's order would be by chance.
        older: the same of a header alone, as the first version wrote it; "": there is none.
    """

    op: str
    what: str
    format: str
    older: str = ""


LM = Kind("lm", "a language model", "blocksparse-lm-2", "blocksparse-lm-1")
FORMAT, FORMAT_1 = LM.format, LM.older


def save(path: AnyPath, tensors: dict[str, Tensor], header: dict[str, Any], kind: Kind = LM) -> None:
    """Writes a checkpoint; see `write_whole` for what happens to the last one.

    Raises:
        OSError: the disk is full, say; the old file is then still there.
    """
    tensor_file.write(Path(path), tensors, kind.format, json.dumps(header), kind.op)


def load(path: AnyPath, kind: Kind = LM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, header) on the CPU. Warns of files of older versions, which have no digest.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is damaged, or no checkpoint of ours.
    """
    path = Path(path)
    with _opened(path, kind) as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    digest, text = _parts(metadata, path, kind)
    if digest is not None:
        tensor_file.check_digest(path, digest, tensors, text, kind.op)
    header = _parsed(text, path, kind)
    if digest is None:
        warnings.warn(f"{path} has no digest, so that damage to it cannot be noticed", stacklevel=2)
    return tensors, header


def load_header(path: AnyPath, kind: Kind = LM) -> dict[str, Any]:
    """The header alone, which is not compared with the digest. Raises what `load` does."""
    path = Path(path)
    with _opened(path, kind) as file:
        return _parsed(_parts(file.metadata() or {}, path, kind)[1], path, kind)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], prefix: str, path: AnyPath, op: str = "lm") -> None:
    """Weights of a checkpoint into a model, all of them.

    Raises:
        ValueError: some are missing, of another shape, or of another layout.
    """
    found = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise ValueError(f"[{op}] {path} does not fit the model: {lines}") from error


@contextmanager
def _opened(path: Path, kind: Kind) -> Iterator[Any]:
    if path.is_dir():
        last = path / "last.safetensors"
        raise IsADirectoryError(
            f"[{kind.op}] {path} is a folder, needs a checkpoint{f', as {last} is' if last.is_file() else ''}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"[{kind.op}] there is no checkpoint {path}")
    with tensor_file.opened(path, kind.op, "checkpoint") as file:
        yield file


def _parts(metadata: dict[str, str], path: Path, kind: Kind) -> tuple[str | None, str]:
    """(digest, header), both as they are written."""
    if metadata.keys() == {kind.format}:
        return tensor_file.parts(metadata[kind.format])
    if kind.older and metadata.keys() == {kind.older}:
        return None, metadata[kind.older]
    raise ValueError(f"[{kind.op}] {path} is damaged or no checkpoint of {kind.what}")


def _parsed(text: str, path: Path, kind: Kind) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except json.JSONDecodeError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"[{kind.op}] {path} is damaged: its header says {text[:40]!r}")
    return header
