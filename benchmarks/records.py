"""Files of results: what blocksparse-bench --reproduce writes and benchmarks/peers add to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_NUMBERS = {"n": "n", "b": "block", "seed": "seed", "threads": "threads", "out": "out", "in": "in_"}


@dataclass
class Problem:
    """A problem by its line: linear:fprop f32 n=64 b=32 random(32,0.1) threads=2 x=first y=first."""

    line: str
    op: str = ""
    direction: str = ""  # fprop, dgrad or wgrad
    dtype: str = "f32"
    graph: str = ""
    n: int = 64
    block: int = 32
    seed: int = 0
    threads: int = 1
    out: int = 0
    in_: int = 0
    x_first: bool = False
    y_first: bool = False
    device: str = ""  # cuda, or nothing
    others: list[str] = field(default_factory=list)  # words that are not of a plain product

    @classmethod
    def parse(cls, line: str) -> Problem:
        """Reads a line.

        Raises:
            ValueError: it is no problem, or a number in it is none.
        """
        words = line.split()
        if not words or ":" not in words[0]:
            raise ValueError(f"{line!r} needs to begin like linear:fprop")
        problem = cls(line)
        problem.op, problem.direction = words[0].split(":", 1)
        for word in words[1:]:
            key, _, value = word.partition("=")
            if word in ("f32", "f64", "bf16", "f16"):
                problem.dtype = word
            elif "(" in word:
                problem.graph = word
            elif key in _NUMBERS:
                setattr(problem, _NUMBERS[key], int(value))
            elif key in ("x", "y") and value in ("first", "last"):
                setattr(problem, f"{key}_first", value == "first")
            elif word == "device=cuda":
                problem.device = value
            else:
                problem.others.append(word)
        if not problem.graph:
            raise ValueError(f"{line!r} names no graph")
        return problem

    @property
    def is_conv(self) -> bool:
        """Whether it is a convolution."""
        return self.op == "conv"

    @property
    def setting(self) -> str:
        """What tells convolutions of equal channels apart: pixels, kernel, stride and the like."""
        return " ".join(word for word in self.others if word != "first") if self.is_conv else ""

    @property
    def order(self) -> str:
        """Of the activations."""
        if self.is_conv:
            return "contiguous" if "first" in self.others else "channels-last"
        if self.x_first == self.y_first:
            return "features-first" if self.x_first else "features-last"
        return "x features-first" if self.x_first else "y features-first"


@dataclass
class Results:
    """A file: its header, the lines of blocksparse-bench, and those of the Python libraries, by problem."""

    header: Record
    bench: dict[str, Record] = field(default_factory=dict)
    python: dict[str, Record] = field(default_factory=dict)

    @property
    def on_card(self) -> bool:
        """Whether it is of a CUDA card."""
        return str(self.header["device"]).startswith("cuda: ")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file; a last line that was not finished does not count.

        Raises:
            ValueError: it is no file of results.
        """
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
        if not records or "header" not in records[0]:
            raise ValueError(f"{path} does not begin with a header: was it made by blocksparse-bench --reproduce?")
        results = cls(records[0])
        for record in records[1:]:
            (results.python if "by" in record else results.bench)[record["problem"]] = record
        return results


def problems_of(path: Path) -> list[str]:
    """The lines of a file of problems, {a,b} each in turn."""
    lines = [text.strip() for text in path.read_text(encoding="utf-8").splitlines()]
    return [line for text in lines if text and not text.startswith("#") for line in _expanded(text)]


def _expanded(text: str) -> list[str]:
    choices = re.search(r"\{([^{}]*)\}", text)
    if choices is None:
        return [text]
    begin, end = text[: choices.start()], text[choices.end() :]
    return [line for choice in choices[1].split(",") for line in _expanded(begin + choice + end)]


def device() -> str:
    """As blocksparse-bench names it."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return f"cpu: {found[1] if found else 'unknown CPU'}"
