"""Files of JSON lines, one for each result. Several processes may add to one, and each may be stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
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
