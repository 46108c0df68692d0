"""Real text from any machine: the docstrings of Python's standard library, or the paragraphs of any file."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

LEAST, MOST = 40, 400  # letters of a paragraph
FEWEST = 600  # paragraphs that one can learn from and be tested with
NOT_PROSE = re.compile(r"^\s*(>>>|[-=*~]{4,}|:param|@)", re.MULTILINE)


class TextError(Exception):
    """Text that cannot be used."""


def docstrings() -> list[str]:
    """The docstrings of the standard library's modules, classes and functions, in the order of their files."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(folder).parts):
            found += _docstrings_of(path)
    return found


def _docstrings_of(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in texts if text]


def read_files(paths: Iterable[Path]) -> list[str]:
    """The text of files, one entry each."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise TextError(f"{path} cannot be read: {error}") from error
    return texts


def paragraphs(texts: Iterable[str]) -> list[str]:
    """Paragraphs of prose, each once, in the order in which they come."""
    found: dict[str, None] = {}
    for text in texts:
        for part in re.split(r"\n\s*\n", text):
            words = " ".join(part.split())
            if LEAST <= len(words) <= MOST and not NOT_PROSE.search(part):
                found.setdefault(words)
    if len(found) < FEWEST:
        raise TextError(f"the text has {len(found)} paragraphs of {LEAST} to {MOST} letters, needs {FEWEST} or more")
    return list(found)


def split(texts: Sequence[str], test: int) -> tuple[list[str], list[str]]:
    """(for training, for the test): which one a paragraph is for is decided by its letters alone."""
    ranked = sorted(texts, key=digest)
    return ranked[test:], ranked[:test]


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
