"""The ops for JAX beside those for PyTorch: time on the device, and what a call costs.

    python benchmarks/jax_ops.py [--device cuda] [--threads N]

Each front end runs in a process of its own, in turn, three times. Times on the device are those of programs of 20 calls
with weights of their own, divided by 20: one compiled function of JAX, which XLA captures in a command buffer, and one
CUDA graph of PyTorch. On the CPU they are processor time of all threads, for XLA runs independent calls beside each
other where it can. The least of 7 means. A call's cost is that of the smallest layer, compiled, beside JAX's `x @ w.T`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from blocksparse import Layout

CALLS = 20
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
CONV = [("random(16,16,0.25)", 32, (16, 28), "bfloat16")]  # graph, block size, (images, height and width), dtype
CONV_CPU = [("random(8,8,0.25)", 16, (2, 14), "float32")]


def least(
    run: Callable[[], object],
    wait: Callable[[], object],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
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


def problems(device: str) -> list[tuple[str, str, Any]]:
    """(name, pass, what it is of)."""
    found: list[tuple[str, str, Any]] = []
    for kind, listed in (
        ("linear", LINEAR if device == "cuda" else LINEAR_CPU),
        ("conv2d", CONV if device == "cuda" else CONV_CPU),
    ):
        for graph, b, n, dtype in listed:
            for which in ("fprop", "dgrad", "wgrad"):
                found.append((f"{kind}:{which} {dtype} n={n} b={b} {graph}", which, (kind, graph, b, n, dtype)))
    return found


def arrays(kind: str, graph: str, b: int, n: Any) -> tuple[Layout, list[np.ndarray[Any, Any]], dict[str, Any]]:
    """The layout, x, dy and one set of values; options of the call."""
    layout, rng = Layout.from_graph(graph, b, seed=1), np.random.default_rng(0)
    if kind == "linear":
        shapes: list[tuple[int, ...]] = [(n, layout.in_features), (n, layout.out_features), layout.values_shape]
        options: dict[str, Any] = {}
    else:
        images, size = n
        shapes = [(images, size, size, layout.in_features), (images, size, size, layout.out_features)]
        shapes.append((layout.blocks, 9, b, b))
        options = {"kernel_size": 3, "padding": 1}
    return layout, [rng.standard_normal(s).astype(np.float32) for s in shapes], options


def jax_program(which: str, op: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A compiled function of CALLS calls: (xs, ws, dy, tables) -> results."""
    import jax

    def one(x: Any, w: Any, dy: Any, tables: Any) -> Any:
        if which == "fprop":
            return op(x, w, tables, **options)
        if which == "dgrad":
            return jax.vjp(lambda x: op(x, w, tables, **options), x)[1](dy)[0]
        return jax.vjp(lambda w: op(x, w, tables, **options), w)[1](dy)[0]

    def program(xs: Any, ws: Any, dy: Any, tables: Any) -> Any:
        return [one(x, w, dy, tables) for x, w in zip(xs, ws, strict=True)]

    compiled: Callable[..., Any] = jax.jit(program)
    return compiled


def time_jax(call: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds of what is queued in turn."""
    import jax

    last: list[Any] = [None]

    def run() -> None:
        last[0] = call()

    return least(run, lambda: jax.block_until_ready(last[0]), repeats, clock)


def with_jax(device: str) -> dict[str, float]:
    """Microseconds of each problem, and of the smallest calls."""
    import jax
    import jax.numpy as jnp

    import blocksparse.jax as bsj

    times: dict[str, float] = {}
    for name, which, (kind, graph, b, n, dtype) in problems(device):
        layout, given, options = arrays(kind, graph, b, n)
        x, dy, w = (jnp.asarray(a, dtype) for a in given)
        operands = ([x + i for i in range(CALLS)], [w + i for i in range(CALLS)], dy, bsj.tables_of(layout))
        program = jax_program(which, getattr(bsj, kind), options | {"precision": "highest"})
        call = functools.partial(program, *operands)
        how = (20, time.perf_counter) if device == "cuda" else (3, time.process_time)
        times[name] = time_jax(call, *how) / CALLS
    layout = Layout.from_graph("random(4,4,0.5)", 16, seed=3)
    x, w, dense = jnp.ones((16, 64)), jnp.ones(layout.values_shape), jnp.ones((64, 64))
    sparse_call, dense_call = jax.jit(lambda x, w: bsj.linear(x, w, layout)), jax.jit(lambda x, w: x @ w.T)
    times["call: linear, jit"] = time_jax(lambda: sparse_call(x, w), 1000)
    times["call: x @ w.T, jit"] = time_jax(lambda: dense_call(x, dense), 1000)
    return times


def torch_call(which: str, kind: str, layout: Layout, dy: Any, index: Any) -> Callable[[Any, Any], Any]:
    """One call of an op of PyTorch: (x, w) -> result."""
    import blocksparse.torch as bst
    from blocksparse.torch.ops import conv, linear

    blocks, b, out, in_ = layout.blocks, layout.block_size, layout.out_features, layout.in_features
    if kind == "linear":
        return {
            "fprop": lambda x, w: linear.linear(x, w, index, None, out),
            "dgrad": lambda x, w: linear.dgrad(dy, w, index, in_),
            "wgrad": lambda x, w: linear.wgrad(x, dy, index, blocks, b),
        }[which]
    geometry, size = bst.conv.make_geometry(2, 3, padding=1), tuple(dy.shape[2:])
    return {
        "fprop": lambda x, w: conv.fprop(x, w, index, geometry, out, True),
        "dgrad": lambda x, w: conv.dgrad(dy, w, index, geometry, in_, size, True),
        "wgrad": lambda x, w: conv.wgrad(x, dy, index, geometry, blocks, b),
    }[which]


def with_torch(device: str) -> dict[str, float]:
    """Microseconds of each problem."""
    import torch

    import blocksparse.torch as bst

    times: dict[str, float] = {}
    for name, which, (kind, graph, b, n, dtype) in problems(device):
        layout, given, _ = arrays(kind, graph, b, n)
        x, dy, w = (torch.from_numpy(a).to(device, getattr(torch, dtype)) for a in given)
        pairs = [(x + i, w + i) for i in range(CALLS)]
        if kind == "conv2d":
            pairs, dy = [(x.permute(0, 3, 1, 2), w) for x, w in pairs], dy.permute(0, 3, 1, 2)
        call = torch_call(which, kind, layout, dy, bst.index_of(layout, x.device))
        run = functools.partial(lambda call, pairs: [call(x, w) for x, w in pairs], call, pairs)
        if device == "cuda":
            run()
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
            times[name] = least(captured.replay, torch.cuda.synchronize, 20) / CALLS
        else:
            times[name] = least(run, lambda: None, 3, time.process_time) / CALLS
    return times


def main() -> int:
    """Runs both front ends and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--front-end", choices=["jax", "torch"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.front_end:
        print(json.dumps((with_jax if arguments.front_end == "jax" else with_torch)(arguments.device)))
        return 0
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    if arguments.device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    best: dict[str, dict[str, float]] = {"jax": {}, "torch": {}}
    for _ in range(3):
        for front_end, times in best.items():
            command = [sys.executable, __file__, "--device", arguments.device, "--front-end", front_end]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                times[name] = min(value, times.get(name, value))
    print("| problem | JAX, us | PyTorch, us | ratio |\n| --- | --- | --- | --- |")
    for name, value in best["jax"].items():
        other = best["torch"].get(name)
        beside = f"{other:.1f} | {value / other:.3f}" if other else " | "
        print(f"| {name} | {value:.1f} | {beside} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
