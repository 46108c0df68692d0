"""The pages of the documentation, as tests read them: their code and their commands.

A block of Python that follows a line `<!-- examples/FILE -->` is a part of that file: scripts/check_readme.py compares
them, and the examples are run. All other blocks of a page are run in turn, as one program. What a reader need not see
stands in a comment `<!-- run` ... `-->`. A block of text behind one of Python is what it prints. A line
`<!-- not run: reason -->` leaves the next block to the compiler alone.
"""

import ast
import contextlib
import io
import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", *sorted([*DOCS.glob("*.md"), *DOCS.glob("guide/*.md")])]
OTHERS = sorted([*DOCS.glob("develop/*.md"), *DOCS.glob("performance/*.md")])  # for developers

PARTS = re.compile(r"^<!-- run\n(?P<hidden>.*?)^-->$|^```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass
class Block:
    """A fenced block, or a hidden comment, whose language then is Python."""

    language: str
    text: str
    line: int
    before: str  # the line above


def blocks(page: Path) -> list[Block]:
    """All of them, in turn."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in PARTS.finditer(text):
        above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        line = text[: match.start()].count("\n") + 1
        if match["hidden"] is not None:
            found.append(Block("python", match["hidden"], line, above))
        else:
            found.append(Block(match["language"], match["text"], line, above))
    return found


def run(page: Path) -> int:
    """Runs the page's program and compares what it prints with what the page says; returns how many blocks it had."""
    name = page.relative_to(ROOT)
    space: dict[str, object] = {"__name__": "page"}
    ran = 0
    every = blocks(page)
    for block, following in zip_longest(every, every[1:]):
        if block.language != "python" or block.before.startswith("<!-- examples/"):
            continue
        code = "\n" * block.line + block.text  # so that tracebacks name the page's lines
        if block.before.startswith("<!-- not run: "):
            ast.parse(code, str(name))
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(name), "exec"), space)
        ran += 1
        if following is not None and following.language in ("", "text"):
            assert printed.getvalue() == following.text, f"{name}, line {block.line}"
    return ran


def commands(page: Path) -> list[str]:
    """Lines for a shell: of blocks of `sh`, what follows `$ ` elsewhere, and code in the text that begins so."""
    found = []
    for block in blocks(page):
        text = block.text.replace("\\\n", " ")
        if block.language in ("sh", "bash"):
            found += [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        elif block.language in ("", "console"):
            found += [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    prose = PARTS.sub("", page.read_text(encoding="utf-8")).replace("\n", " ")
    return found + re.findall(r"(?<!`)`((?:python -m blocksparse|make) [^`]*)`", prose)
