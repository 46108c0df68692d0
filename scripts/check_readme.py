"""Fails where README.md or a page of the documentation shows other code than the examples that CI builds and runs.

A code block that follows a line `<!-- examples/FILE -->` must be the part of FILE between two [readme] marks.
`--write` puts it there.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# These show one at least, so that a mark that is not read does not pass for none.
SHOW = {"README.md", "docs/quickstart.md"} | {
    f"docs/guide/{name}.md" for name in ("linear", "convolution", "pruning", "jax", "tensorflow", "keras")
}


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
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        text = page.read_text()
        shown = pattern.findall(text)
        if (name in SHOW and not shown) or len(shown) != text.count("<!-- examples/"):
            raise SystemExit(
                f"{name} shows {len(shown)} examples, and has {text.count('<!-- examples/')} marks of them"
            )
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
