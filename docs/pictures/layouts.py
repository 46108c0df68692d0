"""Pictures of docs/guide/layouts.md: python docs/pictures/layouts.py."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from blocksparse import Layout, graphs
from blocksparse.viz import plot_layout

HERE = Path(__file__).parent
NAMES = (
    "ba(64,4)",
    "ws(64,8,0.2)",
    "ws2d(8,8,8,0.2)",
    "balanced(64,9)",
    "random(64,0.14)",
    "butterfly(64)",
    "ws(64,8,0)",
    "banded(64,4)",
    "diagonal(64,8)",
)


def draw_patterns() -> None:
    """The blocks of each graph, with its density and mean path."""
    figure = Figure((7.2, 8.1), layout="constrained")
    for axis, name in zip(figure.subplots(3, 3).flat, NAMES, strict=True):
        layout = Layout.from_graph(name, 16)
        report = graphs.report(layout)
        path = f"path {report.mean_path:.1f}" if report.unreachable == 0 else "no path between groups"
        axis.imshow(layout.mask(), cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
        axis.set_title(name, fontsize=12, family="monospace")
        axis.set_xlabel(f"{report.density:.0%}, {path}", fontsize=11)
        axis.set(xticks=[], yticks=[])
    figure.savefig(HERE / "layouts.png", dpi=120)


if __name__ == "__main__":
    draw_patterns()
    plot_layout(Layout.from_graph("ba(64,4)", 16), HERE / "layout_plot.png", "ba(64,4)")
