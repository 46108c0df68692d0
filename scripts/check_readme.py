"""Fails where README.md or a guide shows other code than the examples that CI builds and runs.

A code block that follows a line `<!-- examples/FILE -->` must be the part of FILE between two [readme] marks.
`--write` puts it there.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/usage.md",
    "docs/pruning.md",
    "docs/jax.md",
    "docs/tensorflow.md",
    "docs/keras.md",
    "docs/guide/several-cards.md",
)


def marked(path: Path) -> str:
    """The lines between the two marks."""
    parts = re.split(r"^(?:#|//) \[readme\]\n", path.read_text(), flags=re.M)
    if len(parts) != 3:
        raise SystemExit(f"{path} needs two [readme] marks, it has {len(parts) - 1}")
    return parts[1].strip("\n") + "\n"


def main() -> int:
    """Compares, or writes with --write."""
    pattern = re.compile(r"<!-- (examples/\S+) -->\n```(\w+)\n(.*?)```", re.S)
    failed = 0
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        if not pattern.search(text):
            raise SystemExit(f"{name} shows no example")
        new = pattern.sub(lambda m: f"<!-- {m[1]} -->\n```{m[2]}\n{marked(ROOT / m[1])}```", text)
        if new == text:
            continue
        if "--write" in sys.argv:
            page.write_text(new)
        else:
            print(f"{name} differs from the examples: run python scripts/check_readme.py --write", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
