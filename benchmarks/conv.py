"""Block-sparse convolutions beside PyTorch's dense and grouped ones: cuDNN on a card, oneDNN on a CPU.

    python benchmarks/conv.py [--device cuda] [--images 64] [--size 28] [--channels 256] [--kernel 3] [--stride 1]
                              [--block 8 16 32 64 128] [--density 0.5 0.25 0.12] [--groups 4 8] [--order]
                              [--json FILE]

Times are medians of interleaved samples in us, on a card of replays of CUDA graphs with many calls each; tensors are
channels-last, bf16 on a card and f32 on a CPU. `x` is how many times as fast as the dense convolution; with --groups,
block-diagonal layouts beside grouped convolutions; --order shuffles the channels of x for this library alone. Results
are compared with PyTorch's in float64 first. --json adds a line for each pass to a file, and begins a new one with the
machine, the versions, the commit and the date.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import blocksparse.torch as bst
from blocksparse import Layout
from lstm import seconds, use_stream
from machine import header
from records import device

PASSES = ("fprop", "dgrad", "wgrad")
CALLS = 20  # of a graph


class Problem:
    """The tensors of one convolution, and its passes by this library and by PyTorch."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.kernel, self.stride, self.padding = args.kernel, args.stride, args.kernel // 2
        self.channels, self.device, self.json = args.channels, device, args.json
        self.order = torch.randperm(self.channels, device=device).int() if args.order else None
        stride = "" if self.stride == 1 else f" stride={self.stride}"
        self.line = f"n={args.images} hw={args.size} r={self.kernel}{stride}"
        out = (args.size + 2 * self.padding - args.kernel) // args.stride + 1
        self.x, self.dy = (self.images(args.images, size) for size in (args.size, out))

    def images(self, n: int, size: int) -> Tensor:
        """Channels-last."""
        return torch.randn(n, size, size, self.channels, device=self.device).to(self.dtype).movedim(-1, 1)

    def dense(self, groups: int) -> list[Callable[[], Tensor]]:
        """PyTorch's passes."""
        w = torch.randn(self.channels, self.channels // groups, self.kernel, self.kernel, device=self.device)
        w = w.to(self.dtype).contiguous(memory_format=torch.channels_last)
        options = ([self.stride] * 2, [self.padding] * 2, [1, 1], False, [0, 0], groups)

        def backward(mask: list[bool]) -> Tensor:
            grads = torch.ops.aten.convolution_backward(self.dy, self.x, w, None, *options, mask)
            gradient: Tensor = grads[0] if mask[0] else grads[1]
            return gradient

        return [
            lambda: F.conv2d(self.x, w, None, self.stride, self.padding, 1, groups),
            lambda: backward([True, False, False]),
            lambda: backward([False, True, False]),
        ]

    def sparse(self, layout: Layout) -> list[Callable[[], Tensor]]:
        """This library's."""
        taps, b = self.kernel**2, layout.block_size
        values = torch.randn(layout.blocks, taps, b, b, device=self.device).to(self.dtype)
        index = bst.index_of(layout, self.x.device)
        two = [self.kernel] * 2, [self.stride] * 2, [1, 1], [self.padding] * 2, [self.padding] * 2, [0, 0]
        geometry = [0, *(number for pair in two for number in pair)]
        ops, size = torch.ops.blocksparse, list(self.x.shape[2:])
        passes: list[Callable[[], Tensor]] = [
            lambda: ops.conv_fprop(self.x, values, index, geometry, self.channels, True, order=self.order),
            lambda: ops.conv_dgrad(self.dy, values, index, geometry, self.channels, size, True, order=self.order),
            lambda: ops.conv_wgrad(self.x, self.dy, index, geometry, layout.blocks, b, order=self.order)[0],
        ]
        self.check(layout, values, passes)
        return passes

    @torch.enable_grad()
    def check(self, layout: Layout, values: Tensor, passes: Sequence[Callable[[], Tensor]]) -> None:
        """Raises if a result is not PyTorch's in float64."""
        rows, columns = (torch.as_tensor(c, device=self.device).long() for c in layout.coordinates())
        b, blocks = layout.block_size, self.channels // layout.block_size
        w = values.double().requires_grad_()
        filters = torch.zeros(blocks, blocks, *w.shape[1:], device=self.device, dtype=w.dtype)
        filters = filters.index_put((rows, columns), w).permute(0, 3, 1, 4, 2)
        x = self.x.double().requires_grad_()
        dense = filters.reshape(self.channels, self.channels, self.kernel, self.kernel)
        ordered = x if self.order is None else x[:, self.order.long()]
        y = F.conv2d(ordered, dense, None, self.stride, self.padding)
        y.backward(self.dy.double())  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert w.grad is not None
        bound = 1e-2 if self.dtype == torch.bfloat16 else 1e-5
        for name, got, want in zip(PASSES, passes, (y, x.grad, w.grad), strict=True):
            error = ((got() - want).norm() / want.norm()).item()
            if not error < bound:
                raise ValueError(f"{name} of b = {b} is wrong by {error:.1e}")


def prepared(call: Callable[[], Tensor], cuda: bool) -> tuple[Callable[[], None], int]:
    """Something to be timed, and how many calls it is."""

    def once() -> None:
        call()

    once()
    if not cuda:
        return once, 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            call()
    return graph.replay, CALLS


def medians(calls: dict[str, Callable[[], Tensor]], repeats: int, cuda: bool) -> dict[str, float]:
    """Us of each, by interleaved samples."""
    runs = {name: prepared(call, cuda) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, (run, count) in runs.items():
            time = seconds(run, cuda) / count
            if repeat > 0:
                taken[name].append(1e6 * time)
    return {name: statistics.median(times) for name, times in taken.items()}


def begin(path: Path, on_card: bool, samples: int) -> None:
    """Writes the header of a file that is new."""
    if not path.exists() or path.stat().st_size == 0:
        opponents = {"cudnn" if on_card else "onednn": f"{dense_version(on_card)} of PyTorch {torch.__version__}"}
        path.write_text(json.dumps(header(on_card, samples, opponents)) + "\n", encoding="utf-8")


def dense_version(on_card: bool) -> str:
    """Of the dense library that PyTorch has."""
    if on_card:
        return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    built = re.search(r"(?:oneDNN|MKL-DNN) v([\d.]+)", torch.__config__.show())
    return built[1] if built else "unknown"


def write(problem: Problem, which: str, layout: Layout, graph: str, us: dict[str, float], samples: int) -> None:
    """Adds a line to the file of results, in the words of blocksparse-bench."""
    on_card = problem.device == "cuda"
    threads = 0 if on_card else torch.get_num_threads()
    what = f"{'bf16' if problem.dtype == torch.bfloat16 else 'f32'} {problem.line} b={layout.block_size} {graph}"
    what += "" if problem.order is None else " order"
    line = {
        "problem": f"conv:{which} {what}" + (" device=cuda" if on_card else f" threads={threads}" * (threads > 1)),
        "device": f"cuda: {torch.cuda.get_device_name()}" if on_card else device(),
        "out": layout.out_features,
        "in": layout.in_features,
        "density": round(layout.density, 5),
        "threads": threads,
        "samples": samples,
        "us": round(us["ours"], 2),
        "vs": {"cudnn" if on_card else "onednn": round(us["dense"], 2)},
    }
    with problem.json.open("a") as file:
        file.write(json.dumps(line) + "\n")


def compare(problem: Problem, layout: Layout, graph: str, groups: int, repeats: int) -> None:
    """Prints a line."""
    name = f"groups = {groups}" if groups > 1 else f"b = {layout.block_size}, {100 * layout.density:.1f} %"
    cuda = problem.device == "cuda"
    ours, dense = problem.sparse(layout), problem.dense(groups)
    cells = []
    for which, sparse_pass, dense_pass in zip(PASSES, ours, dense, strict=True):
        us = medians({"ours": sparse_pass, "dense": dense_pass}, repeats, cuda)
        if problem.json is not None:
            write(problem, which, layout, graph, us, repeats)
        cells.append(f"{which} {us['ours']:8.1f} ({us['dense'] / us['ours']:5.2f}x of {us['dense']:.1f})")
    print(f"  {name:24} {'  '.join(cells)}", flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--kernel", type=int, default=3)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--block", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--density", type=float, nargs="+", default=[0.5, 0.25, 0.12])
    parser.add_argument("--groups", type=int, nargs="*", default=[], help="beside grouped convolutions instead")
    parser.add_argument("--order", action="store_true", help="of shuffled channels")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    if args.device == "cuda":
        use_stream()
    if args.json is not None:
        begin(args.json, args.device == "cuda", args.repeats)
    problem = Problem(args, args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    shape = f"{args.kernel} x {args.kernel}, stride {args.stride}, x {list(problem.x.shape)}"
    print(f"{shape} {problem.dtype}, {where}: us")
    with torch.no_grad():
        for groups in args.groups:
            graph = f"diagonal({groups})"
            compare(problem, Layout.from_graph(graph, args.channels // groups), graph, groups, args.repeats)
        for b in [] if args.groups else args.block:
            for density in args.density:
                graph = f"random({args.channels // b},{args.channels // b},{density})"
                layout = Layout.from_graph(graph, b, seed=1)
                if layout.blocks > 0:
                    compare(problem, layout, graph, 1, args.repeats)


if __name__ == "__main__":
    main()
