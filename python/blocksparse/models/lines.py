"""Files of JSON lines, one for each result. Several processes may add to one, and each may be stopped."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete ones, [] without a file. Half a line, of a disk that was full, is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
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
