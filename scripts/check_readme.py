"""Fails where README.md shows other code than the examples that CI builds and runs.

A code block in README.md that follows a line `<!-- examples/FILE -->` must be the part of FILE between two [readme]
marks. `--write` puts it there.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def marked(path: Path) -> str:
    """The lines between the two marks."""
    parts = re.split(r"^(?:#|//) \[readme\]\n", path.read_text(), flags=re.M)
    if len(parts) != 3:
        raise SystemExit(f"{path} needs two [readme] marks, it has {len(parts) - 1}")
    return parts[1].strip("\n") + "\n"


def main() -> int:
    """Compares, or writes with --write."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    pattern = re.compile(r"<!-- (examples/\S+) -->\n```(\w+)\n(.*?)```", re.S)
    if not pattern.search(text):
        raise SystemExit("README.md shows no example")
    new = pattern.sub(lambda m: f"<!-- {m[1]} -->\n```{m[2]}\n{marked(ROOT / m[1])}```", text)
    if "--write" in sys.argv:
        readme.write_text(new)
    elif new != text:
        print("README.md differs from the examples: run python scripts/check_readme.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
