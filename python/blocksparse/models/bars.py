"""Progress bars, where tqdm is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bytes_bar(total: int, initial: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar of bytes and bytes/s; what is yielded is told how many are done."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda done: None
        return
    with tqdm(total=total, initial=initial, unit="B", unit_scale=True) as bar:
        yield lambda done: None if done == bar.n else bar.update(done - bar.n)
