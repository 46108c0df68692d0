"""The layer norm of recurrent networks, with what follows it in their steps, beside PyTorch's operations.

    python benchmarks/norm.py [--features 1120 5600 18432] [--batch 256] [--dtype float32]
    python benchmarks/norm.py --device cuda --dtype bfloat16

`norm` is F.layer_norm with gain and shift. `* m` is multiplied by a factor behind it, `+ a, relu` has a term added and
goes through relu, `gates` are four norms side by side, each with its own gain and shift. Times are medians of
interleaved runs in us: the forward pass, and the gradients of all inputs. On a card a run is a replay of a CUDA graph
of 20 calls, divided by 20. Gains and shifts are float32 (float64 for float64); F.layer_norm wants them in the dtype of
x, and gets them so.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import blocksparse
from blocksparse.torch.norm import layer_norm
from lstm import seconds, use_stream

EPSILON = 1e-6
CALLS = 20  # in a graph
KINDS = ("norm", "* m", "+ a, relu", "gates")

Run = Callable[[], None]


class Case:
    """Inputs of one kind of norm, ours and PyTorch's way to its result."""

    def __init__(self, kind: str, n: int, features: int, dtype: torch.dtype) -> None:
        groups = 4 if kind == "gates" else 1
        wide = torch.promote_types(dtype, torch.float32)
        self.kind = kind
        self.x, self.m, self.a = (torch.randn(n, groups, features, dtype=dtype, requires_grad=True) for _ in range(3))
        self.gain, self.shift = (torch.randn(groups, features, dtype=wide, requires_grad=True) for _ in range(2))
        self.narrow = [p.detach().to(dtype).requires_grad_() for p in (self.gain, self.shift)]

    def ours(self) -> Tensor:
        """One op."""
        factor = self.m if self.kind == "* m" else None
        term = self.a if self.kind == "+ a, relu" else None
        return layer_norm(self.x, self.gain, self.shift, factor, term, term is not None, EPSILON)

    def torch(self) -> Tensor:
        """F.layer_norm, and an operation for whatever follows."""
        gain, shift = self.narrow
        features = self.x.shape[-1:]
        if self.kind == "gates":
            return torch.addcmul(shift, F.layer_norm(self.x, features, eps=EPSILON), gain)
        y = F.layer_norm(self.x, features, gain[0], shift[0], EPSILON)
        if self.kind == "* m":
            return y * self.m
        return (y + self.a).relu() if self.kind == "+ a, relu" else y

    def inputs(self, ours: bool) -> list[Tensor]:
        """Whose gradients are taken."""
        others = {"* m": [self.m], "+ a, relu": [self.a]}.get(self.kind, [])
        return [self.x, *others, *((self.gain, self.shift) if ours else self.narrow)]

    def passes(self, ours: bool) -> dict[str, Run]:
        """The forward pass without gradients, and the backward pass of one that is kept."""
        make = self.ours if ours else self.torch
        y, inputs = make(), self.inputs(ours)
        dy = torch.randn_like(y)

        def forward() -> None:
            with torch.no_grad():
                make()

        def backward() -> None:
            torch.autograd.grad(y, inputs, dy, retain_graph=True)

        return {"forward": forward, "backward": backward}


def in_a_graph(run: Run) -> Run:
    """A replay of many calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            run()
    return graph.replay


def medians(runs: dict[str, Run], repeats: int, cuda: bool) -> dict[str, float]:
    """Of interleaved runs, in us a call."""
    calls = CALLS if cuda else 1
    runs = {name: in_a_graph(run) for name, run in runs.items()} if cuda else runs
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            taken = seconds(run, cuda)
            if repeat > 0:
                times[name].append(taken)
    return {name: 1e6 * statistics.median(taken) / calls for name, taken in times.items()}


def check(case: Case) -> None:
    """Both ways agree, to the rounding of PyTorch's operations between."""
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(case.x.dtype, 3e-2)
    ours, theirs = case.ours().double(), case.torch().double()
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    if not difference < bound:
        raise ValueError(f"{case.kind}: results differ by {difference:.1e} of their norm, needs less than {bound:.0e}")


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--features", type=int, nargs="+", default=[1120, 5600, 18432])
    parser.add_argument("--batch", type=int, nargs="+", default=[256])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--repeats", type=int, default=51)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    cuda = args.device == "cuda"
    if cuda:
        use_stream()
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads, {blocksparse.cpu_isa()}"
    print(f"torch {torch.__version__}, {args.dtype}, {where}: us a call, and PyTorch's over ours\n")
    print("| n | features | | forward | torch | | backward | torch | |\n" + 9 * "| --- " + "|")
    for n in args.batch:
        for features in args.features:
            for kind in KINDS:
                case = Case(kind, n, features, getattr(torch, args.dtype))
                check(case)
                ways = {"ours": case.passes(True), "torch": case.passes(False)}
                runs = {f"{way} {name}": run for way, passes in ways.items() for name, run in passes.items()}
                us = medians(runs, args.repeats, cuda)
                cells = []
                for name in ("forward", "backward"):
                    ours, theirs = us[f"ours {name}"], us[f"torch {name}"]
                    cells.append(f"{ours:.1f} | {theirs:.1f} | {theirs / ours:.2f}x")
                print(f"| {n} | {features} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
