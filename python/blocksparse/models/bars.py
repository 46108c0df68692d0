"""Progress bars, where tqdm is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Done(Protocol):
    """What a bar is told with."""

    def __call__(self, count: int, text: str = "") -> None:
        """So many bytes are done; the text appears beside the bar."""


@contextmanager
def bytes_bar(total: int, initial: int = 0) -> Iterator[Done]:
    """A bar of bytes and bytes/s."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda count, text="": None
        return
    with tqdm(total=total, initial=initial, unit="B", unit_scale=True) as bar:

        def done(count: int, text: str = "") -> None:
            if text:
                bar.set_postfix_str(text, refresh=False)
            if count != bar.n:
                bar.update(count - bar.n)

        yield done
