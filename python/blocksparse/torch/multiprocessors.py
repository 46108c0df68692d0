"""Multiprocessors of a card that kernels leave to other streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .._core import library


@contextlib.contextmanager
def leave_multiprocessors(count: int) -> Iterator[None]:
    """Block-sparse ops that this thread calls meanwhile launch as if cards had `count` multiprocessors less.

    Most kernels here fill every multiprocessor until they end, so that kernels of another stream, NCCL's say, run
    before or behind them, but not beside. An op that is recorded in a CUDA graph keeps the count.

    Raises:
        ValueError: count is negative.
        UnavailableError: the library was built without CUDA.
    """
    library.call("bs_cuda_leave_multiprocessors", count)
    try:
        yield
    finally:
        library.call("bs_cuda_leave_multiprocessors", 0)
