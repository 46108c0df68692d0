"""Sections of the pages of machines that are of whole networks or parts of them, not of one problem."""

from __future__ import annotations

from records import Record
from report import number, table


def feed_forward(programs: list[Record]) -> list[str]:
    """Lines of mlp.py: ours, in separate launches, and dense ones."""
    parts = [record for record in programs if "hidden" in record and "ms" in record]
    if not parts:
        return []
    lines = ["", "## Feed-forward parts", ""]
    lines += [
        "us of one, weights from memory, replays of CUDA graphs. `separate` has a launch for each weight, where `ours`",
        "makes gate and up by one. The last column is the faster dense one over `ours`.",
        "",
    ]
    cells = []
    for r in parts:
        ms = r["ms"]
        kind = "GELU" if r["plain"] else "SwiGLU"
        what = f"{kind}, {r['features']} x {r['hidden']}, {r['dtype']}, {r['pass']}"
        layout = f"{100 * r['density']:g} % | {r['block']} | {r['tokens']}"
        times = [number(1e3 * ms[way]) for way in ("ours", "separate", "dense", "compiled")]
        cells.append([what, layout, *times, number(min(ms["dense"], ms["compiled"]) / ms["ours"], losing_below=1)])
    names = "problem | density | b | tokens | ours | separate | dense | compiled | times as fast"
    return [*lines, *table(names, cells)]


def pixelcnn(programs: list[Record]) -> list[str]:
    """PixelCNN++: steps of training, host time, drawing."""
    # Of what was timed twice the later file counts.
    steps = list({(r["preset"], r["way"]): r for r in programs if "way" in r}.values())
    hosts = [record for record in programs if "host" in record]
    drawn = list({r["sampling"]: r for r in programs if "sampling" in r}.values())
    if not steps:
        return []
    lines = ["", "## PixelCNN++", ""]
    lines += [f"A step of training, bf16, {steps[0]['batch']} images of 32 x 32, PyTorch {steps[0]['torch']}."]
    lines += [
        "`ours` has this library's convolutions, `torch` PyTorch's, both with compiled operations between them.",
        "`eager` is `ours` without compiling.",
        "",
    ]
    cells = [[f"`{r['preset']}`", r["way"], number(r["ms"]), number(r["memory_GB"]), f"`{r['commit']}`"] for r in steps]
    lines += table("problem | way | ms | memory, GB | commit", sorted(cells))
    if hosts:
        cells = [[r["host"], number(r["ours_us"]), number(r["torch_us"])] for r in hosts]
        lines += ["", "Host time of a convolution, until the call is queued, us:", ""]
        lines += table("problem | ours | PyTorch", cells)
    if drawn:
        cells = [
            [f"`{r['sampling']}`, {r['images']} images", number(r["cached_s"]), number(r["plain_s"])] for r in drawn
        ]
        lines += ["", "Drawing images, seconds: with what earlier pixels left, and without.", ""]
        lines += table("problem | with | without", cells)
    return lines
