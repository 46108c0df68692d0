"""A table and a picture of what was measured."""

from __future__ import annotations

from pathlib import Path

from .training import Curve

COLOURS = {"dense": "#666666", "wide": "#c8553d", "deep": "#2f6690"}


def table(curves: list[Curve]) -> str:
    """One line for each arm."""
    lines = [f"{'':8}{'channels':>10}{'convs':>7}{'density':>9}{'Mmul-adds':>11}{'weights':>10}{'s':>8}{'test':>9}"]
    for curve in curves:
        arm = curve.arm
        test = f"{curve.accuracies[-1][1]:.2%}" if curve.accuracies else "-"
        lines.append(
            f"{arm.name:8}{arm.width:>10}{2 * arm.blocks:>7}{arm.density:>9.0%}{curve.multiply_adds / 1e6:>11.2f}"
            f"{curve.parameters:>10,}{curve.seconds:>8.1f}{test:>9}{'' if curve.finished else '  (stopped)'}"
        )
    return "\n".join(lines)


def draw(curves: list[Curve], title: str, path: Path) -> None:
    """Losses and accuracies over epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for curve in curves:
        arm = curve.arm
        colour = COLOURS.get(arm.name, "black")
        label = f"{arm.name}: {2 * arm.blocks} convolutions of {arm.width}, {arm.density:.0%}"
        left.plot(*zip(*curve.losses, strict=True), color=colour, label=label)
        if curve.accuracies:
            epochs, shares = zip(*curve.accuracies, strict=True)
            percent = [100 * share for share in shares]
            right.plot(epochs, percent, "o-", color=colour, markersize=4, label=f"{arm.name}: {shares[-1]:.1%}")
    left.set(xlabel="epochs", ylabel="cross-entropy of training", yscale="log")
    right.set(xlabel="epochs", ylabel="test images told right, %")
    left.yaxis.set_major_formatter(ScalarFormatter())
    left.yaxis.set_minor_formatter(ScalarFormatter())
    for axes in (left, right):
        if axes.lines:  # none where training was stopped before the first test
            axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
