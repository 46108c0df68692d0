"""Tables and pictures of what sentences.py, language.py and speed.py have written.

python report.py results       # sentences.jsonl, language.jsonl and speed*.jsonl, as far as they are there
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from blocksparse.models.lines import read_lines
from blocksparse.program import finish

Line = dict[str, Any]
METHODS = ("gradual", "lasso", "obs-staged", "obs", "magnitude", "wanda")


def read(path: Path) -> list[Line]:
    """The lines."""
    return read_lines(path)


def settings_of(line: Line) -> tuple[Any, ...]:
    """What lines have to have in common to stand in one table."""
    return line["steps"], line["rate"], line.get("similar", 0.0), line.get("swapped", 0.0), line.get("scope", "layer")


def text_of(line: Line) -> str:
    """Which packed text and table of words a line belongs to; lines without a name are of IMDB alone."""
    text: str = line.get("text", "imdb")
    return text


def sentences_tables(lines: list[Line]) -> str:
    """Markdown: a table for each text, for its arms learned from other sentences beside a dense model of its own."""
    parts = []
    for text in dict.fromkeys(map(text_of, lines)):
        mine = [line for line in lines if text_of(line) == text]
        table = f", table of words in {mine[0]['table']}" if "table" in mine[0] else ""
        parts.append(f"Text: {text}{table}\n\n{sentences_table(mine)}")
    return "\n".join(parts)


def sentences_table(lines: list[Line]) -> str:
    """Markdown: an arm a row."""
    sets = list(lines[0]["sets"])
    head = [
        "arm",
        "steps",
        "rate",
        "similar",
        "swapped",
        "scope",
        "seed",
        *sets,
        "mean",
        "cosine",
        "cosine, sets' texts",
        "found",
        "at once: mean",
        "cosine",
    ]
    rows = [f"| {' | '.join(head)} |", len(head) * "| --- " + "|"]
    order = sorted(
        lines,
        key=lambda d: (d["method"] not in ("dense", "words"), settings_of(d), -d["block"], d["sparsity"], -d["mean"]),
    )
    for line in order:
        trained = line["method"] not in ("dense", "words")
        cells = [line["arm"], *(str(value) if trained else "" for value in (*settings_of(line), line["seed"]))]
        cells += [f"{line['sets'][name]:.1f}" for name in sets] + [f"{line['mean']:.2f}", f"{line['cosine']:.3f}"]
        cells += [f"{line[key]:.3f}" if key in line else "" for key in ("set_cosine", "found")]
        before = line.get("before", {})
        cells += [f"{before['mean']:.2f}", f"{before['cosine']:.3f}"] if before else ["", ""]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def sentences_picture(lines: list[Line], path: Path) -> None:
    """Mean accuracy and cosine against sparsity, of b = 32: the settings that most lines have, and longer runs."""
    kinds = [settings_of(line) for line in lines if line["block"]]
    common = max(set(kinds), key=kinds.count)
    longer = [line for line in lines if line["block"] == 32 and line["steps"] > common[0]]
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    dense = next(line for line in lines if line["method"] == "dense")
    words = next((line for line in lines if line["method"] == "words"), None)
    for axes, key, label in zip(
        figure.subplots(1, 2),
        ("mean", "cosine"),
        ("mean accuracy of six sets, %", "cosine to the dense model"),
        strict=True,
    ):
        for i, method in enumerate(METHODS):
            mine = [d for d in lines if (d["method"], d["block"], settings_of(d)) == (method, 32, common)]
            mine = [d for d in mine if d["seed"] == 0]
            mine.sort(key=lambda d: d["sparsity"])
            if mine:
                x = [100 * d["sparsity"] for d in mine]
                axes.plot(x, [d[key] for d in mine], "o-", color=f"C{i}", label=method, markersize=4)
                if any("before" in d for d in mine):
                    axes.plot(x, [d["before"][key] for d in mine], "o:", color=f"C{i}", markersize=2.5, linewidth=0.9)
        for i, method in enumerate(METHODS):
            lengths = sorted({(d["steps"], d["rate"]) for d in longer if d["method"] == method})
            for mark, (steps, rate) in zip(itertools.cycle("*PX"), lengths, strict=False):
                mine = [d for d in longer if (d["method"], d["steps"], d["rate"]) == (method, steps, rate)]
                x, y = [100 * d["sparsity"] for d in mine], [d[key] for d in mine]
                axes.plot(x, y, mark, color=f"C{i}", label=f"{method}, {steps} steps,\nrate {rate:g}", markersize=9)
        axes.axhline(dense[key], color="black", linewidth=0.9)
        if words is not None and key == "mean":
            axes.axhline(words[key], color="gray", linewidth=0.9, linestyle="--")
        axes.set(xlabel="% of the blocks are zero, b = 32", ylabel=label)
        axes.grid(alpha=0.25)
    shown = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        *shown,
        loc="outside right center",
        frameon=False,
        fontsize=8,
        title=f"{common[0]} steps, rate {common[1]:g},\ndotted: before distillation",
        title_fontsize=8,
    )
    figure.savefig(path, dpi=130)


def language_table(lines: list[Line]) -> str:
    """Markdown: an arm a row."""
    rows = ["| arm | steps | WikiText-2 | IMDB | at once: WikiText-2 | IMDB | seconds |", 7 * "| --- " + "|"]
    for line in sorted(lines, key=lambda d: (d["sparsity"], d["block"], d["wikitext_bits"])):
        before = line.get("before", {})
        cells = [line["arm"], str(line["steps"]) if line["block"] else ""]
        cells += [f"{line['wikitext_bits']:.3f}", f"{line['imdb_bits']:.3f}"]
        cells += [f"{before[key]:.3f}" if before else "" for key in ("wikitext_bits", "imdb_bits")]
        rows.append(f"| {' | '.join([*cells, str(line.get('seconds', ''))])} |")
    return "\n".join(rows) + "\n"


def speed_table(lines: list[Line]) -> str:
    """Markdown: a case a row, the best way of each model."""
    arms = list(dict.fromkeys(arm for line in lines for arm in line["per_second"] if arm != "dense"))
    head = ["machine", "threads", "dtype", "case", "dense, per second", *(f"{arm}: times as fast" for arm in arms)]
    rows = [f"| {' | '.join(head)} |", len(head) * "| --- " + "|"]
    for line in lines:
        rates = line["per_second"]
        cells = [line["machine"] + (" (shared)" if line["shared"] else ""), str(line["threads"] or "")]
        cells += [line["dtype"], line["case"], f"{rates['dense']:,.1f}"]
        cells += [f"{rates[arm] / rates['dense']:.2f}" if arm in rates else "" for arm in arms]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Writes a Markdown file beside each file of lines, and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path)
    folder = parser.parse_args().results
    if not any(folder.glob("*.jsonl")):
        raise ValueError(f"{folder} has no files of results, needs to be a folder of JSON lines")
    tables = {"sentences": sentences_tables, "language": language_table}
    tables |= {path.stem: speed_table for path in sorted(folder.glob("speed*.jsonl"))}
    for name, table in tables.items():
        if lines := read(folder / f"{name}.jsonl"):
            text = table(lines)
            (folder / f"{name}.md").write_text(text)
            print(f"{name}\n\n{text}")
    if lines := read(folder / "sentences.jsonl"):
        sentences_picture(lines, folder / "sentences.png")


if __name__ == "__main__":
    finish(main)
