"""The demo's memory between runs: which settings it works on, and the results of finished stages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILE = "demo.json"


class Store:
    """Results by name in one JSON file, good for one identity (settings, text, versions)."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.file = folder / FILE
        self.identity = json.loads(json.dumps(identity))  # as it is after reading: tuples are lists
        self.results: dict[str, Any] = {}
        self.changed: list[str] = []  # why what was there is of no use: "width 448 -> 896"
        old = self._read()
        if old is not None:
            self.changed = _differences(old["identity"], self.identity)
            self.results = {} if self.changed else old["results"]

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of that name, made only if it is not there yet."""
        if name not in self.results:
            self.results[name] = make()
            self._write()
        return self.results[name]

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self.file.read_text())
            return content if {"identity", "results"} <= content.keys() else None
        except (FileNotFoundError, ValueError, AttributeError):
            return None

    def _write(self) -> None:
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"identity": self.identity, "results": self.results}, indent=1))
        os.replace(temporary, self.file)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys([*old, *new])
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]
