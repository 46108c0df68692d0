"""Fails where a page is hard to read, or where a link of it leads nowhere.

README.md, HACKING.md and docs/**/*.md: no paragraph of more than six lines, no sentence with more than two figures.
README.md has at most 150 lines and 900 words, HACKING.md at most 150 lines. Those pages and all NOTES.md and README.md
of folders: relative links lead to files that are there, and to headings that these have.

A figure is a measured number: one with a unit, a ratio, a share. Versions, dates, sizes of blocks and matrices, and
densities are none; a range (`3 to 5 times`) is one. Tables, code and headings are not sentences.
"""

import math
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = {"README.md": 150, "HACKING.md": 150}
MOST_WORDS = {"README.md": 900}
MOST_LINES_OF_PARAGRAPH = 6
MOST_FIGURES = 2
WIDTH = 120  # a paragraph that is not wrapped has as many lines as it would have at this width

READ = ("README.md", "HACKING.md", "docs/**/*.md")
LINKED = ("src/**/*.md", "experiments/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")

UNITS = r"(?:[num]?s|seconds?|minutes?|hours?|cycles?|clocks?|[kKMGT]?B(?:/n?s)?|[GT]FLOP/s|tokens/s|bits per|times)\b"
FIGURE = re.compile(rf"(?<![\w.,=/-])\d[\d.,]*(?:(?:\s|-)?{UNITS}|x\b|\s?%)")
# Densities are what a problem is, not what it takes.
DENSITY = re.compile(
    r"\b(?:density|sparsity)(?: of)? [\d.,]+\s?%"
    r"|[\d.,]+(?: to [\d.,]+)?\s?% (?:of (?:the|its|their|all) (?:\w+ )?blocks|dens|spars)"
)
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|\b(?:src|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^\s*(`{3,}|~{3,}|:{3,})")


class Paragraph(NamedTuple):
    """Lines of prose that belong together."""

    line: int  # the number of its first line
    lines: list[str]

    @property
    def height(self) -> int:
        """How many lines it is."""
        return max(len(self.lines), math.ceil(sum(len(line) + 1 for line in self.lines) / WIDTH))

    def sentences(self) -> list[str]:
        """In order, without code."""
        text = re.sub(r"`[^`]*`", "`", " ".join(line.strip() for line in self.lines))
        text = re.sub(r"\]\([^)]*\)", "]", text)
        return re.split(r"(?<=[.!?])[)*_\"]*\s+(?=[A-Z`\[(*])", text)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines; those of code, tables, comments, formulas and headings are empty."""
    fence = ""
    text = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    text = re.sub(r"\A---\n.*?\n---\n", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    text = re.sub(r"^\$\$.*?\$\$", lambda match: "\n" * match[0].count("\n"), text, flags=re.S | re.M)
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            directive = re.match(r"^\s*:{3,}\{(?!toctree)", line)  # a note or tip holds prose
            fence = "" if fence or directive else mark[1]
            yield number, ""
        elif fence or re.match(r"\s*(\||#|\+-|<|:\w+:)", line):
            yield number, ""
        else:
            yield number, line


def paragraphs(text: str) -> Iterator[Paragraph]:
    """Each item of a list is one."""
    begin, lines = 0, list[str]()
    for number, line in [*prose(text), (0, "")]:
        if lines and (not line.strip() or LIST_ITEM.match(line)):
            yield Paragraph(begin, lines)
            lines = []
        if line.strip():
            begin = number if not lines else begin
            lines = [*lines, line]


def figures(sentence: str) -> list[str]:
    """The measured numbers in it."""
    return [match[0] for match in FIGURE.finditer(DENSITY.sub(" ", sentence))]


def check_prose(name: str, text: str) -> Iterator[str]:
    """What is long."""
    lines, words = text.count("\n"), len(text.split())
    if lines > MOST_LINES.get(name, lines):
        yield f"{name} has {lines} lines, of at most {MOST_LINES[name]}"
    if words > MOST_WORDS.get(name, words):
        yield f"{name} has {words} words, of at most {MOST_WORDS[name]}"
    for paragraph in paragraphs(text):
        if paragraph.height > MOST_LINES_OF_PARAGRAPH:
            yield f"{name}:{paragraph.line}: a paragraph of {paragraph.height} lines; make it two, a list or a table"
        for sentence in paragraph.sentences():
            found = figures(sentence)
            if len(found) > MOST_FIGURES:
                text = f"a sentence with {len(found)} figures ({', '.join(found)}); make it a table"
                yield f"{name}:{paragraph.line}: {text}"


@cache
def anchors(path: Path) -> frozenset[str]:
    """The headings of a page as GitHub and MyST name them, and anchors in HTML or MyST."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    names = list[str]()
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*\s*$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return frozenset([*names, *re.findall(r"\bid=\"([^\"]+)\"", text), *re.findall(r"^\(([\w-]+)\)=", text, re.M)])


def check_links(name: str, text: str) -> Iterator[str]:
    """Which links lead nowhere."""
    for number, line in enumerate(re.sub(r"^(```|~~~).*?^\1", blank, text, flags=re.S | re.M).splitlines(), 1):
        for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target, _, anchor = unquote(match[1] or match[2]).partition("#")
            if re.match(r"[a-z]+:", target) or target.startswith("/"):
                continue
            path = (ROOT / name).parent / target if target else ROOT / name
            if not path.exists():
                yield f"{name}:{number}: {target} is not there"
            elif anchor and path.suffix == ".md" and anchor not in anchors(path.resolve()):
                yield f"{name}:{number}: {target or name} has no heading #{anchor}"


def blank(match: re.Match[str]) -> str:
    """As many empty lines."""
    return "\n" * match[0].count("\n")


def main() -> int:
    """Checks all pages, or those that are named."""
    chosen = {Path(name).resolve() for name in sys.argv[1:]}
    wrong = list[str]()
    for patterns, check in ((READ, check_prose), (READ + LINKED, check_links)):
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            if not chosen or path in chosen:
                wrong += check(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
