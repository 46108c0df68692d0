"""Compact tables of many problems: a row for tokens, pass and pattern, a column for each block size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from report import number, table
from rows import DIRECTIONS, Row, kind, numbers_of

LATER = "†"  # our time is of a later run than the dense one
LEAST = 6  # rows of a matrix that make a table of its own


def matrices(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of one matrix, type and order, whatever the tokens; those with few rows together."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        p, (out, in_) = row.problem, row.size
        size = f"{out} x {in_} channels, {p.setting}, {p.n} images" if p.is_conv else f"{out} x {in_}"
        groups[(size, row.dtype, p.order)].append(row)
    named = sorted(groups.items(), key=lambda item: (item[0][1] not in ("bf16", "f32"), item[0][1], -len(item[1])))
    large = [(", ".join(key), some) for key, some in named if len(some) >= LEAST]
    small = [row for _, some in named if len(some) < LEAST for row in some]
    return [*large, *([("Others", small)] if small else [])]


def speed_up(row: Row) -> str:
    """The cell of a problem."""
    text = number(row.speed_up, losing_below=1) or "-"
    return f"{text} ({number(row.us)}{LATER * ('later' in row.record)})"


def pattern(row: Row) -> str:
    """Its density, its name where it is not random, and what is not of a plain product."""
    p = row.problem
    words = [] if p.is_conv else [word for word in p.others if word not in ("tf32",)]
    words += [f"seed={p.seed}"] if p.seed and not row.on_card else []
    if kind(p) == "random":
        return " ".join([f"{100 * numbers_of(p)[-1]:g} %", *words])
    return " ".join([f"`{p.graph}`", *words])


def grid(rows: list[Row], cell: Callable[[Row], str]) -> list[str]:
    """Lines for tokens, pass and pattern, a column for each block size."""
    blocks = sorted({row.problem.block for row in rows})
    mixed = len({(row.size, row.dtype, row.problem.order, row.problem.setting) for row in rows}) > 1
    conv = rows[0].problem.is_conv
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for row in sorted(rows, key=lambda row: (row.problem.n, row.size)):
        p = row.problem
        size = [", ".join([" x ".join(map(str, row.size)), row.dtype, p.order, *filter(None, [p.setting])])] * mixed
        key = (*size, *([] if conv and not mixed else [str(p.n)]), p.direction, pattern(row))
        cells.setdefault(key, {})[p.block] = cell(row)
    names = [
        *(["problem"] * mixed),
        *([] if conv and not mixed else ["images" if conv else "tokens"]),
        "pass",
        "layout",
    ]
    names += [f"b = {block}" for block in blocks]
    lines = [[*key, *(of.get(block, "") for block in blocks)] for key, of in sorted(cells.items(), key=in_order(mixed))]
    return table(" | ".join(names), lines)


def in_order(mixed: bool) -> Callable[[tuple[tuple[str, ...], dict[int, str]]], tuple[object, ...]]:
    """Tokens, pass, and the densest first."""

    def key(item: tuple[tuple[str, ...], dict[int, str]]) -> tuple[object, ...]:
        *before, direction, layout = item[0]
        share = float(layout.split(" ")[0]) if layout[0].isdigit() else 0.0
        numbers = [int(word) if word.isdigit() else 0 for word in before]
        plain = " %" not in layout or not layout.endswith("%")
        return (*(before[:1] if mixed else []), *numbers, DIRECTIONS.index(direction), plain, -share, layout)

    return key
