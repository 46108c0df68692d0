"""What a training step costs when a weight matrix grows and its number of weights does not.

    python experiments/huge/width.py --output experiments/huge/results/width-cpu.jsonl                  # 4M weights
    python experiments/huge/width.py --device cuda --output experiments/huge/results/width-card.jsonl   # 64M weights

One layer, width x width, blocks at random: forward, backward with dx, Adam, of `--tokens` tokens. A dense layer of the
same width stands beside it as far as it fits. Weights are float32; on a card products are bfloat16 (autocast). x lies
features-first, where a block reads consecutive memory: features-last, each token of it is a page of its own at 1M.

Each width is a process of its own, whose peak of memory counts from what it had before the layer was made. A line of
JSON each; what the file holds already is not measured again. The picture lies beside the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import Line, Options

from blocksparse.models.lines import add_line, read_lines
from blocksparse.program import finish, positive

WIDTHS = (4096, 16384, 65536, 262144, 1048576)
WIDTHS_ON_CARD = (16384, 65536, 131072, 262144, 1048576)  # 64M weights do not fit into 4096 x 4096
WARM_UPS = 2
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Has the C library keep what a step frees for the next: new pages took two thirds of a step of 1M features."""
BYTES_OF_DENSE = 16  # of a weight: itself, its gradient, two moments


def measure(options: Options, kind: str, width: int) -> Line:
    """One arm, in this process."""
    import torch

    import blocksparse.torch as bst
    from blocksparse import graphs

    device = torch.device(options.device)
    torch.manual_seed(0)
    x = torch.randn(options.tokens, width, device=device)
    x = (x if options.features_last or kind == "dense" else x.t().contiguous().t()).requires_grad_()
    before = memory(device)
    begin = time.perf_counter()
    if kind == "dense":
        layer: torch.nn.Module = torch.nn.Linear(width, width, bias=False, device=device)
    else:
        density = options.weights / width**2
        layout = graphs.random(width // options.block, density=density, block_size=options.block)
        layer = bst.BlockSparseLinear(width, width, layout, bias=False, device=device)
    made = time.perf_counter() - begin
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    times: dict[str, list[float]] = {"forward": [], "backward": [], "adam": []}

    def clock(name: str, run: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times[name].append(1e3 * (time.perf_counter() - begin))
        return result

    for _ in range(WARM_UPS + options.steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            y = clock("forward", lambda: layer(x))
        dy = torch.ones_like(y)
        clock("backward", lambda y=y, dy=dy: y.backward(dy))  # type: ignore[misc]
        del y, dy
        clock("adam", optimizer.step)
        optimizer.zero_grad()
        x.grad = None
    medians = {name: statistics.median(of[WARM_UPS:]) for name, of in times.items()}
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "kind": kind, "width": width, "weights": sum(p.numel() for p in layer.parameters()), "block": options.block,
        "tokens": options.tokens, "features_last": options.features_last, "ms": sum(medians.values()),
        **{f"{name}_ms": ms for name, ms in medians.items()}, "bytes": memory(device) - before,
        "activation_bytes": x.nbytes, "setup_s": made, "device": card, "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def memory(device: Any) -> int:
    """The most that was in use so far."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_all(options: Options) -> list[Line]:
    """Every arm that the file does not hold yet."""
    path: Path = options.output
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, begin, longest = read_lines(path), time.monotonic(), 0.0
    known = {(line["kind"], line["width"]) for line in lines}
    arms = [("dense", w) for w in options.widths if BYTES_OF_DENSE * w * w <= options.dense_gb * 1e9]
    for kind, width in [*(("sparse", w) for w in options.widths), *arms]:
        if (kind, width) in known:
            continue
        if kind == "sparse" and options.weights > width**2:
            print(f"sparse {width}: skipped, {width} x {width} has fewer than {options.weights} weights", flush=True)
            continue
        start = time.monotonic()
        if start + longest - begin > 60 * options.minutes:
            print(f"{kind} {width} and what follows is left for another run: {options.minutes:g} minutes are over")
            break
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", kind, str(width)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **KEEP_PAGES})
        if done.returncode != 0:
            print(f"{kind} {width}: failed with {done.returncode}", file=sys.stderr)
            continue
        lines.append(json.loads(done.stdout.splitlines()[-1]))
        add_line(path, lines[-1])
        longest = max(longest, time.monotonic() - start)
        print(f"{kind} {width}: {lines[-1]['ms']:.1f} ms, {lines[-1]['bytes'] / 1e6:.0f} MB", flush=True)
    return lines


def picture(lines: list[Line], path: Path) -> None:
    """Time and memory of a step against width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, key, unit, title in zip(figure.subplots(1, 2), ("ms", "bytes"), (1, 1e-9), ("ms", "GB"), strict=True):
        for kind, mark in (("sparse", "o-"), ("dense", "s--")):
            mine = sorted((line for line in lines if line["kind"] == kind), key=lambda line: line["width"])
            if not mine:
                continue
            label = f"block-sparse, {mine[0]['weights'] / 1e6:.0f}M weights" if kind == "sparse" else kind
            axes.plot([line["width"] for line in mine], [line[key] * unit for line in mine], mark, label=label)
        if key == "bytes":
            all_ = sorted({(line["width"], line["activation_bytes"]) for line in lines})
            axes.plot([w for w, _ in all_], [4e-9 * a for _, a in all_], ":", color="grey", label="x, y, dx, dy")
        all_values = [line[key] * unit for line in lines]
        bottom, top = min(all_values) / 3, max(all_values) * 3  # flat is to look flat
        axes.set(xscale="log", yscale="log", xlabel="width", ylabel=f"{title} of a training step", ylim=(bottom, top))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def parse() -> Options:
    """The command line; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", type=positive, help="4M on a CPU, 64M on a card")
    parser.add_argument("--block", type=positive, help="32, 64 on a card")
    parser.add_argument("--tokens", type=positive, help="16 on a CPU, 64 on a card")
    parser.add_argument("--features-last", action="store_true", help="x as [tokens, features] in memory")
    parser.add_argument("--widths", type=positive, nargs="+", help="4096 to 1M in steps of 4; on a card 16384 to 1M")
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--dense-gb", type=float, help="most memory that a dense layer may take: 5, or 60 on a card")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no arm is begun that would end later")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_card = options.device == "cuda"
    fallback: dict[str, tuple[Any, Any]] = {
        "weights": (1 << 22, 1 << 26), "block": (32, 64), "tokens": (16, 64), "widths": (WIDTHS, WIDTHS_ON_CARD),
        "dense_gb": (5, 60),
    }  # fmt: skip
    for name, values in fallback.items():
        if getattr(options, name) is None:
            setattr(options, name, values[on_card])
    return options


def main() -> None:
    """See above."""
    options = parse()
    if options.arm:
        try:
            print(json.dumps(measure(options, options.arm[0], int(options.arm[1]))))
        except KeyboardInterrupt:
            sys.exit(130)  # the process that began this one says what there is to say
        return
    if lines := run_all(options):
        picture(lines, options.output.with_suffix(".png"))


if __name__ == "__main__":
    finish(main, goes_on=True)
