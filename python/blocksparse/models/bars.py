"""Progress: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

SECONDS = 10  # between lines of a log; longer by and by, so that a day makes a few hundred lines


class Done(Protocol):
    """What a bar is told with."""

    def __call__(self, count: int, text: str = "") -> None:
        """So many are done; the text appears beside the bar."""


def bytes_bar(total: int, initial: int = 0) -> AbstractContextManager[Done]:
    """Bytes and bytes/s."""
    return counting_bar(total, initial)


@contextmanager
def counting_bar(total: int, initial: int = 0, unit: str = "B", name: str = "bytes") -> Iterator[Done]:
    """How many, and how many a second; on a terminal by tqdm, where that is installed."""
    tqdm = _tqdm()
    if tqdm is None or not sys.stderr.isatty():
        yield _Lines(total, initial, unit, name)
        return
    with tqdm(total=total, initial=initial, unit=unit, unit_scale=True) as bar:

        def done(count: int, text: str = "") -> None:
            if text:
                bar.set_postfix_str(text, refresh=False)
            if count != bar.n:
                bar.update(count - bar.n)

        yield done


class _Lines:
    """A line every `SECONDS`, or when a fiftieth of the time until then has passed again."""

    def __init__(self, total: int, initial: int, unit: str, name: str) -> None:
        self.total, self.initial, self.unit, self.name = total, initial, unit, name
        self.begin = self.said = time.monotonic()

    def __call__(self, count: int, text: str = "") -> None:
        now = time.monotonic()
        if now - self.said < max(SECONDS, (now - self.begin) / 50):
            return
        self.said = now
        tqdm = _tqdm()
        if tqdm is None:
            print(f"{count} of {self.total} {self.name} {text}".rstrip(), file=sys.stderr, flush=True)
            return
        how: dict[str, Any] = {"unit": self.unit, "unit_scale": True, "initial": self.initial, "postfix": text or None}
        meter = tqdm.format_meter(count, self.total, now - self.begin, ncols=0, **how)
        print(meter.strip(), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A line of its own on standard error, beside a bar."""
    tqdm = _tqdm()
    if tqdm is None:
        print(text, file=sys.stderr, flush=True)
    else:
        tqdm.write(text, file=sys.stderr)


def duration(seconds: float) -> str:
    """As one would say it."""
    if seconds < 120:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _tqdm() -> Any:
    """The class, if it is installed."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm
