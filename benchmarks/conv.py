"""Block-sparse convolutions beside PyTorch's dense and grouped ones: cuDNN on a card, oneDNN on a CPU.

    python benchmarks/conv.py [--device cuda] [--images 64] [--size 28] [--channels 256] [--kernel 3] [--stride 1]
                              [--block 8 16 32 64 128] [--density 0.5 0.25 0.12] [--groups 4 8] [--order]
                              [--plain] [--json FILE]
    python benchmarks/conv.py --device cuda --problems benchmarks/problems/conv/small.txt --plain --json FILE

Times are medians of interleaved samples in us, on a card of replays of CUDA graphs with many calls each; tensors are
channels-last, bf16 on a card and f32 on a CPU. `2x of dense` is twice as fast as the dense convolution; with --groups,
block-diagonal layouts beside grouped convolutions; --order shuffles the channels of x for this library alone. Results
are compared with PyTorch's in float64 first. --problems takes the convolutions of a file instead, all passes of each.
--plain also times plain Triton kernels (peers/triton_conv.py), each pass by the shape that is fastest for it. --json
adds a line for each pass to a file, and begins a new one with the machine, the versions, the commit and the date; a
convolution of --problems whose lines are there is left alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import blocksparse.torch as bst
from blocksparse import Layout
from lstm import seconds, use_stream
from machine import header
from records import Problem as Line
from records import Results, device, problems_of

sys.path.append(str(Path(__file__).with_name("peers")))

PASSES = ("fprop", "dgrad", "wgrad")
CALLS = 20  # of a graph
TUNING_SAMPLES = 3  # of the trial of a shape
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of the relative error


@dataclass(frozen=True)
class Setting:
    """What convolutions of one size share."""

    images: int
    size: int
    channels: int
    kernel: int
    stride: int
    order: bool

    @property
    def padding(self) -> int:
        """Keeps the size of images, but for the stride."""
        return self.kernel // 2

    @property
    def line(self) -> str:
        """In the words of blocksparse-bench."""
        stride = "" if self.stride == 1 else f" stride={self.stride}"
        return f"n={self.images} hw={self.size} r={self.kernel}{stride}"


@dataclass(frozen=True)
class Case:
    """A convolution."""

    setting: Setting
    block: int
    graph: str
    seed: int

    @property
    def layout(self) -> Layout:
        """Made anew."""
        return Layout.from_graph(self.graph, self.block, seed=self.seed)

    @property
    def groups(self) -> int:
        """Of the dense convolution beside it: block-diagonal layouts are beside grouped ones."""
        diagonal = re.fullmatch(r"diagonal\((\d+)\)", self.graph)
        return int(diagonal[1]) if diagonal else 1

    def line(self, which: str, device: str, dtype: torch.dtype) -> str:
        """A pass in the words of blocksparse-bench."""
        line = f"conv:{which} {'bf16' if dtype == torch.bfloat16 else 'f32'} {self.setting.line} b={self.block}"
        line += f" {self.graph}" + (f" seed={self.seed}" if self.seed else "") + " order" * self.setting.order
        threads = torch.get_num_threads()
        return line + (" device=cuda" if device == "cuda" else f" threads={threads}" * (threads > 1))


def dtype_on(device: str) -> torch.dtype:
    """Of all tensors."""
    return torch.bfloat16 if device == "cuda" else torch.float32


class Problem:
    """The tensors of one convolution, and its passes by this library and by others."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.setting, self.layout, self.device = case, case.setting, case.layout, device
        self.dtype, channels = dtype_on(device), case.setting.channels
        if self.layout.in_features != channels or self.layout.out_features != channels:
            raise ValueError(f"{case.graph} of b = {case.block} needs as many inputs as outputs")
        kernel, stride, padding = self.setting.kernel, self.setting.stride, self.setting.padding
        self.order = torch.randperm(channels, device=device).int() if self.setting.order else None
        out = (self.setting.size + 2 * padding - kernel) // stride + 1
        self.x, self.dy = (self.images(size) for size in (self.setting.size, out))
        b = self.layout.block_size
        self.values = torch.randn(self.layout.blocks, kernel**2, b, b, device=device).to(self.dtype)

    def images(self, size: int) -> Tensor:
        """Channels-last."""
        shape = self.setting.images, size, size, self.setting.channels
        return torch.randn(shape, device=self.device).to(self.dtype).movedim(-1, 1)

    def dense(self) -> list[Callable[[], Tensor]]:
        """PyTorch's passes."""
        s, groups = self.setting, self.case.groups
        w = torch.randn(s.channels, s.channels // groups, s.kernel, s.kernel, device=self.device)
        w = w.to(self.dtype).contiguous(memory_format=torch.channels_last)
        options = ([s.stride] * 2, [s.padding] * 2, [1, 1], False, [0, 0], groups)

        def backward(mask: list[bool]) -> Tensor:
            grads = torch.ops.aten.convolution_backward(self.dy, self.x, w, None, *options, mask)
            gradient: Tensor = grads[0] if mask[0] else grads[1]
            return gradient

        return [
            lambda: F.conv2d(self.x, w, None, s.stride, s.padding, 1, groups),
            lambda: backward([True, False, False]),
            lambda: backward([False, True, False]),
        ]

    def sparse(self) -> list[Callable[[], Tensor]]:
        """This library's."""
        s, blocks, b = self.setting, self.layout.blocks, self.layout.block_size
        index = bst.index_of(self.layout, self.x.device)
        two = [s.kernel] * 2, [s.stride] * 2, [1, 1], [s.padding] * 2, [s.padding] * 2, [0, 0]
        geometry = [0, *(number for pair in two for number in pair)]
        ops, size, values, order = torch.ops.blocksparse, list(self.x.shape[2:]), self.values, self.order
        return [
            lambda: ops.conv_fprop(self.x, values, index, geometry, s.channels, True, order=order),
            lambda: ops.conv_dgrad(self.dy, values, index, geometry, s.channels, size, True, order=order),
            lambda: ops.conv_wgrad(self.x, self.dy, index, geometry, blocks, b, order=order)[0],
        ]

    def plain(self, which: str) -> list[Any]:
        """The candidates of plain Triton kernels for a pass."""
        if self.order is not None:
            raise ValueError("plain Triton kernels know no order of channels")
        module, s = importlib.import_module("triton_conv"), self.setting
        conv = module.Convolution(self.x, self.dy, self.values, self.layout, s.kernel, s.stride, s.padding)
        found: list[Any] = module.candidates(which, conv)
        return found

    @torch.enable_grad()
    @torch.backends.cudnn.flags(enabled=False)  # which would try its ways of f64 as well
    def expected(self) -> list[Tensor]:
        """PyTorch's results in float64."""
        rows, columns = (torch.as_tensor(c, device=self.device).long() for c in self.layout.coordinates())
        channels, kernel, blocks = self.setting.channels, self.setting.kernel, self.layout.grid[0]
        w = self.values.double().requires_grad_()
        filters = torch.zeros(blocks, blocks, *w.shape[1:], device=self.device, dtype=w.dtype)
        filters = filters.index_put((rows, columns), w).permute(0, 3, 1, 4, 2)
        x = self.x.double().requires_grad_()
        ordered = x if self.order is None else x[:, self.order.long()]
        dense = filters.reshape(channels, channels, kernel, kernel)
        y = F.conv2d(ordered, dense, None, self.setting.stride, self.setting.padding)
        y.backward(self.dy.double())  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert w.grad is not None
        return [y.detach(), x.grad, w.grad]

    def check(self, who: str, got: Tensor, want: Tensor) -> None:
        """Raises ValueError if a result is not what is expected."""
        error = ((got - want).norm() / want.norm()).item()
        if not error < BOUNDS[self.dtype]:
            raise ValueError(f"{who} of b = {self.layout.block_size} is wrong by {error:.1e}")


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


def begin(path: Path, on_card: bool, plain: bool, samples: int) -> None:
    """Writes the header of a file that is new."""
    if not path.exists() or path.stat().st_size == 0:
        opponents = {"cudnn" if on_card else "onednn": f"{dense_version(on_card)} of PyTorch {torch.__version__}"}
        if plain:
            opponents["triton"] = importlib.metadata.version("triton")
        path.write_text(json.dumps(header(on_card, samples, opponents)) + "\n", encoding="utf-8")


def dense_version(on_card: bool) -> str:
    """Of the dense library that PyTorch has."""
    if on_card:
        return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    built = re.search(r"(?:oneDNN|MKL-DNN) v([\d.]+)", torch.__config__.show())
    return built[1] if built else "unknown"


def fastest(problem: Problem, which: str, want: Tensor) -> Any:
    """The candidate of plain Triton kernels that takes the least time. All write to one result, and are checked."""
    too_large = importlib.import_module("triton").OutOfResources
    timed = []
    for candidate in problem.plain(which):
        try:
            candidate.result.fill_(float("nan"))
            problem.check(f"triton_plain {which} {candidate.note}", candidate.run(), want)
        except too_large:  # for the shared memory of this card
            continue
        run, _ = prepared(candidate.run, True)
        timed.append((min(seconds(run, True) for _ in range(TUNING_SAMPLES)), candidate))
    if not timed:
        raise ValueError("no shape fits into the shared memory of this card")
    return min(timed, key=lambda pair: pair[0])[1]


def compile_plain(case: Case) -> None:
    """Into Triton's cache, in a process of its own: threads compile one after the other (Triton 3.6)."""
    problem = Problem(case, "cuda")
    for which in PASSES:
        for candidate in problem.plain(which):
            candidate.compile()


def compile_all(cases: Sequence[Case]) -> None:
    """Kernels depend on images, taps and block size, and hardly on the layout."""
    alike = {(case.setting, case.block): case for case in cases}
    workers = min(len(alike), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_plain, alike.values()))


def write(path: Path, problem: Problem, which: str, us: dict[str, float], note: str, samples: int) -> None:
    """Adds a line to the file of results, in the words of blocksparse-bench."""
    on_card, layout = problem.device == "cuda", problem.layout
    vs = {"cudnn" if on_card else "onednn": round(us["dense"], 2)}
    line = {
        "problem": problem.case.line(which, problem.device, problem.dtype),
        "device": f"cuda: {torch.cuda.get_device_name()}" if on_card else device(),
        "out": layout.out_features,
        "in": layout.in_features,
        "density": round(layout.density, 5),
        "threads": 0 if on_card else torch.get_num_threads(),
        "samples": samples,
        "us": round(us["ours"], 2),
        "vs": vs | ({"triton_plain": round(us["plain"], 2)} if "plain" in us else {}),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | ({"notes": {"triton_plain": note}} if note else {})) + "\n")


def compare(problem: Problem, options: argparse.Namespace) -> str:
    """Times all passes, writes their lines, and returns one for people."""
    cuda, cells = problem.device == "cuda", []
    ways = zip(PASSES, problem.sparse(), problem.dense(), problem.expected(), strict=True)
    for which, sparse_pass, dense_pass, want in ways:
        problem.check(which, sparse_pass(), want)
        calls, note = {"ours": sparse_pass, "dense": dense_pass}, ""
        if options.plain:
            candidate = fastest(problem, which, want)
            calls["plain"], note = candidate.run, candidate.note
        us = medians(calls, options.repeats, cuda)
        if options.json is not None:
            write(options.json, problem, which, us, note, options.repeats)
        others = ", ".join(f"{us[name] / us['ours']:5.2f}x of {name} {us[name]:.1f}" for name in us if name != "ours")
        cells.append(f"{which} {us['ours']:8.1f} ({others})")
    return "  ".join(cells)


def cases_of(path: Path, device: str) -> list[Case]:
    """The convolutions of a file of problems, whatever the passes.

    Raises:
        ValueError: one needs what is not here: another type than the device's, channels-first images, an epilogue.
    """
    cases = []
    for line in problems_of(path):
        p = Line.parse(line)
        words = dict(word.partition("=")[::2] for word in p.others)
        strange = sorted(set(words) - {"hw", "r", "stride", "order"})
        dtype = "bf16" if device == "cuda" else "f32"
        if p.op != "conv" or strange or p.dtype != dtype or not {"hw", "r"} <= set(words):
            unknown = f", not {' '.join(strange)}" if strange else ""
            raise ValueError(f"{line}: needs conv:, {dtype}, hw= and r={unknown}")
        channels = Layout.from_graph(p.graph, p.block, seed=p.seed).in_features
        size, kernel, stride = (int(words.get(key, 1)) for key in ("hw", "r", "stride"))
        setting = Setting(p.n, size, channels, kernel, stride, "order" in words)
        cases.append(Case(setting, p.block, p.graph, p.seed))
    return list(dict.fromkeys(cases))


def cases_by_options(args: argparse.Namespace) -> list[Case]:
    """Random layouts of seed 1, or block-diagonal ones."""
    setting = Setting(args.images, args.size, args.channels, args.kernel, args.stride, args.order)
    if args.groups:
        return [Case(setting, args.channels // groups, f"diagonal({groups})", 0) for groups in args.groups]
    graphs = [(b, args.channels // b, density) for b in args.block for density in args.density]
    return [Case(setting, b, f"random({blocks},{blocks},{density})", 1) for b, blocks, density in graphs]


def is_done(case: Case, path: Path | None, device: str) -> bool:
    """Whether a file of results has all passes."""
    if path is None or not path.exists():
        return False
    return all(case.line(which, device, dtype_on(device)) in Results.read(path).bench for which in PASSES)


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
    parser.add_argument("--problems", type=Path, help="a file of problems, instead of those options")
    parser.add_argument("--plain", action="store_true", help="beside plain Triton kernels, on a card")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.plain and args.device != "cuda":
        parser.error("--plain needs --device cuda")
    try:
        cases = cases_by_options(args) if args.problems is None else cases_of(args.problems, args.device)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.problems is not None:
        cases = [case for case in cases if not is_done(case, args.json, args.device)]
    cases = [case for case in cases if case.layout.blocks > 0]
    torch.backends.cudnn.benchmark = True
    if args.plain:
        compile_all(cases)
    if args.device == "cuda":
        use_stream()
    if args.json is not None:
        begin(args.json, args.device == "cuda", args.plain, args.repeats)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"{dtype_on(args.device)}, {where}: us")
    with torch.no_grad():
        for case in cases:
            text = compare(Problem(case, args.device), args)
            print(f"  {case.setting.channels} {case.setting.line} b={case.block} {case.graph}  {text}", flush=True)


if __name__ == "__main__":
    main()
