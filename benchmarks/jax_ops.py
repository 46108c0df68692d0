"""The ops for JAX beside those for PyTorch: time of their kernels, time of whole programs, and what a call costs.

    python benchmarks/jax_ops.py [--device cuda] [--threads N] [--no-programs]

On a card there are two times.
- Kernels: how long kernels of one call run, as CUPTI records them, the caches as the call before has left them. The
  median of 60 calls. Both front ends take turns in one process under PyTorch's profiler. Where that does not see JAX's
  kernels, each is in a process under its own profiler, and a message says so. Where the two run different kernels,
  their names stand below the table.
- Programs: wall time of 20 calls with weights of their own, divided by 20, one program after the other: a compiled
  function of JAX, which XLA captures in a command buffer, beside one CUDA graph of PyTorch. What XLA does around a
  kernel is part of it. The least of 7 means, each front end in a process of its own.

On the CPU there are programs alone, by processor time of all threads, since XLA runs independent calls beside each
other. Each front end runs in a process of its own, in turn, three times.

A call's cost is that of the smallest layer, compiled, beside JAX's `x @ w.T`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import device_kernels
from blocksparse import Layout
from blocksparse.interleave import interleaved_layout

CALLS = 20
ROUNDS = 3  # in which both front ends take turns
LINEAR = [  # graph, block size, tokens, dtype
    *(("random(128,128,0.1)", 32, n, "bfloat16") for n in (64, 512, 4096)),
    ("random(64,64,0.1)", 64, 2048, "bfloat16"),
    ("random(32,32,0.1)", 128, 4096, "bfloat16"),
    ("random(128,128,0.1)", 8, 512, "bfloat16"),
    ("random(128,128,0.1)", 32, 512, "float32"),
]
LINEAR_CPU = [
    ("random(32,32,0.1)", 32, 64, "float32"),
    ("random(32,32,0.1)", 32, 512, "float32"),
    ("random(64,64,0.1)", 16, 128, "bfloat16"),
]
GLU = [("random(128,128,0.1)", 32, n, "bfloat16") for n in (64, 4096)]  # the graph is that of gate and of up
GLU_CPU = [("random(32,32,0.1)", 32, 64, "float32")]
CONV = [("random(16,16,0.25)", 32, (16, 28), "bfloat16")]  # graph, block size, (images, height and width), dtype
CONV_CPU = [("random(8,8,0.25)", 16, (2, 14), "float32")]
PASSES = {"linear": ("fprop", "dgrad", "wgrad"), "conv2d": ("fprop", "dgrad", "wgrad"), "glu": ("fprop", "training")}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """One pass of one op. Training is the forward pass and the gradients of x and of the values."""

    kind: str
    which: str
    graph: str
    block: int
    n: Any
    dtype: str

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.kind}:{self.which} {self.dtype} n={self.n} b={self.block} {self.graph}"


def problems(device: str) -> list[Problem]:
    """Those of a kind of device."""
    cuda = device == "cuda"
    listed: list[tuple[str, list[Any]]] = [
        ("linear", LINEAR if cuda else LINEAR_CPU),
        ("glu", GLU if cuda else GLU_CPU),
        ("conv2d", CONV if cuda else CONV_CPU),
    ]
    return [Problem(kind, which, *values) for kind, several in listed for values in several for which in PASSES[kind]]


@functools.lru_cache(maxsize=1)
def arrays(kind: str, graph: str, b: int, n: Any) -> tuple[Layout, list[np.ndarray[Any, Any]]]:
    """The layout, and x, dy and one set of values in float32."""
    layout, rng = Layout.from_graph(graph, b, seed=1), np.random.default_rng(0)
    if kind == "conv2d":
        images, size = n
        shapes: list[tuple[int, ...]] = [(images, size, size, f) for f in (layout.in_features, layout.out_features)]
        shapes.append((layout.blocks, 9, b, b))
    else:
        outputs = layout.out_features
        layout = interleaved_layout(layout) if kind == "glu" else layout
        shapes = [(n, layout.in_features), (n, outputs), layout.values_shape]
    return layout, [rng.random(s, np.float32) - np.float32(0.5) for s in shapes]


def least(run: Call, wait: Call, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds: the least of 7 means."""
    run()
    wait()
    times = []
    for _ in range(7):
        start = clock()
        for _ in range(repeats):
            run()
        wait()
        times.append((clock() - start) / repeats * 1e6)
    return min(times)


# ---- JAX ------------------------------------------------------------------------------------------------------------


class WithJax:
    """A problem as compiled functions of JAX."""

    def __init__(self, problem: Problem, device: str) -> None:
        import jax
        import jax.numpy as jnp

        import blocksparse.jax as bsj

        if device == "cuda" and jax.default_backend() != "gpu":
            raise RuntimeError(f"JAX computes on {jax.default_backend()}, needs a card")
        layout, given = arrays(problem.kind, problem.graph, problem.block, problem.n)
        self.which, self.device, self.tables = problem.which, device, bsj.tables_of(layout)
        self.x, self.dy, self.w = (jnp.asarray(a, problem.dtype) for a in given)
        ops: dict[str, Callable[..., Any]] = {"linear": bsj.linear, "conv2d": bsj.conv2d, "glu": bsj.linear_glu}
        self.options: dict[str, Any] = {"precision": "highest"}
        if problem.kind == "conv2d":
            self.options |= {"kernel_size": 3, "padding": 1}
        elif problem.kind == "glu":
            self.options |= {"hidden_features": self.dy.shape[-1]}
        self.op = ops[problem.kind]

    def one(self, x: Any, w: Any, dy: Any, tables: Any) -> Any:
        """The pass."""
        import jax

        if self.which == "fprop":
            return self.op(x, w, tables, **self.options)
        if self.which == "dgrad":
            return jax.vjp(lambda x: self.op(x, w, tables, **self.options), x)[1](dy)[0]
        if self.which == "wgrad":
            return jax.vjp(lambda w: self.op(x, w, tables, **self.options), w)[1](dy)[0]
        y, back = jax.vjp(lambda x, w: self.op(x, w, tables, **self.options), x, w)
        return y, back(dy)

    def call(self) -> Call:
        """One call that waits for its result."""
        import jax

        compiled = jax.jit(self.one)
        return lambda: jax.block_until_ready(compiled(self.x, self.w, self.dy, self.tables))

    def program(self) -> float:
        """Microseconds of a call in a program of CALLS."""
        import jax

        def calls(xs: Any, ws: Any, dy: Any, tables: Any) -> Any:
            return [self.one(x, w, dy, tables) for x, w in zip(xs, ws, strict=True)]

        xs, ws = [self.x + i for i in range(CALLS)], [self.w + i for i in range(CALLS)]
        run = functools.partial(jax.jit(calls), xs, ws, self.dy, self.tables)
        how = (20, time.perf_counter) if self.device == "cuda" else (3, time.process_time)
        return time_jax(run, *how) / CALLS


def time_jax(call: Call, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds of what is queued in turn."""
    import jax

    last: list[Any] = [None]

    def run() -> None:
        last[0] = call()

    return least(run, lambda: jax.block_until_ready(last[0]), repeats, clock)


def costs_of_calls() -> dict[str, float]:
    """Microseconds of the smallest calls."""
    import jax
    import jax.numpy as jnp

    import blocksparse.jax as bsj

    layout = Layout.from_graph("random(4,4,0.5)", 16, seed=3)
    x, w, dense = jnp.ones((16, 64)), jnp.ones(layout.values_shape), jnp.ones((64, 64))
    sparse_call, dense_call = jax.jit(lambda x, w: bsj.linear(x, w, layout)), jax.jit(lambda x, w: x @ w.T)
    return {
        "call: linear, jit": time_jax(lambda: sparse_call(x, w), 1000),
        "call: x @ w.T, jit": time_jax(lambda: dense_call(x, dense), 1000),
    }


# ---- PyTorch --------------------------------------------------------------------------------------------------------


class WithTorch:
    """A problem as calls of PyTorch's ops."""

    def __init__(self, problem: Problem, device: str) -> None:
        import torch

        self.problem, self.device = problem, device
        self.layout, given = arrays(problem.kind, problem.graph, problem.block, problem.n)
        self.x, self.dy, self.w = (torch.from_numpy(a).to(device, getattr(torch, problem.dtype)) for a in given)
        if problem.kind == "conv2d":
            self.x, self.dy = (a.permute(0, 3, 1, 2) for a in (self.x, self.dy))
        self.one = getattr(self, problem.kind)()[problem.which]

    def linear(self) -> dict[str, Callable[[Any, Any], Any]]:
        """The passes of the linear op: (x, w) -> result."""
        import blocksparse.torch as bst
        from blocksparse.torch.ops import linear

        layout, dy, index = self.layout, self.dy, bst.index_of(self.layout, self.x.device)
        return {
            "fprop": lambda x, w: linear.linear(x, w, index, None, layout.out_features),
            "dgrad": lambda x, w: linear.dgrad(dy, w, index, layout.in_features),
            "wgrad": lambda x, w: linear.wgrad(x, dy, index, layout.blocks, layout.block_size),
        }

    def conv2d(self) -> dict[str, Callable[[Any, Any], Any]]:
        """The passes of the convolution."""
        import blocksparse.torch as bst
        from blocksparse.torch.ops import conv

        layout, dy, index = self.layout, self.dy, bst.index_of(self.layout, self.x.device)
        geometry, size = bst.conv.make_geometry(2, 3, padding=1), tuple(dy.shape[2:])
        return {
            "fprop": lambda x, w: conv.fprop(x, w, index, geometry, layout.out_features, True),
            "dgrad": lambda x, w: conv.dgrad(dy, w, index, geometry, layout.in_features, size, True),
            "wgrad": lambda x, w: conv.wgrad(x, dy, index, geometry, layout.blocks, layout.block_size),
        }

    def glu(self) -> dict[str, Callable[[Any, Any], Any]]:
        """The passes of the gated linear unit."""
        import torch

        import blocksparse.torch as bst

        layout, dy, hidden = self.layout, self.dy, self.dy.shape[-1]

        def training(x: Any, w: Any) -> Any:
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            y = bst.linear_glu(x, w, layout, hidden)
            return y, torch.autograd.grad(y, [x, w], dy)

        return {"fprop": lambda x, w: bst.linear_glu(x, w, layout, hidden), "training": training}

    def call(self) -> Call:
        """One call that waits for its result."""
        import torch

        def run() -> None:
            self.one(self.x, self.w)
            torch.cuda.synchronize()

        return run

    def program(self) -> float:
        """Microseconds of a call in a program of CALLS."""
        import torch

        pairs = [(self.x + i, self.w + i) for i in range(CALLS)]

        def run() -> list[Any]:
            return [self.one(x, w) for x, w in pairs]

        if self.device != "cuda":
            return least(run, lambda: None, 3, time.process_time) / CALLS
        run()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        return least(captured.replay, torch.cuda.synchronize, 20) / CALLS


FRONT_ENDS: dict[str, Any] = {"jax": WithJax, "torch": WithTorch}


# ---- Processes that measure -----------------------------------------------------------------------------------------


def time_of_kernels(problem: Problem, front_ends: list[str], profiler: str) -> dict[str, Any]:
    """Microseconds and names of the kernels of a call with each front end."""
    calls = {name: FRONT_ENDS[name](problem, "cuda").call() for name in front_ends}
    found = {name: device_kernels.Calls() for name in front_ends}
    with device_kernels.PROFILERS[profiler]():  # compiles, and lets the profiler begin; what it sees is dropped
        for call in calls.values():
            for _ in range(3):
                call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            device_kernels.record(profiler, call, found[name])
    return {name: (calls.median(), calls.names) for name, calls in found.items()}


def measure(options: argparse.Namespace) -> int:
    """What a process of its own does: one line of JSON for each problem from the first on. It ends at a failure."""
    front_ends = options.measure.split(",")
    for problem in problems(options.device)[options.first :]:
        try:
            if options.profiler:
                found = time_of_kernels(problem, front_ends, options.profiler)
            else:
                found = {name: (FRONT_ENDS[name](problem, options.device).program(), []) for name in front_ends}
        except Exception:
            traceback.print_exc()
            return 1
        print(json.dumps([problem.name, found]), flush=True)
    if not options.profiler and "jax" in front_ends:
        for name, value in costs_of_calls().items():
            print(json.dumps([name, {"jax": (value, [])}]), flush=True)
    return 0


Found = dict[str, dict[str, Any]]  # name of a problem -> front end -> (microseconds, names of kernels)


def lines_of(options: argparse.Namespace, front_ends: str, profiler: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """What a process measures. One that fails goes on behind the problem at which it has failed, thrice at most."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if options.device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, __file__, "--device", options.device, "--measure", front_ends, "--profiler", profiler]
    first, failures = 0, 0
    while first < len(problems(options.device)) and failures < 3:
        given = [*command, "--first", str(first)]
        with subprocess.Popen(given, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("["):
                    name, found = json.loads(line)
                    print(name, *(f"{key} {value[0]:.2f}" for key, value in found.items()), file=sys.stderr)
                    yield name, found
                    first += 1
        if process.returncode == 0:
            return
        print(f"{front_ends}: the process has ended with {process.returncode}", file=sys.stderr)
        first, failures = first + 1, failures + 1


def kernels_on_a_card(options: argparse.Namespace) -> Found:
    """Of both front ends, in one process if that can be."""
    found: Found = dict(lines_of(options, "jax,torch", "torch"))
    if found:
        return found
    print(
        "PyTorch's profiler has not recorded both front ends in one process: each in a process of its own, by its own "
        "profiler, which may write one kernel's name differently",
        file=sys.stderr,
    )
    for front_end in ("jax", "torch"):
        for name, times in lines_of(options, front_end, front_end):
            found.setdefault(name, {}).update(times)
    return found


def programs(options: argparse.Namespace, rounds: int) -> Found:
    """The least of some rounds."""
    best: Found = {}
    for _ in range(rounds):
        for front_end in FRONT_ENDS:
            for name, times in lines_of(options, front_end):
                of_this = best.setdefault(name, {})
                of_this[front_end] = min(times[front_end], of_this.get(front_end, times[front_end]))
    return best


def columns(found: dict[str, Any], digits: int) -> str:
    """JAX, PyTorch and their ratio."""
    times = [found[front_end][0] if front_end in found else None for front_end in ("jax", "torch")]
    ratio = f"{times[0] / times[1]:.3f}" if times[0] and times[1] else ""
    return " | ".join(["" if t is None else f"{t:.{digits}f}" for t in times] + [ratio])


def print_table(titles: str, parts: list[Found]) -> None:
    """One row for each problem that any part has."""
    print(f"| problem | {titles} |\n| --- |{' ---: |' * (titles.count('|') + 1)}")
    for name in dict.fromkeys(name for part in parts for name in part):
        print(f"| {name} | {' | '.join(columns(part.get(name, {}), 2) for part in parts)} |")


def print_names(kernels: Found) -> None:
    """Of kernels, where the front ends have run different ones."""
    for name, found in kernels.items():
        names = {front_end: of_call for front_end, (_, of_call) in found.items()}
        if len(names) == 2 and names["jax"] != names["torch"]:
            print(f"\n{name}")
            for front_end, of_call in names.items():
                print(*(f"    {front_end:<6} {kernel}" for kernel in of_call), sep="\n")


def main() -> int:
    """Runs both front ends and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--no-programs", action="store_true", help="kernels alone")
    for hidden in ("--measure", "--profiler"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options)
    three = "{0}, JAX, us | {0}, PyTorch, us | ratio"
    if options.device == "cpu":
        print_table(three.format("processor time of a call"), [programs(options, ROUNDS)])
        return 0
    kernels = kernels_on_a_card(options)
    titles = three.format("kernels of a call")
    if options.no_programs:
        print_table(titles, [kernels])
    else:
        print_table(f"{titles} | {three.format('program of 20, wall time of one')}", [kernels, programs(options, 1)])
    print_names(kernels)
    return 0 if all(len(kernels.get(problem.name, {})) == 2 for problem in problems(options.device)) else 1


if __name__ == "__main__":
    sys.exit(main())
