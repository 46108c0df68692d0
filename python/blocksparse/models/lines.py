"""Files of JSON lines, one for each result. Several processes may add to one, and each may be stopped."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_lines(path: Path, keys: Iterable[str] = ()) -> list[dict[str, Any]]:
    """All complete ones, [] without a file. Half a line, of a disk that was full, is left out.

    Raises:
        ValueError: a line is no object, or lacks one of the keys, or the file is another kind of file.
    """
    lines = []
    texts = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    for number, text in enumerate(texts, 1):
        with suppress(json.JSONDecodeError):
            line = json.loads(text)
            missing = [key for key in keys if key not in line] if isinstance(line, dict) else ["an object"]
            if missing:
                raise ValueError(f"{path}, line {number} is no line of results, needs {', '.join(missing)}")
            lines.append(line)
    if not lines and not all(map(_may_be_half, texts)):
        raise ValueError(f"{path} is no file of results: it has no line of results, needs one JSON object a line")
    return lines


def _may_be_half(text: str) -> bool:
    """Whether it begins as a line does. No whole line is there while the first is written, or if that was stopped."""
    return '{"'.startswith(text[:2])


def need_lines(path: Path, keys: Iterable[str] = ()) -> list[dict[str, Any]]:
    """As `read_lines`; raises ValueError where there is no file, or no line in it."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    lines = read_lines(path, keys)
    if not lines:
        raise ValueError(f"{path} has no line of results")
    return lines


def add_line(path: Path, line: dict[str, Any]) -> None:
    """One more, by one write. Behind half a line it begins a new one.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "ab+") as file:
        torn = b""
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            torn = b"" if file.read() == b"\n" else b"\n"
        file.write(torn + json.dumps(line).encode() + b"\n")


def missing(
    path: Path, wanted: Iterable[dict[str, Any]], minutes: float = math.inf, again: Container[str] = ()
) -> Iterator[dict[str, Any]]:
    """Those that the file has no line of, in turn, until one would end later; prints what is left, or that nothing is.

    Args:
        path: JSON lines; whoever asks adds one for each.
        wanted: what a line says at least, the name of its arm among it.
        minutes: none begins that would end later, if it takes as long as the longest before it.
        again: arms that are done again.
    """
    done, began, longest, count = read_lines(path), time.monotonic(), 0.0, 0
    for each in wanted:
        if each["arm"] not in again and any(each.items() <= line.items() for line in done):
            continue
        start, count = time.monotonic(), count + 1
        if start + longest - began > 60 * minutes:
            print(f"{each['arm']} and what follows is left for another run: {minutes:g} minutes are over")
            return
        yield each
        longest = max(longest, time.monotonic() - start)
    if not count:
        print(f"nothing is left to do: all that was asked for is in {path}")


def need_known(names: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Names of arms, in the order that they are known in; None: all.

    Raises:
        ValueError: one is not known.
    """
    order = list(known)
    chosen = set(order if names is None else names)
    if unknown := sorted(chosen - set(order)):
        raise ValueError(f"there is no arm {', '.join(unknown)}, needs one of {', '.join(order)}")
    return [name for name in order if name in chosen]
