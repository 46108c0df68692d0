"""What the harnesses of Python libraries share: a problem's operands, contenders, medians, and the file of results."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import blocksparse.torch as bst
from blocksparse import Layout

sys.path.insert(0, str(Path(__file__).parents[1]))
from records import Problem, Record, Results

FEWEST_SAMPLES = 3
MOST_COPIES = 4096
TORCH_DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
BOUNDS = {"f32": 1e-5, "f64": 1e-13, "bf16": 1e-2, "f16": 2e-3}  # of the relative error


@dataclass
class Contender:
    """A library, ready to do a problem with the i-th copy of its weights."""

    run: Callable[[int], Any]
    copies: int = 1
    note: str = ""  # what a reader of its time should know
    expected: Tensor | None = None  # of one that does another product of the same size
    name: str = ""
    run_hot: Callable[[int], Any] | None = None  # of one that does it another way where its weights stay in cache


class Data:
    """Operands of a problem, f32 (f64 for f64) but exact in the problem's dtype, and what is to come out."""

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        self.problem = problem
        self.device = device
        self.layout = Layout.from_graph(problem.graph, problem.block, seed=problem.seed)
        self.dtype = torch.float64 if problem.dtype == "f64" else torch.float32
        generator = torch.Generator(device).manual_seed(problem.seed)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(shape, dtype=self.dtype, device=device, generator=generator)
            return values.to(TORCH_DTYPES[problem.dtype]).to(self.dtype)

        def ordered(matrix: Tensor, first: bool) -> Tensor:
            return matrix.T.contiguous().T if first else matrix

        out, in_, n = self.layout.out_features, self.layout.in_features, problem.n
        self.values = normal(*self.layout.values_shape)
        self.x = self.dy = normal(0)
        if problem.direction != "dgrad":
            self.x = ordered(normal(n, in_), problem.x_first)
        if problem.direction != "fprop":  # the input of dgrad is dy, whose order is that of x
            dy_first = problem.x_first if problem.direction == "dgrad" else problem.y_first
            self.dy = ordered(normal(n, out), dy_first)

    @cached_property
    def dense(self) -> Tensor:
        """W [out, in]."""
        return bst.to_dense(self.values, self.layout)

    @cached_property
    def live(self) -> Tensor:
        """1 where W has a block."""
        return bst.to_dense(torch.ones_like(self.values), self.layout)

    @cached_property
    def expected(self) -> Tensor:
        """In f64."""
        if self.problem.direction == "fprop":
            return self.x.double() @ self.dense.double().T
        if self.problem.direction == "dgrad":
            return self.dy.double() @ self.dense.double()
        return (self.dy.double().T @ self.x.double()) * self.live

    @property
    def input(self) -> Tensor:
        """Of a product with W."""
        return self.x if self.problem.direction == "fprop" else self.dy

    def tensor(self, operand: Tensor) -> Tensor:
        """In the dtype of the problem, with the same order."""
        return operand.to(TORCH_DTYPES[self.problem.dtype])

    def blocks(self) -> tuple[Layout, Tensor]:
        """The blocks of W, or for dgrad those of its transpose, sorted by row: transposed beforehand, untimed."""
        if self.problem.direction != "dgrad":
            return self.layout, self.values
        out, in_ = self.layout.coordinates()
        order = np.lexsort((out, in_))
        turned = Layout.from_coordinates(in_[order], out[order], self.layout.grid[::-1], self.layout.block_size)
        return turned, self.values[torch.from_numpy(order).to(self.device)].mT.contiguous()

    def check(self, result: Any, expected: Tensor | None = None) -> None:
        """Raises ValueError for a wrong result; gradients of W may be dense, and are then right where blocks are."""
        tensor = torch.as_tensor(result).double()
        if expected is None:
            expected = self.expected
            if tensor.dim() == 3:
                tensor = bst.to_dense(tensor, self.layout)
            elif self.problem.direction == "wgrad":
                tensor = tensor * self.live
        if tensor.shape != expected.shape:
            raise ValueError(f"a result of shape {tuple(tensor.shape)}, needs {tuple(expected.shape)}")
        error = float((tensor - expected).norm() / expected.norm())
        if not error <= BOUNDS[self.problem.dtype]:
            raise ValueError(f"relative error {error:.2g}")


def copies_of(tensor: Tensor, rotate: int) -> list[Tensor]:
    """Copies of weights that together exceed `rotate` bytes."""
    count = min(max(-(-rotate // max(tensor.nbytes, 1)), 1), MOST_COPIES)
    return [tensor.clone() for _ in range(count)]


def product(given: Tensor, weights: list[Tensor], p: Problem, *, turn: bool = False) -> Callable[[int], Tensor]:
    """What a user of PyTorch would write for [n, features] -> [n, features] in the problem's order."""
    if turn:
        weights = [w.T for w in weights]
    if p.y_first:
        return lambda i: torch.mm(weights[i], given.T).T
    return lambda i: torch.nn.functional.linear(given, weights[i])


# ---- contenders of both devices: (data, bytes to rotate through) -> Contender


def blocksparse_torch(data: Data, rotate: int) -> Contender:
    """Our own functions on tensors; each call allocates its result."""
    p, layout = data.problem, data.layout
    if p.direction == "wgrad":
        x, dy = data.tensor(data.x), data.tensor(data.dy)
        return Contender(lambda i: bst.linear_wgrad([x], [dy], layout))
    if p.y_first != p.x_first:
        raise ValueError("results have the order of their input")
    turned = layout if p.direction == "fprop" else layout.t()
    given = data.tensor(data.input)
    values = copies_of(data.tensor(data.values), rotate)
    return Contender(lambda i: bst.linear(given, values[i], turned), len(values))


def torch_dense(data: Data, rotate: int) -> Contender:
    """F.linear and its gradients; features-first as a product from the left."""
    p = data.problem
    if p.direction == "wgrad":
        x, dy = data.tensor(data.x), data.tensor(data.dy)
        return Contender(lambda i: torch.mm(dy.T, x))
    weights = copies_of(data.tensor(data.dense), rotate)
    return Contender(product(data.tensor(data.input), weights, p, turn=p.direction == "dgrad"), len(weights))


def bsr_weights(data: Data, rotate: int) -> list[Tensor]:
    """W, or for dgrad its transpose, as BSR tensors."""
    if data.problem.direction == "wgrad":
        raise ValueError("no weight gradient of a BSR tensor")
    layout, values = data.blocks()
    return [bst.to_bsr(v, layout) for v in copies_of(data.tensor(values), rotate)]


def torch_bsr(data: Data, rotate: int) -> Contender:
    """PyTorch's BSR tensors as a user gets them: by MKL's sparse products, or on a card by untuned Triton kernels."""
    weights = bsr_weights(data, rotate)
    return Contender(product(data.tensor(data.input), weights, data.problem), len(weights))


# ---- measuring


Prepare = Callable[[Data, int], Contender]


def alive(problem: Problem) -> bool:
    """Whether its device still works: a fault in one library's kernel is the end for all of a process."""
    try:
        if problem.device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def prepare_all(prepares: Sequence[Prepare], data: Data, rotate: int) -> tuple[list[Contender], dict[str, str]]:
    """Those whose results are right, and why not the others."""
    contenders: list[Contender] = []
    without: dict[str, str] = {}
    for prepare in prepares:
        if not alive(data.problem):
            raise RuntimeError(f"the card has failed, at or before {', '.join(without)}")
        try:
            contender = prepare(data, rotate)
            data.check(contender.run(0), contender.expected)
        except Exception as error:  # what libraries raise is theirs to choose
            without[prepare.__name__] = next(iter(str(error).splitlines()), type(error).__name__)
            continue
        contender.name = prepare.__name__
        contenders.append(contender)
    if not contenders:
        raise ValueError(f"nobody can do {data.problem.line}: {without}")
    return contenders, without


def medians(
    samplers: Sequence[tuple[Callable[[], float], Callable[[], float]]], samples: int, budget_s: float
) -> tuple[list[float], list[float], int]:
    """Of interleaved samples of each (cold, hot), and how many there were."""
    cold: list[list[float]] = []
    hot: list[list[float]] = []
    begin = time.perf_counter()
    while len(cold) < samples and (len(cold) < FEWEST_SAMPLES or time.perf_counter() - begin < budget_s):
        cold.append([sampler[0]() for sampler in samplers])
        hot.append([sampler[1]() for sampler in samplers])
    return np.median(cold, axis=0).tolist(), np.median(hot, axis=0).tolist(), len(cold)


def by_name(contenders: list[Contender], us: list[float]) -> dict[str, float]:
    """Four digits of each time."""
    return {c.name: float(f"{t:.4g}") for c, t in zip(contenders, us, strict=True)}


def record_of(
    by: str, header: Record, problem: Problem, fronts: Sequence[str], cold: dict[str, float], hot: dict[str, float]
) -> Record:
    """The line of a problem, as far as devices agree: the first of our own `fronts` that is there, and the others."""
    cold, hot = dict(cold), dict(hot)
    front = next((name for name in fronts if name in cold), None)
    if front is None:
        raise ValueError(f"none of {', '.join(fronts)} does it, so there is nothing to compare with")
    return {
        "by": by,
        "problem": problem.line,
        "device": header["device"],
        "threads": problem.threads,
        "front": front,
        "us": cold.pop(front),
        "us_hot": hot.pop(front),
        "vs": cold,
        "vs_hot": hot,
    }


# ---- the command line


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With the options of all harnesses."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--filter", default="", help="only problems whose line has this regular expression")
    parser.add_argument("--samples", type=int, default=15)
    return parser


def add_to(
    path: Path,
    device: str,
    pattern: str,
    can_do: Callable[[Problem], bool],
    measure: Callable[[Problem, Record], Record],
    more: Sequence[str] = (),
) -> int:
    """Adds the lines that a file of results lacks, and those of `more` problems; the exit status.

    The file has to be of this `device`.
    """
    try:
        results = Results.read(path)
        if results.header["device"] != device:
            raise ValueError(f"{path} is of {results.header['device']}, this is {device}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore", message=".*[Ss]parse")
    lines = [line for line in dict.fromkeys([*results.bench, *more]) if line not in results.python]
    lines = [line for line in lines if re.search(pattern, line)]
    problems = [p for p in map(Problem.parse, lines) if not p.others and not p.out and not p.in_]
    problems = [p for p in problems if p.dtype in TORCH_DTYPES and p.op == "linear" and can_do(p)]
    start = time.perf_counter()
    failures = 0
    for i, problem in enumerate(problems, 1):
        print(f"{i}/{len(problems)}  {time.perf_counter() - start:.0f} s  {problem.line}", file=sys.stderr)
        try:
            with torch.no_grad():
                record = measure(problem, results.header)
        except (ValueError, RuntimeError) as error:
            print(f"{problem.line}: {error}", file=sys.stderr)
            failures += 1
            if not alive(problem):
                print("the card has failed, so this process is of no more use", file=sys.stderr)
                break
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 1 if failures else 0
