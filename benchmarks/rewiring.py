"""What SET and RigL cost a training step: a residual network of block-sparse layers, AdamW.

    python benchmarks/rewiring.py [--width 512] [--layers 3] [--block 16] [--density 0.1] [--tokens 256] [--threads 1]
    python benchmarks/rewiring.py --device cuda --width 4096 --block 64 --tokens 8192

For each method a table's row has, in us and as medians: a training step alone, with the random layout and with the one
that the method has made; what the method adds to the latter while grown blocks are young (their own bias correction),
afterwards, and when it exchanges blocks; and all that it adds over `frequency` steps, in percent of the step. RigL
makes rows of many blocks, whose products take longer: that is the layout's price, and not in the percents. On a card
the steps are replays of CUDA graphs, of bf16 activations; one graph serves steps with and without young blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import blocksparse
import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch.sparsify.optimizer.moments import YOUNG
from lstm import use_stream

Run = Callable[[], object]


class Residual(nn.Module):
    """X + W gelu(LN(x))."""

    def __init__(self, width: int, layout: Layout) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), bst.BlockSparseLinear(width, width, layout)

    def forward(self, x: Tensor) -> Tensor:
        """X [n, width]."""
        y: Tensor = x + self.linear(nn.functional.gelu(self.norm(x)))
        return y


def build(args: argparse.Namespace) -> nn.Sequential:
    """The network."""
    grid = args.width // args.block
    layouts = [
        Layout.from_graph(f"random({grid},{grid},{args.density})", args.block, seed=i) for i in range(args.layers)
    ]
    return nn.Sequential(*(Residual(args.width, layout) for layout in layouts)).to(args.device)


class Case:
    """A network in training, with a method or without one."""

    def __init__(self, args: argparse.Namespace, rewiring: bss.SET | bss.RigL | None) -> None:
        torch.manual_seed(0)
        self.cuda, self.rewiring = args.device == "cuda", rewiring
        self.model = build(args)
        self.x = torch.randn(args.tokens, args.width, device=args.device)
        self.target = torch.randn_like(self.x)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, capturable=self.cuda, fused=self.cuda)
        if rewiring is not None:
            rewiring.prepare(self.model)
            rewiring.attach(self.optimizer, hook=False)

    def train(self) -> None:
        """One step without the method."""
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.cuda):
            loss = (self.model(self.x) - self.target).square().mean()
        loss.backward()
        self.optimizer.step()

    def step(self, acts: bool) -> None:
        """One step with it."""
        if self.rewiring is None:
            self.train()
        elif acts and isinstance(self.rewiring, bss.RigL):
            with self.rewiring.observing():
                self.train()
            self.rewiring.step(acts=True)
        else:
            self.train()
            self.rewiring.step(acts=acts)

    def runs(self) -> list[Run]:
        """A step that does not act, one that does, and one without the method: on a card, replays of them."""
        runs: list[Run] = [lambda: self.step(False), lambda: self.step(True), self.train]
        for _ in range(2):
            for run in runs:
                run()
        if not self.cuda:
            return runs
        replays: list[Run] = []
        for run in runs:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                run()
            replays.append(graph.replay)
        return replays


def microseconds(run: Run, cuda: bool) -> float:
    """Of one call."""
    if cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # of no other programs
    begin = clock()
    run()
    return (clock() - begin) * 1e6


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--frequency", type=int, default=100)
    parser.add_argument("--exchanges", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cuda = args.device == "cuda"
    if cuda:
        use_stream()
    schedule = bss.CosineDrop(end_step=1 << 40, frequency=args.frequency)
    cases = {
        "none": Case(args, None),
        "SET": Case(args, bss.SET(schedule)),
        "RigL, bound": Case(args, bss.RigL(schedule, grow="bound")),
        "RigL, exact": Case(args, bss.RigL(schedule, grow="exact")),
    }
    runs = {name: case.runs() for name, case in cases.items()}
    kinds = ("acts", "young", "old", "alone")
    times: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in runs for kind in kinds}
    for step in range(1, args.exchanges * args.frequency + 1):
        age = step % args.frequency
        kind = "acts" if age == 0 else "young" if age <= YOUNG else "old"
        found = {
            (name, kind): microseconds(acts if age == 0 else quiet, cuda) for name, (quiet, acts, _) in runs.items()
        }
        # After a step of another case, as those above: a cache still holds what the last one used.
        found |= {(name, "alone"): microseconds(alone, cuda) for name, (_, _, alone) in runs.items()}
        if step > args.frequency:  # until there are blocks that were grown
            for key, taken in found.items():
                times[key].append(taken)
    median = {key: statistics.median(values) for key, values in times.items() if values}
    where = torch.cuda.get_device_name() if cuda else f"{args.threads} threads, {blocksparse.cpu_isa()}"
    print(
        f"{args.layers} layers {args.width} x {args.width}, b = {args.block}, density {args.density}, {args.tokens} "
        f"tokens, every {args.frequency} steps, torch {torch.__version__}, {where}\n"
    )
    print("| method | step alone | with its layout | added: young blocks | no young blocks | exchange | in all |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    base, share_young = median["none", "alone"], min(YOUNG, args.frequency - 1) / args.frequency
    for name in list(runs)[1:]:
        alone = median[name, "alone"]
        young, old, acting = (median[name, kind] - alone for kind in ("young", "old", "acts"))
        share = (young * share_young + old * (1 - share_young - 1 / args.frequency) + acting / args.frequency) / alone
        print(f"| {name} | {base:.0f} | {alone:.0f} | {young:.0f} | {old:.0f} | {acting:.0f} | {share:.1%} |")


if __name__ == "__main__":
    main()
