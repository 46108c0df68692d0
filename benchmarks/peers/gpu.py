"""Adds what PyTorch and its companions do on a card to a file of results of blocksparse-bench --device cuda.

python benchmarks/peers/gpu.py benchmarks/results/2026-11-21-nvidia-h200.jsonl [--filter "n=32 "] [--tune]
python benchmarks/peers/gpu.py RESULTS.jsonl --problems benchmarks/problems/plain/cuda.txt

Dense products, plain Triton kernels of our own, BSR tensors (as a user gets them; with --tune also after PyTorch's own
tuner), torchao's kernel, STK, 2:4 sparsity beside layouts of half the blocks, batched and grouped products beside
block-diagonal ones. For each problem of the file, and with --problems of another: results checked against a dense
product in float64, then medians of interleaved samples of GPU time, by events around replays of CUDA graphs (or around
plain launches, which the line then says), weights rotated through as much memory as the file's own were, or always the
same; and `us_eager`, the time of a call from Python. Packages that are missing are said once. Problems that have their
line already are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    Contender,
    Data,
    Prepare,
    add_to,
    blocksparse_torch,
    bsr_weights,
    by_name,
    copies_of,
    medians,
    parser_of,
    prepare_all,
    record_of,
    torch_bsr,
    torch_dense,
)
from torch import Tensor

import blocksparse
import machine
from records import Problem, Record, problems_of

BY = "peers/gpu.py"
REPLAY_US, LONG_US = 500.0, 20e3  # a replay takes so long at least; and at most, if that leaves 4 launches
MOST_LAUNCHES = 1024
TUNING_US, TUNING_SAMPLES, FINALISTS = 100.0, 3, 3  # of the trial of a shape; how many are tried from memory as well
EAGER_CALLS = 20


# ---- the contenders


def bsr_call(
    data: Data, weights: list[Tensor], kernel: Callable[..., Tensor], **options: Any
) -> Callable[[int], Tensor]:
    """y^T = W x^T by a function with the signature of PyTorch's bsr_dense_addmm."""
    given = data.tensor(data.input).T
    out = given.new_empty(weights[0].shape[0], given.shape[1])
    return lambda i: kernel(out, weights[i], given, beta=0, alpha=1, out=out, **options).T


def torch_bsr_tuned(data: Data, rotate: int) -> Contender:
    """PyTorch's Triton kernel with the parameters that its tuner finds for this problem."""
    meta_module = importlib.import_module("torch.sparse._triton_ops_meta")
    kernel = importlib.import_module("torch.sparse._triton_ops").bsr_dense_addmm
    weights = bsr_weights(data, rotate)
    given = data.tensor(data.input).T
    out = given.new_empty(weights[0].shape[0], given.shape[1])
    with short_timings():
        meta = meta_module.tune_bsr_dense_addmm(out, weights[0], given, beta=0, alpha=1)
    return Contender(bsr_call(data, weights, kernel, meta=meta), len(weights), f"tuned: {meta}")


@contextlib.contextmanager
def short_timings() -> Iterator[None]:
    """The tuner times each of dozens of settings for 0.6 s; 0.05 s will do."""
    testing: Any = importlib.import_module("triton.testing")
    usual = testing.do_bench
    testing.do_bench = lambda f, warmup=0, rep=0, **others: usual(f, warmup=10, rep=40, **others)
    try:
        yield
    finally:
        testing.do_bench = usual


def torchao_bsr(data: Data, rotate: int) -> Contender:
    """torchao's version of the same kernel, with its defaults: nothing is tuned for the problem."""
    weights = bsr_weights(data, rotate)
    kernel = importlib.import_module("torchao.kernel.bsr_triton_ops").bsr_dense_addmm
    return Contender(bsr_call(data, weights, kernel), len(weights))


def triton_plain(data: Data, rotate: int) -> Contender:
    """Kernels of 20 lines, each problem by the shape that is fastest for it: one from memory, another in cache."""
    shapes = importlib.import_module("triton_plain").candidates(data, rotate)
    too_large = importlib.import_module("triton").OutOfResources
    in_cache: list[tuple[float, Contender]] = []
    for shape in shapes:
        try:
            shape.run(0).fill_(float("nan"))  # all write to one result
            data.check(shape.run(0))
        except too_large:  # for the shared memory of this card
            continue
        in_cache.append((tuning_us(shape, False), shape))
    if not in_cache:
        raise ValueError("no shape fits into the shared memory of this card")
    finalists = [shape for _, shape in sorted(in_cache, key=lambda timed: timed[0])[:FINALISTS]]
    hot, cold = finalists[0], min(finalists, key=lambda shape: tuning_us(shape, True))
    return Contender(cold.run, cold.copies, f"{cold.note}, in cache {hot.note}", run_hot=hot.run)


def stk(data: Data, rotate: int) -> Contender:
    """STK's block-sparse products, of f16 and blocks of 128."""
    p, layout = data.problem, data.layout
    if p.dtype != "f16" or p.block != 128 or p.n % 128 != 0 or p.x_first or p.y_first:
        raise ValueError("f16, blocks of 128, multiples of 128 tokens, features-last only")
    package = importlib.import_module("stk")
    (crow, _), (row, col) = layout.csr(), layout.coordinates()
    offsets = torch.from_numpy(crow).to(data.device, torch.int32)
    row_indices, column_indices = (torch.from_numpy(a).to(data.device, torch.int16) for a in (row, col))

    def matrix(values: Tensor) -> Any:
        size = (layout.out_features, layout.in_features)
        return package.Matrix(size, values, row_indices, column_indices, offsets)

    if p.direction == "wgrad":
        topology, dy_t, x = matrix(data.tensor(data.values)), data.tensor(data.dy).T, data.tensor(data.x)
        return Contender(lambda i: package.ops.sdd(dy_t, x, topology).data)
    given = data.tensor(data.input)
    weights = [matrix(v) for v in copies_of(data.tensor(data.values), rotate)]
    if p.direction == "fprop":
        weights = [w.t() for w in weights]
    return Contender(lambda i: package.ops.dds(given, weights[i]), len(weights))


def groups_of(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """(x, dy, W) of a block-diagonal problem as [groups, n, b] views and [groups, b, b].

    Raises:
        ValueError: it is none.
    """
    p, layout = data.problem, data.layout
    row, col = layout.coordinates()
    if layout.blocks != layout.grid[0] or layout.grid[0] != layout.grid[1] or (row != col).any():
        raise ValueError("block-diagonal layouts only")
    if p.x_first or p.y_first:
        raise ValueError("features-last only")

    def grouped(x: Tensor) -> Tensor:
        return x.view(p.n, layout.blocks, p.block).transpose(0, 1) if x.numel() else x

    return grouped(data.tensor(data.x)), grouped(data.tensor(data.dy)), data.tensor(data.values)


def grouped_product(data: Data, rotate: int, multiply: Callable[[Tensor, Tensor], Tensor]) -> Contender:
    """A block-diagonal problem by a product of [groups, m, k] and [groups, k, n]."""
    x, dy, values = groups_of(data)
    if data.problem.direction == "wgrad":
        return Contender(lambda i: multiply(dy.mT, x))
    weights = copies_of(values, rotate)
    if data.problem.direction == "fprop":
        given, weights = x, [w.mT for w in weights]
    else:
        given = dy
    n = data.problem.n
    # Its result lies group by group; only the check reorders it.
    contender = Contender(lambda i: multiply(given, weights[i]), len(weights), "its result lies group by group")
    contender.expected = data.expected.view(n, given.shape[0], -1).transpose(0, 1)
    return contender


def torch_bmm(data: Data, rotate: int) -> Contender:
    """Block-diagonal layouts as a batched product."""
    return grouped_product(data, rotate, torch.bmm)


def torch_grouped_mm(data: Data, rotate: int) -> Contender:
    """Block-diagonal layouts as PyTorch's grouped product."""
    if data.problem.dtype != "bf16":
        raise ValueError("bf16 only")
    return grouped_product(data, rotate, getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm)


def torch_2_4(data: Data, rotate: int) -> Contender:
    """Another matrix of half the weights: two of every four, by cuSPARSELt or CUTLASS."""
    p = data.problem
    if p.direction != "fprop" or p.dtype not in ("f16", "bf16") or p.y_first:
        raise ValueError("fprop of f16 and bf16 alone, features-last")
    if not 0.45 <= data.layout.density <= 0.55:
        raise ValueError("layouts of half the blocks only")
    shape = (data.layout.out_features, data.layout.in_features)
    generator = torch.Generator(data.device).manual_seed(p.seed)
    dense = data.tensor(torch.randn(shape, dtype=data.dtype, device=data.device, generator=generator))
    dense = dense * torch.tensor([1, 0, 0, 1], dtype=dense.dtype, device=data.device).repeat(shape[1] // 4)
    weights = [torch.sparse.to_sparse_semi_structured(w) for w in copies_of(dense, 2 * rotate)]
    given = data.tensor(data.input)
    contender = Contender(lambda i: torch.nn.functional.linear(given, weights[i]), len(weights))
    contender.note = f"two of every four weights, by {type(weights[0]).__name__}"
    contender.expected = given.double() @ dense.double().T
    return contender


CONTENDERS: tuple[Prepare, ...] = (
    blocksparse_torch,
    torch_dense,
    torch_bsr,
    torch_bsr_tuned,
    torchao_bsr,
    triton_plain,
    stk,
    torch_bmm,
    torch_grouped_mm,
    torch_2_4,
)
NEEDS = {
    torch_bsr_tuned: "triton",
    torchao_bsr: "torchao.kernel.bsr_triton_ops",
    triton_plain: "triton",
    stk: "stk",
}


def available(*, tune: bool, unwanted: Sequence[str] = ()) -> list[Prepare]:
    """The contenders whose packages are there; says which are not."""
    chosen = []
    for prepare in CONTENDERS:
        if prepare.__name__ in unwanted or (prepare is torch_bsr_tuned and not tune):
            continue
        try:
            if prepare in NEEDS:
                importlib.import_module(NEEDS[prepare])
        except Exception as error:  # a package may fail in its own ways
            print(f"without {prepare.__name__}: {error}", file=sys.stderr)
            continue
        chosen.append(prepare)
    return chosen


# ---- timing


def launch_us(launch: Callable[[], object]) -> float:
    """GPU time of what is launched."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))


def launches_of(us: float, copies: int, replay_us: float = REPLAY_US) -> int:
    """Enough that the events' own time is lost, and each copy has its turn, but not for very long."""
    enough = min(max(replay_us / us, 4.0), float(MOST_LAUNCHES))
    return int(min(max(enough, float(copies)), max(LONG_US / us, 4.0)))


def sampler_of(contender: Contender, rotate: bool, replay_us: float = REPLAY_US) -> tuple[Callable[[], float], bool]:
    """What takes a sample, in us a call, and whether a graph holds the calls."""
    copies = contender.copies if rotate else 1
    run = contender.run if rotate else contender.run_hot or contender.run
    run(0)

    def launch(launches: int) -> None:
        for i in range(launches):
            run(i % copies)

    us = launch_us(functools.partial(launch, 3)) / 3
    for _ in range(2):  # Python's own time, which launches take and a replay does not, would leave it too short
        launches = launches_of(max(us, 0.5), copies, replay_us)
        replay, captured = recorded(functools.partial(launch, launches))
        us = launch_us(replay) / launches
    return (lambda: launch_us(replay) / launches), captured


def recorded(launch: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """What launches it again, by a graph if one can hold it, and whether one does; already done once."""
    replay, captured = launch, False
    with contextlib.suppress(Exception):  # not everything can be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        replay, captured = graph.replay, True
    torch.cuda.synchronize()
    launch_us(replay)
    return replay, captured


def tuning_us(shape: Contender, rotate: bool) -> float:
    """Of one shape of a kernel beside others: the least of a few short samples."""
    sample, _ = sampler_of(shape, rotate, TUNING_US)
    return min(sample() for _ in range(TUNING_SAMPLES))


def eager_us(contender: Contender) -> float:
    """Wall time of a call from Python, the median of some."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(EAGER_CALLS):
            contender.run(0)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / EAGER_CALLS)
    return statistics.median(times)


def measure(problem: Problem, header: Record, prepares: list[Prepare], samples: int, device: str = "cuda") -> Record:
    """The line of a problem."""
    data = Data(problem, device)
    contenders, without = prepare_all(prepares, data, header["rotate_mb"] << 20)
    samplers = []
    for contender in contenders:
        (cold, captured), (hot, _) = sampler_of(contender, True), sampler_of(contender, False)
        samplers.append((cold, hot))
        if not captured:
            contender.note += (", " if contender.note else "") + "plain launches: no graph holds it"
    cold_us, hot_us, taken = medians(samplers, samples, header["budget_s"])
    times = by_name(contenders, cold_us), by_name(contenders, hot_us)
    return {
        **record_of(BY, header, problem, ("blocksparse_torch",), *times),
        "out": data.layout.out_features,
        "in": data.layout.in_features,
        "density": round(data.layout.density, 5),
        "us_eager": by_name(contenders, [eager_us(c) for c in contenders]),
        "samples": taken,
        "without": without,
        "notes": {c.name: c.note for c in contenders if c.note},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of the packages that are there."""
    found = {"blocksparse": blocksparse.__version__, "torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    for package in ("triton", "torchao", "stanford-stk", "nvidia-cusparselt-cu13", "nvidia-cusparselt-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def begin(path: Path, samples: int) -> None:
    """A file of results without lines of blocksparse-bench, if there is none."""
    if not path.exists():
        limits = {"budget_s": 1, "rotate_mb": 256}
        opponents = {name: version for name, version in versions().items() if name not in ("blocksparse", "CUDA")}
        path.write_text(json.dumps(machine.header(True, samples, opponents) | limits) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tune", action="store_true", help="also PyTorch's BSR kernel as tuned: a minute a problem")
    parser.add_argument(
        "--problems", type=Path, help="times those of this file too; begins the results if they are not there"
    )
    parser.add_argument("--without", default="", help="names of contenders, as in the file, that are left out")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or blocksparse.cuda_status():
        print(blocksparse.cuda_status() or "PyTorch sees no CUDA device", file=sys.stderr)
        return 1
    prepares = available(tune=options.tune, unwanted=options.without.split(","))
    more = []
    try:
        if options.problems:
            more = [line if "device=cuda" in line else f"{line} device=cuda" for line in problems_of(options.problems)]
            begin(options.results, options.samples)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return add_to(
        options.results,
        f"cuda: {torch.cuda.get_device_name(0)}",
        options.filter,
        lambda p: p.device == "cuda" and (p.direction == "wgrad" or p.x_first == p.y_first),
        lambda problem, header: measure(problem, header, prepares, options.samples),
        more,
    )


if __name__ == "__main__":
    sys.exit(main())
