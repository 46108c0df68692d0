"""What pruners add to a training step: processor time with and without them.

python benchmarks/pruners.py
python benchmarks/pruners.py --features 4096 --tokens 4096 --device cuda
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import blocksparse.torch.sparsify as bss

ROUNDS, FREQUENCY = 9, 50
SCHEDULE = bss.PolynomialDecay(0.9, 0, 10**6, initial_sparsity=0.89, frequency=FREQUENCY)
KINDS: dict[str, Callable[..., bss.Pruner]] = {
    "MagnitudePruner": bss.MagnitudePruner,
    "MagnitudePruner, regrow=False": lambda *a, **k: bss.MagnitudePruner(*a, regrow=False, **k),
    "GroupLasso": bss.GroupLasso,
    "Blast": bss.Blast,
    "L0": bss.L0,
}


class Step:
    """A layer and its optimizer, with a pruner or without."""

    def __init__(self, kind: Callable[..., bss.Pruner] | None, options: Any) -> None:
        torch.manual_seed(0)
        n = options.features
        model = nn.Sequential(nn.Linear(n, n)).to(options.device)
        self.x = torch.randn(options.tokens, n, device=options.device)
        self.pruner = None if kind is None else kind(SCHEDULE, block_size=options.block_size)
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
        if self.pruner is not None:
            self.pruner.prepare(model)
            groups += [{"params": self.pruner.parameters()}] if isinstance(self.pruner, bss.L0) else []
        self.rounds = 0
        self.model, self.optimizer = model, torch.optim.AdamW(groups, lr=1e-4)
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)

    def seconds(self, acts: bool) -> float:
        """Of one step: processor time of the host, or the card's time."""
        if self.pruner is not None:  # on to a step that acts, or half way to it; not back, for blocks have ages
            self.rounds += not acts
            self.pruner.steps = self.rounds * FREQUENCY - (1 if acts else FREQUENCY // 2)
        if self.x.is_cuda:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        else:
            begin = time.process_time()
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        if self.x.is_cuda:
            torch.cuda.synchronize()
            return time.perf_counter() - begin
        return time.process_time() - begin


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="Times steps of training with and without pruners.")
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps = {name: Step(kind, options) for name, kind in {"no pruner": None, **KINDS}.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(ROUNDS):  # in turn, so that all see the same machine
        for name, step in steps.items():
            times[name].append((step.seconds(acts=False), step.seconds(acts=True)))
    medians = {name: tuple(statistics.median(t) for t in zip(*pairs, strict=True)) for name, pairs in times.items()}
    base = medians["no pruner"][0]
    what = f"{options.features} x {options.features}, {options.tokens} tokens, b = {options.block_size}"
    print(f"| {what} | step, ms | more | step that chooses, ms | more, at every {FREQUENCY} |")
    print("| --- | --- | --- | --- | --- |")
    for name, (plain, acting) in medians.items():
        average = plain + (acting - plain) / FREQUENCY
        print(
            f"| {name} | {plain * 1e3:.1f} | {plain / base - 1:+.1%} | {acting * 1e3:.1f} | {average / base - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
