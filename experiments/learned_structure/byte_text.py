"""The text of the byte-level models of this folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """Bytes."""

    train: Tensor
    held_out: Tensor
    digest: str  # of all; bits of another text are not compared


def read_text(path: Path, held_out: int, device: str = "cpu") -> Text:
    """A file whose last bytes are held out.

    Raises:
        OSError: it cannot be read.
        ValueError: it has fewer than three times as many bytes.
    """
    content = path.read_bytes()
    if len(content) < 3 * held_out:
        raise ValueError(f"{path} holds {len(content)} bytes, needs {3 * held_out} or more")
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    return Text(text[:-held_out], text[-held_out:], hashlib.sha256(content).hexdigest()[:12])
