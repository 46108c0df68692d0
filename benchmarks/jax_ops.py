"""The ops for JAX beside those for PyTorch: time on the device, and what a call costs.

    python benchmarks/jax_ops.py [--device cuda] [--threads N]

Each front end runs in a process of its own, in turn, three times. Times on the device are those of programs of 20 calls
with weights of their own, divided by 20: one compiled function of JAX, which XLA captures in a command buffer, and one
CUDA graph of PyTorch; on the CPU calls one after the other. The least of 7 means. A call's cost is that of the smallest
layer, compiled, beside `x @ w.T` of JAX.
"""

from __future__ import annotations

import argparse
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


def least(run: Callable[[], object], wait: Callable[[], object], repeats: int) -> float:
    """Microseconds: the least of 7 means."""
    run()
    wait()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        times.append((time.perf_counter() - start) / repeats * 1e6)
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


def with_jax(device: str) -> dict[str, float]:
    """Microseconds of each problem."""
    import jax
    import jax.numpy as jnp

    import blocksparse.jax as bsj

    times: dict[str, float] = {}
    for name, which, (kind, graph, b, n, dtype) in problems(device):
        layout, given, options = arrays(kind, graph, b, n)
        x, dy, w = (jnp.asarray(a, dtype) for a in given)
        ws = [w + i for i in range(CALLS)]
        xs = [x] * CALLS if which != "wgrad" else [x + i for i in range(CALLS)]
        op, tables = getattr(bsj, kind), bsj.tables_of(layout)
        more = options | {"precision": "highest"}

        def one(
            x: Any, w: Any, dy: Any, tables: Any, which: str = which, op: Any = op, more: dict[str, Any] = more
        ) -> Any:
            if which == "fprop":
                return op(x, w, tables, **more)
            of = (lambda v: op(v, w, tables, **more)) if which == "dgrad" else (lambda v: op(x, v, tables, **more))
            return jax.vjp(of, x if which == "dgrad" else w)[1](dy)[0]

        def all_of(xs: Any, ws: Any, dy: Any, tables: Any, one: Any = one) -> Any:
            return [one(x, w, dy, tables) for x, w in zip(xs, ws, strict=True)]

        program, last = jax.jit(all_of), [None]

        def run(program: Any = program, xs: Any = xs, ws: Any = ws, dy: Any = dy, tables: Any = tables) -> None:
            last[0] = program(xs, ws, dy, tables)

        times[name] = least(run, lambda: jax.block_until_ready(last[0]), 20 if device == "cuda" else 3) / CALLS
    layout = Layout.from_graph("random(4,4,0.5)", 16, seed=3)
    x, w = jnp.ones((16, 64)), jnp.ones(layout.values_shape)
    dense, held = jnp.ones((64, 64)), [x]
    sparse_call, dense_call = jax.jit(lambda x, w: bsj.linear(x, w, layout)), jax.jit(lambda x, w: x @ w.T)

    def call(f: Any, w: Any) -> Callable[[], None]:
        def run() -> None:
            held[0] = f(x, w)

        return run

    for name, f, weight in (("call: linear, jit", sparse_call, w), ("call: x @ w.T, jit", dense_call, dense)):
        times[name] = least(call(f, weight), lambda: held[0].block_until_ready(), 1000)
    return times


def with_torch(device: str) -> dict[str, float]:
    """Microseconds of each problem."""
    import torch

    import blocksparse.torch as bst
    from blocksparse.torch.ops import conv as conv_ops
    from blocksparse.torch.ops import linear as linear_ops

    times: dict[str, float] = {}
    for name, which, (kind, graph, b, n, dtype) in problems(device):
        layout, given, _ = arrays(kind, graph, b, n)
        x, dy, w = (torch.from_numpy(a).to(device, getattr(torch, dtype)) for a in given)
        index = bst.index_of(layout, x.device)
        ws, xs = [w + i for i in range(CALLS)], [x + i for i in range(CALLS)]
        blocks, features, inputs = layout.blocks, layout.out_features, layout.in_features
        if kind == "conv2d":
            geometry = bst.conv.make_geometry(2, 3, padding=1)
            xs, dy = [a.permute(0, 3, 1, 2) for a in xs], dy.permute(0, 3, 1, 2)
            size = tuple(xs[0].shape[2:])
            one = {
                "fprop": lambda x, w: conv_ops.fprop(x, w, index, geometry, features, True),
                "dgrad": lambda x, w: conv_ops.dgrad(dy, w, index, geometry, inputs, size, True),
                "wgrad": lambda x, w: conv_ops.wgrad(x, dy, index, geometry, blocks, b),
            }[which]
        else:
            one = {
                "fprop": lambda x, w: linear_ops.linear(x, w, index, None, features),
                "dgrad": lambda x, w: linear_ops.dgrad(dy, w, index, inputs),
                "wgrad": lambda x, w: linear_ops.wgrad(x, dy, index, blocks, b),
            }[which]

        def run(one: Any = one, xs: Any = xs, ws: Any = ws) -> None:
            for x, w in zip(xs, ws, strict=True):
                one(x, w)

        if device == "cuda":
            run()
            torch.cuda.synchronize()
            graph_of_calls = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph_of_calls):
                run()
            times[name] = least(graph_of_calls.replay, torch.cuda.synchronize, 20) / CALLS
        else:
            times[name] = least(run, lambda: None, 3) / CALLS
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
