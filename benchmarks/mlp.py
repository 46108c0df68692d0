"""The feed-forward part of language models: block-sparse beside PyTorch's dense one, eager and compiled.

    python benchmarks/mlp.py [--sizes 512x2048] [--tokens 1 64 1024] [--density 0.1] [--block 32]
    python benchmarks/mlp.py --device cuda --dtype bfloat16 --sizes 4096x14336 8192x28672 --tokens 16 4096 \
        --density 0.05 --block 128

y = W_down (silu(W_gate x) * (W_up x)), or with --plain W_down gelu(W_up x). `ours` is BlockSparseMLP, `separate` three
block-sparse layers of the same blocks with a product of PyTorch between them, `dense` and `compiled` torch.nn.Linear
without and with torch.compile. Inference is the forward pass alone, training forward and backward with the gradients of
x and all weights. Times are medians of interleaved runs. A run calls several MLPs with weights of their own, so many
that they do not stay in the cache, and its time is divided by their number; on a card it is the replay of a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse
import blocksparse.torch as bst
from lstm import seconds, use_stream

COLD_BYTES = 128 << 20  # of block-sparse weights in a run
MOST_COPIES = 8
WAYS = ("ours", "separate", "dense", "compiled")

Run = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A size of MLP and what is asked of it."""

    features: int
    hidden: int
    tokens: int
    density: float
    block: int
    dtype: torch.dtype
    plain: bool

    def layout(self, out: int, in_: int, seed: int) -> blocksparse.Layout:
        """Blocks at random."""
        columns = -(-in_ // self.block)
        name = f"random({-(-out // self.block)},{columns},{self.density})"
        sizes = {"out_features": out, "in_features": in_}
        return blocksparse.Layout.from_graph(name, self.block, seed=seed, **sizes)

    def bytes_of_weights(self) -> float:
        """Of a block-sparse one."""
        return (2 if self.plain else 3) * self.features * self.hidden * self.density * self.dtype.itemsize


class Dense(nn.Module):
    """The dense one."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        options: Any = {"bias": False, "dtype": case.dtype}
        self.plain = case.plain
        self.up = nn.Linear(case.features, case.hidden, **options)
        self.gate = None if case.plain else nn.Linear(case.features, case.hidden, **options)
        self.down = nn.Linear(case.hidden, case.features, **options)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        up = self.up(x)
        hidden = nn.functional.gelu(up) if self.gate is None else nn.functional.silu(self.gate(x)) * up
        y: Tensor = self.down(hidden)
        return y


class Separate(nn.Module):
    """Block-sparse layers of the same blocks, each a launch of its own."""

    def __init__(self, mlp: bst.BlockSparseMLP, layout: blocksparse.Layout) -> None:
        super().__init__()
        weights = mlp.weights()
        options: Any = {"bias": False, "dtype": weights["up"].dtype}
        self.names = ("gate", "up") if mlp.gated else ("up",)
        self.down = mlp.down
        for name in self.names:
            act = mlp.activation if name == self.names[0] else "none"
            layer = bst.BlockSparseLinear(mlp.in_features, mlp.hidden_features, layout, activation=act, **options)
            with torch.no_grad():
                layer.weight.copy_(bst.from_dense(weights[name], layout))
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        parts = [self.get_submodule(name)(x) for name in self.names]
        y: Tensor = self.down(parts[0] * parts[1] if len(parts) == 2 else parts[0])
        return y


def make(case: Case, copies: int) -> dict[str, list[nn.Module]]:
    """Copies of each."""
    layouts = case.layout(case.hidden, case.features, 0), case.layout(case.features, case.hidden, 1)
    options: Any = {"gated": not case.plain, "activation": "gelu" if case.plain else "silu", "dtype": case.dtype}
    ours = [bst.BlockSparseMLP(case.features, case.hidden, *layouts, **options) for _ in range(copies)]
    separate = [Separate(mlp, layouts[0]) for mlp in ours]
    dense = [Dense(case) for _ in range(copies)]
    return {"ours": list(ours), "separate": list(separate), "dense": list(dense), "compiled": list(dense)}


def passes(ways: dict[str, list[nn.Module]], x: Tensor, training: bool, cuda: bool) -> dict[str, Run]:
    """A run of each way, over all copies."""
    dy = torch.randn_like(x)

    def run_of(modules: list[Any], parameters: list[nn.Parameter]) -> Run:
        def forward() -> None:
            with torch.no_grad():
                for module in modules:
                    module(x)

        def both() -> None:
            leaf = x.detach().requires_grad_()
            for module in modules:
                module(leaf).backward(dy)
            for p in parameters:
                p.grad = None

        return both if training else forward

    runs = {}
    for way, modules in ways.items():
        parameters = [p for module in modules for p in module.parameters()]
        called = [torch.compile(module) for module in modules] if way == "compiled" else modules
        run = run_of(called, parameters)
        run()
        runs[way] = in_a_graph(run) if cuda else run
    return runs


def in_a_graph(run: Run) -> Run:
    """A replay of it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run()
    return graph.replay


def check(case: Case, mlp: nn.Module) -> None:
    """Ours computes what dense weights with the same blocks do."""
    assert isinstance(mlp, bst.BlockSparseMLP)
    x = torch.randn(5, case.features, dtype=case.dtype)
    weights = {name: w.double() for name, w in mlp.weights().items()}
    want = bst.dense_mlp(x.double(), weights, mlp.activation)
    with torch.no_grad():
        difference = ((mlp(x).double() - want).norm() / want.norm()).item()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(case.dtype, 2e-2)
    if not difference < bound:
        raise ValueError(f"results differ by {difference:.1e} of their norm, needs less than {bound:.0e}")


def measure(case: Case, training: bool, repeats: int, cuda: bool, ways: tuple[str, ...]) -> dict[str, float]:
    """Milliseconds of each way."""
    copies = min(MOST_COPIES, max(1, math.ceil(COLD_BYTES / case.bytes_of_weights())))
    made = make(case, copies)
    check(case, made["ours"][0])
    x = torch.randn(case.tokens, case.features, dtype=case.dtype)
    runs = passes({way: made[way] for way in ways}, x, training, cuda)
    times: dict[str, list[float]] = {way: [] for way in runs}
    for repeat in range(repeats + 1):
        for way, run in runs.items():
            taken = seconds(run, cuda)
            if repeat > 0:
                times[way].append(taken)
    return {way: 1e3 * statistics.median(taken) / copies for way, taken in times.items()}


def size_of(text: str) -> tuple[int, int]:
    """`4096x14336`."""
    features, _, hidden = text.partition("x")
    if not (features.isdecimal() and hidden.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4096x14336")
    return int(features), int(hidden)


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", type=size_of, nargs="+", default=[(512, 2048)], help="features x hidden ones")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--plain", action="store_true", help="gelu, without a gate")
    parser.add_argument("--passes", nargs="+", choices=["inference", "training"], default=["inference", "training"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", action="store_true", help="lines instead of a table")
    return parser.parse_args()


def main() -> None:
    """Prints a table."""
    args = parse()
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    cuda = args.device == "cuda"
    if cuda:
        use_stream()
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads, {blocksparse.cpu_isa()}"
    head = f"torch {torch.__version__}, {args.dtype}, {where}, density {args.density}, b = {args.block}: ms an MLP"
    print(head, file=sys.stderr if args.json else sys.stdout)
    if not args.json:
        print(f"\n| size | tokens | pass | {' | '.join(args.ways)} | best dense / ours |")
        print((4 + len(args.ways)) * "| --- " + "|")
    for features, hidden in args.sizes:
        for tokens in args.tokens:
            for name in args.passes:
                dtype = getattr(torch, args.dtype)
                case = Case(features, hidden, tokens, args.density, args.block, dtype, args.plain)
                ms = measure(case, name == "training", args.repeats, cuda, tuple(args.ways))
                if args.json:
                    print(json.dumps({**asdict(case), "dtype": args.dtype, "pass": name, "where": where, "ms": ms}))
                    continue
                dense = [ms[way] for way in ("dense", "compiled") if way in ms]
                ratio = f"{min(dense) / ms['ours']:.2f}" if dense and "ours" in ms else ""
                cells = " | ".join(f"{ms[way]:.4f}" for way in args.ways)
                print(f"| {features} x {hidden} | {tokens} | {name} | {cells} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
