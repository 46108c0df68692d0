"""Table and picture of the arms of a configuration that differ in units, blocks, stride and matrices before the gates.

    python experiments/small_world_lstm/widths.py configs/12M-width.json results/12M-width.jsonl

Of an arm that was trained with several rates, the one that the text that chooses prefers is shown, as the mean of its
seeds. Arms whose longest run is shorter than that of others are left out, and named.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from configuration import read_config
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from blocksparse.models.language import ModelConfig
from blocksparse.program import finish
from report import Line, diverged_of, longest_by_rate, read, runs_of

SHOWN = {field: getattr(ModelConfig(), field) for field in ("hidden", "block", "graph", "inner", "stride")}
COLORS = {8: "tab:red", 16: "tab:green", 32: "tab:blue", 64: "tab:orange", 128: "tab:purple"}
MARKERS = "osD^v"  # one for each family of graphs


@dataclass(frozen=True)
class Rate:
    """The runs of an arm with one learning rate, means of its seeds."""

    rate: float
    bits: float
    parameters: int


def arms_of(lines: list[Line]) -> dict[str, list[Rate]]:
    """Of the longest runs: rates of each arm, first the one that the text that chooses prefers; the best arm first.

    Raises:
        ValueError: there is no run.
    """
    runs = runs_of(lines)
    if not runs:
        raise ValueError("there is no run among the results, but sweeps at most")
    longest = max(run["bytes"] for run in runs)
    arms: dict[str, list[Rate]] = {}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        rates = longest_by_rate([run for run in runs if run["arm"] == arm])
        if rates[0][0]["bytes"] == longest:
            arms[arm] = [Rate(its[0]["lr"], fmean(run["valid"] for run in its), its[0]["parameters"]) for its in rates]
    return dict(sorted(arms.items(), key=lambda item: item[1][0].bits))


def speeds_of(lines: list[Line]) -> dict[str, float]:
    """kB/s of arms that were trained alone, in steady state: between the first and the last point of the curve.

    The mean of an arm's runs, those too that are shorter than others.
    """
    speeds: dict[str, list[float]] = defaultdict(list)
    for line in runs_of(lines):
        if line.get("alone", True):
            first, last = line["curve"][0], line["curve"][-1]
            if last[1] > first[1]:  # not where there is one point alone
                speeds[line["arm"]].append((last[0] - first[0]) / (last[1] - first[1]) / 1000)
    return {arm: fmean(its) for arm, its in speeds.items()}


def table(arms: dict[str, list[Rate]], models: dict[str, dict[str, Any]], speeds: dict[str, float]) -> str:
    """Markdown."""
    rows = [
        "| arm | units | b | graph | matrices | stride | parameters | bits/byte | rate | other rates | kB/s alone |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, (best, *others) in arms.items():
        model = models[arm]
        graph, block = (f"`{model['graph']}`", model["block"]) if model["graph"] else ("dense", "-")
        tried = ", ".join(f"{other.rate:g}: {other.bits:.4f}" for other in others) or "-"
        speed = f"{speeds[arm]:.0f}" if arm in speeds else "not measured"
        shape = f"{model['hidden']} | {block} | {graph} | {model['inner']} | {model['stride']}"
        rows.append(f"| {arm} | {shape} | {best.parameters} | {best.bits:.4f} | {best.rate:g} | {tried} | {speed} |")
    return "\n".join(rows) + "\n"


def plot(arms: dict[str, list[Rate]], models: dict[str, dict[str, Any]], usual: dict[str, Any], path: Path) -> None:
    """Left, arms that differ from the usual model in units and blocks; right, those of its units and blocks."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    best = {arm: rates[0].bits for arm, rates in arms.items()}
    sparse = [arm for arm in arms if models[arm]["graph"]]
    plot_units(left, {arm: best[arm] for arm in sparse if is_usual(models[arm], usual, "stride", "inner")}, models)
    others = [arm for arm in sparse if is_usual(models[arm], usual, "hidden", "block")]
    families = families_of(models[arm] for arm in sparse)
    names = []
    for arm in others:
        model = models[arm]
        family = f"\n{family_of(model)}" if len(families) > 1 else ""
        names.append(f"stride {model['stride']}\n{model['inner']} matrices{family}")
        right.plot(names[-1:], [best[arm]], families[family_of(model)], color=COLORS[usual["block"]])
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for name, arm in zip(names, others, strict=True):
        where = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "size": 8, "bbox": white}
        right.annotate(f"{best[arm]:.4f}", (name, best[arm]), **where)
    right.margins(x=0.12)
    right.set_title(f"{usual['hidden']} units, b = {usual['block']}", fontsize=10)
    right.tick_params(axis="x", labelsize=8)
    if "dense" in best:
        left.plot(models["dense"]["hidden"], best["dense"], "s", color="black")
    low, high = min(best.values()), max(best.values())
    left.set_ylim(low - 0.15 * (high - low), high + 0.1 * (high - low))
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.25)
        if "dense" in best:
            axes.axhline(best["dense"], color="black", linewidth=0.9, linestyle="--", label="dense")
        axes.legend(frameon=False)
    figure.savefig(path, dpi=140)


def is_usual(model: dict[str, Any], usual: dict[str, Any], *fields: str) -> bool:
    """Whether it differs in other fields alone."""
    return all(model[field] == usual[field] for field in fields)


def family_of(model: dict[str, Any]) -> str:
    """How its graph is drawn, such as "ba"."""
    return str(model["graph"]).split("(")[0]


def families_of(models: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The marker of each family of graphs."""
    return dict(zip(sorted({family_of(model) for model in models}), cycle(MARKERS), strict=False))


def plot_units(axes: Axes, bits_of: dict[str, float], models: dict[str, dict[str, Any]]) -> None:
    """Bits per byte against units, a line for each size of blocks and family of graphs."""
    families = families_of(models[arm] for arm in models if models[arm]["graph"])
    lines: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    for arm, value in bits_of.items():
        lines[models[arm]["block"], family_of(models[arm])].append((models[arm]["hidden"], value))
    for (block, family), points in sorted(lines.items()):
        points.sort()
        xs, ys = zip(*points, strict=True)
        label = f"b = {block}, {family}" if len(families) > 1 else f"b = {block}"
        axes.plot(xs, ys, marker=families[family], color=COLORS[block], label=label)
    axes.set_xscale("log")
    shown = [*bits_of, *(["dense"] if "dense" in models else [])]
    ticks = sorted({models[arm]["hidden"] for arm in shown})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("units")
    axes.set_ylabel("bits per byte, held-out text")


def need_same(lines: list[Line], models: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Raises ValueError where results are of models that the configuration has not."""
    for line in lines:
        arm = line["arm"]
        if arm not in models:
            raise ValueError(f"{options.results} has an arm {arm} that {options.config} has not")
        for field, value in models[arm].items():
            if line.get(field, value) != value:  # old lines do not say all
                given = f"{arm} with {field} {line[field]}"
                raise ValueError(f"{options.results} has {given}, {options.config} has {value}")


def main() -> None:
    """Writes both beside the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    config, lines = read_config(options.config), read(options.results)
    usual = SHOWN | config["model"]
    models = {arm: usual | what["model"] for arm, what in config["arms"].items()}
    need_same(lines, models, options)
    arms = arms_of(lines)
    left_out = sorted({line["arm"] for line in lines if not line.get("diverged")} - set(arms))
    if left_out:
        print(f"left out, for no run of theirs is as long as those of others: {', '.join(left_out)}")
    plot(arms, models, usual, options.results.with_suffix(".png"))
    text = table(arms, models, speeds_of(lines)) + diverged_of(lines)
    options.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    finish(main)
