"""The log of a training: a line of JSON for each checkpoint or evaluation."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import write_whole

LINE = '{"update": '  # how those of a log begin
STOPPED = "stopped"


class Log:
    """A file of such lines. One with "stopped" is the last of a training that was stopped by a signal.

    A training that goes on takes that line back with its next one: it was due at no checkpoint or evaluation, or lacks
    what the evaluation would have said. So the log becomes that of a training that was never stopped.

    Args:
        path: of the file. The lines up to `update` are left there, for the rest is done again.
        update: of the checkpoint that a training goes on from.
        op: how errors begin.

    Raises:
        ValueError: the file is no log of ours, so it is left alone.
        OSError: it cannot be written.

    Attributes:
        seconds: that training took until then.
        unfinished: the line at `update` of a training that was stopped there, without "stopped"; or None.
    """

    def __init__(self, path: Path, update: int, op: str = "lm") -> None:
        self.path, self.op = path, op
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        entries = [_parsed(text) for text in lines]
        for text, entry in zip(lines, entries, strict=True):
            half = not text.endswith("\n") and LINE.startswith(text[: len(LINE)])  # the disk was full
            if entry is None and not half:
                raise ValueError(
                    f"[{op}] {path} is there and no log of a training: {text[:40]!r}; another --out leaves it"
                )
        kept = [entry for entry in entries if entry is not None and entry["update"] <= update]
        write_whole(path, _text(kept))
        self.seconds = float(kept[-1]["seconds"]) if kept else 0.0
        self.unfinished: dict[str, Any] | None = None
        self._without = [entry for entry in kept if not entry.get(STOPPED)]  # if lines are to be taken back
        self._takes_back = len(self._without) < len(kept)
        if self._takes_back and kept[-1].get(STOPPED) and kept[-1]["update"] == update:
            self.unfinished = {key: value for key, value in kept[-1].items() if key != STOPPED}

    def add(self, line: dict[str, Any], *, finished: bool = True) -> None:
        """One more; if it is not finished, then because training was stopped.

        Raises:
            OSError: it cannot be written.
        """
        entry = line if finished else {**line, STOPPED: True}
        if self._takes_back:
            write_whole(self.path, _text([*self._without, entry]))
            self._takes_back = False
            return
        try:
            with open(self.path, "ab") as file:
                file.write(_text([entry]))
        except OSError as error:
            raise OSError(f"[{self.op}] {self.path} could not be written: {error}") from error


def _text(entries: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()


def _parsed(text: str) -> dict[str, Any] | None:
    """A line, if it is one of ours."""
    with suppress(json.JSONDecodeError):
        line = json.loads(text)
        if isinstance(line, dict) and all(isinstance(line.get(key), int | float) for key in ("update", "seconds")):
            return line
    return None
