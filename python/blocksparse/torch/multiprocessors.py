"""Multiprocessors of a card that kernels leave to other streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .._core import library

_left = threading.local()  # `count` of the innermost context of a thread


@contextlib.contextmanager
def leave_multiprocessors(count: int) -> Iterator[None]:
    """Block-sparse ops that this thread calls meanwhile launch as if cards had `count` multiprocessors less.

    Most kernels here fill every multiprocessor until they end, so that kernels of another stream, NCCL's say, run
    before or behind them, but not beside. An op that is recorded in a CUDA graph keeps the count. When an inner context
    ends, the outer one's count holds again.

    Raises:
        ValueError: count is negative.
        UnavailableError: the library was built without CUDA.
    """
    before = getattr(_left, "count", 0)
    library.call("bs_cuda_leave_multiprocessors", count)
    _left.count = count
    try:
        yield
    finally:
        _left.count = before
        library.call("bs_cuda_leave_multiprocessors", before)
