"""Tables of files of results, one for each text.

They hold sizes beside that of `xz -9e`, seconds, and what the model costs.

    python experiments/compression/report.py experiments/compression/results/{packers,NAME}.jsonl --out NAME.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from blocksparse.models.lines import need_lines
from blocksparse.program import finish

Line = dict[str, Any]

KEYS = ("file", "bytes", "by", "compressed", "seconds", "bits_per_byte", "machine")  # of each line
REFERENCE = "xz -9e"
HEAD = ("by", "bytes", "bits per byte", f"beside `{REFERENCE}`", "seconds", "back", "on", "model, MB in bf16")


def tables(lines: list[Line]) -> str:
    """Markdown. Lines of as many bytes of one text are a table, packers first, then models from large to small."""
    texts = sorted({(line["file"], line["bytes"]) for line in lines}, key=lambda text: (text[0], -text[1]))
    parts = []
    for name, size in texts:
        its = [line for line in lines if (line["file"], line["bytes"]) == (name, size)]
        its.sort(key=lambda line: (line.get("parameters", 0) > 0, line.get("behind", 0) > 0, -line["compressed"]))
        alone = [line["compressed"] for line in its if line["by"] == REFERENCE and not line.get("behind")]
        rows = [row(line, alone[0] if alone else None) for line in its]
        head = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
        parts.append("\n".join([f"{name}, {size:,} bytes", "", *head, *rows]))
    return "\n\n".join(parts) + "\n"


def row(line: Line, reference: int | None) -> str:
    """Of a packer or a model. The way back of a model may be of a part alone, which is then said."""
    by = line["by"] if "parameters" in line else f"`{line['by']}`"
    if line.get("behind"):
        by += f" behind {line['behind'] / 1e6:.1f} MB"
    share = f"{100 * (line['compressed'] / reference - 1):+.1f} %" if reference else ""
    checked = line.get("checked", line["bytes"])
    back = f"{line['back_seconds']:g}" if line.get("back_seconds") is not None else ""
    if back and checked < line["bytes"]:
        back += f" ({checked:,} bytes)"
    cost = f"{line['model_bytes']['bf16'] / 1e6:.1f}" if "model_bytes" in line else "none"
    cells = (by, f"{line['compressed']:,}", f"{line['bits_per_byte']:.3f}", share, f"{line['seconds']:g}", back)
    return f"| {' | '.join([*cells, line['machine'], cost])} |"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines that run.py has written")
    parser.add_argument("--out", type=Path, required=True, help="Markdown")
    options = parser.parse_args()
    text = tables([line for path in options.results for line in need_lines(path, KEYS)])
    options.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    finish(main)
