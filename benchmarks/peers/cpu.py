"""Adds the libraries that are called from Python to a file of results: PyTorch's dense and BSR products, SciPy's BSR.

python benchmarks/peers/cpu.py benchmarks/results/2026-11-21-amd-epyc-avx2.jsonl [--filter "n=64"]

For each problem of the file: the same shapes, every result checked against a dense product in float64, then medians of
interleaved samples, weights rotated through as much memory as the file's own were, threads confined to the same
processors. Problems that have their line already are left alone. Blocksparse is called through NumPy (bf16: PyTorch).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
import torch
from scipy.sparse import bsr_array

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse import numpy as bsn

sys.path.insert(0, str(Path(__file__).parents[1]))
from records import Problem, Record, Results, device

BY = "peers/cpu.py"
SAMPLE_US = 2000.0
FEWEST_SAMPLES = 3
TORCH_DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
BOUNDS = {"f32": 1e-5, "f64": 1e-13, "bf16": 1e-2}  # of the relative error
Array = npt.NDArray[Any]


@dataclass
class Contender:
    """A library, ready to do a problem with the i-th copy of its weights."""

    name: str
    run: Callable[[int], Any]
    copies: int = 1


class Data:
    """Operands of a problem, and what is to come out."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.layout = Layout.from_graph(problem.graph, problem.block, seed=problem.seed)
        rng = np.random.default_rng(problem.seed)
        torch_dtype = TORCH_DTYPES[problem.dtype]
        self.dtype = np.dtype(np.float64 if problem.dtype == "f64" else np.float32)

        def normal(*shape: int) -> Array:  # exact in the dtype of the problem
            values = torch.from_numpy(rng.standard_normal(shape)).to(torch_dtype)
            exact: Array = values.to(torch.float64).numpy().astype(self.dtype)
            return exact

        def ordered(matrix: Array, first: bool) -> Array:
            return np.ascontiguousarray(matrix.T).T if first else matrix

        out, in_, n = self.layout.out_features, self.layout.in_features, problem.n
        self.values = normal(*self.layout.values_shape)
        self.x = self.dy = normal(0)
        if problem.direction != "dgrad":
            self.x = ordered(normal(n, in_), problem.x_first)
        if problem.direction != "fprop":  # the input of dgrad is dy, whose order is that of x
            dy_first = problem.x_first if problem.direction == "dgrad" else problem.y_first
            self.dy = ordered(normal(n, out), dy_first)
        self.dense = self.layout.to_dense(self.values)
        wide = [a.astype(np.float64) for a in (self.x, self.dy, self.dense)]
        if problem.direction == "fprop":
            self.expected = wide[0] @ wide[2].T
        elif problem.direction == "dgrad":
            self.expected = wide[1] @ wide[2]
        else:
            self.expected = (wide[1].T @ wide[0]) * self.layout.to_dense(np.ones_like(self.values))

    def tensor(self, array: Array) -> torch.Tensor:
        """In the dtype of the problem, with the same order."""
        return torch.from_numpy(array).to(TORCH_DTYPES[self.problem.dtype])

    @property
    def input(self) -> Array:
        """Of a product with W."""
        return self.x if self.problem.direction == "fprop" else self.dy

    def check(self, result: Any) -> None:
        """Raises ValueError for a wrong result; gradients of W may be dense, and are then right where blocks are."""
        array = result.to(torch.float64).numpy() if isinstance(result, torch.Tensor) else np.asarray(result, np.float64)
        if array.ndim == 3:
            array = self.layout.to_dense(array)
        elif self.problem.direction == "wgrad":
            array = array * self.layout.to_dense(np.ones_like(self.values))
        error = np.linalg.norm(array - self.expected) / np.linalg.norm(self.expected)
        if not error <= BOUNDS[self.problem.dtype]:
            raise ValueError(f"relative error {error:.2g}")


# ---- the contenders: (data, bytes to rotate through) -> Contender


def copies_of(array: Array, rotate: int) -> list[Array]:
    """Copies of the weights that together exceed `rotate` bytes."""
    count = min(max(-(-rotate // max(array.nbytes, 1)), 1), 4096)
    return [array.copy() for _ in range(count)]


def blocksparse_numpy(data: Data, rotate: int) -> Contender:
    """Our own functions on arrays."""
    p, layout = data.problem, data.layout
    if p.dtype not in ("f32", "f64"):
        raise ValueError(f"{p.dtype} through PyTorch only")
    if p.direction == "wgrad":
        dw = np.empty_like(data.values)
        return Contender("", lambda i: bsn.linear_wgrad(data.x, data.dy, layout, out=dw, threads=p.threads))
    out = np.empty_like(data.expected, data.dtype)
    if p.y_first:
        out = np.ascontiguousarray(out.T).T
    op = bsn.linear_fprop if p.direction == "fprop" else bsn.linear_dgrad
    values = copies_of(data.values, rotate)
    return Contender("", lambda i: op(data.input, values[i], layout, out=out, threads=p.threads), len(values))


def blocksparse_torch(data: Data, rotate: int) -> Contender:
    """Our own functions on tensors; each call allocates its result."""
    p, layout = data.problem, data.layout
    if p.direction == "wgrad":
        x, dy = data.tensor(data.x), data.tensor(data.dy)
        return Contender("", lambda i: bst.linear_wgrad([x], [dy], layout))
    if p.y_first != p.x_first:
        raise ValueError("results have the order of their input")
    turned = layout if p.direction == "fprop" else layout.t()
    given = data.tensor(data.input)
    values = [data.tensor(a) for a in copies_of(data.values, rotate)]
    return Contender("", lambda i: bst.linear(given, values[i], turned), len(values))


def torch_dense(data: Data, rotate: int) -> Contender:
    """F.linear and its gradients, by MKL or oneDNN; features-first as a product from the left."""
    p = data.problem
    if p.direction == "wgrad":
        x, dy = data.tensor(data.x), data.tensor(data.dy)
        return Contender("", lambda i: torch.mm(dy.T, x))
    weights = [data.tensor(a) for a in copies_of(data.dense, rotate)]
    return Contender("", product(data.tensor(data.input), weights, p, turn=p.direction == "dgrad"), len(weights))


def product(
    given: torch.Tensor, weights: list[torch.Tensor], p: Problem, *, turn: bool = False
) -> Callable[[int], torch.Tensor]:
    """What a user of PyTorch would write for [n, features] -> [n, features] in the problem's order."""
    if turn:
        weights = [w.T for w in weights]
    if p.y_first:
        return lambda i: torch.mm(weights[i], given.T).T
    return lambda i: torch.nn.functional.linear(given, weights[i])


def sparse_weights(data: Data, rotate: int) -> list[Any]:
    """W, or for dgrad its transpose, as SciPy's BSR; transposed beforehand, untimed."""
    crow, col = data.layout.csr()
    shape = (data.layout.out_features, data.layout.in_features)
    matrix = bsr_array((data.values, col, crow), shape=shape)
    if data.problem.direction == "dgrad":
        matrix = matrix.T.tobsr((data.problem.block, data.problem.block))
        matrix.sort_indices()
    return [bsr_array((v, matrix.indices, matrix.indptr), shape=matrix.shape) for v in copies_of(matrix.data, rotate)]


def scipy_bsr(data: Data, rotate: int) -> Contender:
    """SciPy's BSR times dense, one thread always."""
    p = data.problem
    if p.direction == "wgrad" or p.dtype not in ("f32", "f64"):
        raise ValueError("no weight gradient, f32 and f64 only")
    weights = sparse_weights(data, rotate)
    given = data.input.T
    if p.y_first:
        return Contender("", lambda i: (weights[i] @ given).T, len(weights))
    return Contender("", lambda i: np.ascontiguousarray((weights[i] @ given).T), len(weights))


def torch_bsr(data: Data, rotate: int) -> Contender:
    """PyTorch's BSR tensors, by MKL's sparse products."""
    p = data.problem
    if p.direction == "wgrad":
        raise ValueError("no weight gradient of a BSR tensor")
    weights = []
    for m in sparse_weights(data, rotate):
        indices = torch.from_numpy(m.indptr), torch.from_numpy(m.indices)
        weights.append(torch.sparse_bsr_tensor(*indices, data.tensor(m.data), size=m.shape))
    return Contender("", product(data.tensor(data.input), weights, p), len(weights))


CONTENDERS = (blocksparse_numpy, blocksparse_torch, torch_dense, torch_bsr, scipy_bsr)


# ---- timing


def sample(contender: Contender, calls: int, rotate: bool) -> float:
    """Microseconds a call; one that is not timed goes first."""
    run, copies = contender.run, contender.copies if rotate else 1
    run(0)
    start = time.perf_counter()
    for i in range(calls):
        run((i + 1) % copies)
    return 1e6 * (time.perf_counter() - start) / calls


def time_all(contenders: list[Contender], samples: int, budget_s: float) -> tuple[list[float], list[float], int]:
    """Medians of interleaved samples, cold and hot, and how many there were."""
    calls = []
    for contender in contenders:
        once = sample(contender, 1, False)
        calls.append(int(min(max(SAMPLE_US / max(once, 0.1), 1), 10000)))
    cold: list[list[float]] = []
    hot: list[list[float]] = []
    begin = time.perf_counter()
    while len(cold) < samples and (len(cold) < FEWEST_SAMPLES or time.perf_counter() - begin < budget_s):
        cold.append([sample(c, n, True) for c, n in zip(contenders, calls, strict=True)])
        hot.append([sample(c, n, False) for c, n in zip(contenders, calls, strict=True)])
    return np.median(cold, axis=0).tolist(), np.median(hot, axis=0).tolist(), len(cold)


def confine(processors: list[int], threads: int) -> None:
    """Confines every thread of this process to the first `threads` processors, and libraries to as many threads."""
    torch.set_num_threads(threads)
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), processors[:threads])


def measure(problem: Problem, header: Record, samples: int) -> Record:
    """The line of a problem."""
    confine(header["processors"], problem.threads)
    data = Data(problem)
    contenders, without = [], {}
    for prepare in CONTENDERS:
        try:
            contender = prepare(data, header["rotate_mb"] << 20)
            data.check(contender.run(0))
        except (ValueError, RuntimeError) as error:
            without[prepare.__name__] = str(error).splitlines()[0]
            continue
        contender.name = prepare.__name__
        contenders.append(contender)
    if not contenders:
        raise ValueError(f"nobody can do {problem.line}: {without}")
    cold, hot, taken = time_all(contenders, samples, header["budget_s"])
    times = [{c.name: float(f"{t:.4g}") for c, t in zip(contenders, us, strict=True)} for us in (cold, hot)]
    front = next(name for name in ("blocksparse_numpy", "blocksparse_torch") if name in times[0])
    ours = [t.pop(front) for t in times]
    return {
        "by": BY,
        "problem": problem.line,
        "device": header["device"],
        "threads": problem.threads,
        "front": front,
        "us": ours[0],
        "us_hot": ours[1],
        "samples": taken,
        "vs": times[0],
        "vs_hot": times[1],
        "without": without,
        "versions": {
            "blocksparse": f"{blocksparse.__version__} {blocksparse.cpu_isa()}",
            "torch": torch.__version__,
            "scipy": scipy.__version__,
            "numpy": np.__version__,
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--filter", default="", help="only problems whose line has this regular expression")
    parser.add_argument("--samples", type=int, default=15)
    options = parser.parse_args(arguments)
    try:
        results = Results.read(options.results)
        if results.header["device"] != device():
            raise ValueError(f"{options.results} is of {results.header['device']}, this is {device()}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore", message=".*[Ss]parse")
    lines = [line for line in results.bench if line not in results.python and re.search(options.filter, line)]
    problems = [p for p in map(Problem.parse, lines) if not p.others and not p.out and not p.in_]
    problems = [p for p in problems if p.dtype in TORCH_DTYPES and p.op == "linear"]
    start = time.perf_counter()
    for i, problem in enumerate(problems, 1):
        print(f"{i}/{len(problems)}  {time.perf_counter() - start:.0f} s  {problem.line}", file=sys.stderr)
        with torch.no_grad():
            record = measure(problem, results.header, options.samples)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
