"""The log of a training: a line of JSON for each checkpoint or evaluation."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import write_whole

LINE = '{"update": '  # how those of a log begin


class Log:
    """A file of such lines.

    Args:
        path: of the file. The lines up to `update` are left there, for the rest is done again.
        update: of the checkpoint that a training goes on from.

    Raises:
        ValueError: the file is no log of ours, so it is left alone.
        OSError: it cannot be written.

    Attributes:
        seconds: that training took until then.
    """

    def __init__(self, path: Path, update: int) -> None:
        self.path = path
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        entries = [_parsed(text) for text in lines]
        for text, entry in zip(lines, entries, strict=True):
            half = not text.endswith("\n") and LINE.startswith(text[: len(LINE)])  # the disk was full
            if entry is None and not half:
                raise ValueError(
                    f"[lm] {path} is there and no log of a training: {text[:40]!r}; another --out leaves it"
                )
        kept = [entry for entry in entries if entry is not None and entry["update"] <= update]
        write_whole(path, "".join(f"{json.dumps(entry)}\n" for entry in kept).encode())
        self.seconds = float(kept[-1]["seconds"]) if kept else 0.0

    def add(self, line: dict[str, Any]) -> None:
        """One more.

        Raises:
            OSError: it cannot be written.
        """
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OSError(f"[lm] {self.path} could not be written: {error}") from error


def _parsed(text: str) -> dict[str, Any] | None:
    """A line, if it is one of ours."""
    with suppress(json.JSONDecodeError):
        line = json.loads(text)
        if isinstance(line, dict) and all(isinstance(line.get(key), int | float) for key in ("update", "seconds")):
            return line
    return None
