"""The pages of the documentation, as tests read them: their code, their commands and their links.

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
GUIDES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guide/*.md")])

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
        hidden = match["hidden"] is not None
        above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        # Lines of what is compiled, for tracebacks.
        line = text[: match.start()].count("\n") + 1
        found.append(Block("python" if hidden else match["language"], match["hidden" if hidden else "text"], line, above))
    return found


def run(page: Path) -> int:
    """Runs the page's program and compares what it prints with what the page says; returns how many blocks it had."""
    name = page.relative_to(ROOT)
    space: dict[str, object] = {"__name__": "page"}
    ran = 0
    all_blocks = blocks(page)
    for block, following in zip_longest(all_blocks, all_blocks[1:]):
        if block.language != "python" or block.before.startswith("<!-- examples/"):
            continue
        code = "\n" * block.line + block.text
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


def anchors(page: Path) -> set[str]:
    """What links may name behind a `#`, as GitHub and MyST make it of headings."""
    text = PARTS.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    slugs = [re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings]
    return set(slugs) | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


def broken_links(page: Path) -> list[str]:
    """Links and pictures to files or headings that are not there. Other sites are not asked."""
    text = PARTS.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken
