"""What PyTorch says when memory is short, as an error that can be shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CPU = "DefaultCPUAllocator: "  # PyTorch raises a RuntimeError where a host has too little, and no kind of its own


@contextmanager
def memory_errors(op: str) -> Iterator[None]:
    """MemoryError in place of PyTorch's errors.

    Raises:
        MemoryError: memory is short, of the host or of a card.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not (isinstance(error, torch.OutOfMemoryError) or _CPU in text):
            raise
        first, *_ = text.rpartition(_CPU)[2].splitlines()
        raise MemoryError(f"[{op}] memory is short: {first}") from error
