"""Checkpoints: one safetensors file, complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import write_whole

FORMAT = "blocksparse-lm-1"


def save(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Writes a checkpoint; see `write_whole` for what happens to the last one.

    Raises:
        OSError: the disk is full, say; the old file is then still there.
    """
    from safetensors.torch import save as to_bytes

    write_whole(path, to_bytes({k: t.detach().contiguous() for k, t in tensors.items()}, {FORMAT: json.dumps(header)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, header) on the CPU.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is damaged, or no checkpoint of ours.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"[lm] there is no checkpoint {path}")
    try:
        with safe_open(str(path), "pt") as file:
            header = (file.metadata() or {}).get(FORMAT)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"[lm] {path} is damaged or no checkpoint: {error}") from error
    if header is None:
        raise ValueError(f"[lm] {path} is no checkpoint of a language model")
    try:
        described = json.loads(header)
    except json.JSONDecodeError as error:
        raise ValueError(f"[lm] {path} is damaged: its header says {header[:40]!r}") from error
    if not isinstance(described, dict):
        raise ValueError(f"[lm] {path} is damaged: its header says {header[:40]!r}")
    return tensors, described
