"""Bars of long work, where somebody looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(progress: bool | None, total: int, title: str, unit: str, delay_s: float = 0) -> Iterator[Callable[[], None]]:
    """Gives what is to be called behind each part. Without tqdm a line of text is written for each.

    Args:
        progress: whether anything is shown. None: on a terminal.
        total: number of parts.
        title: of the bar.
        unit: what a part is.
        delay_s: work that takes less shows nothing.
    """
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()  # None: a program without a console
    if not progress:
        yield lambda: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        count, start = iter(range(1, total + 1)), time.monotonic()

        def line() -> None:
            text = f"{title}: {unit} {next(count)} of {total}"
            if time.monotonic() - start >= delay_s:
                print(text, file=sys.stderr, flush=True)

        yield line
        return
    with tqdm(total=total, desc=title, unit=unit, delay=delay_s) as shown:
        yield lambda: shown.update() and None
