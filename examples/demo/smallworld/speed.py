"""How long things take: whole training steps, and single layers. All on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import blocksparse.torch as bst
from blocksparse import graphs

from .arms import Arm, Settings
from .data import Batches
from .train import Run

WIDTH, TOKENS = 1024, 64  # of the single layers
BLOCKS = (8, 32)
DENSITIES = (0.02, 0.05, 0.1, 0.25, 0.5)

Timed = Mapping[Any, Callable[[], object]]


def medians(timed: Timed, samples: int) -> dict[Any, float]:
    """Median seconds of each function. One sample of each in turn, so that a noisy moment hits all of them alike."""
    taken: dict[Any, list[float]] = {name: [] for name in timed}
    for function in timed.values():
        function()
    for _ in range(samples):
        for name, function in timed.items():
            start = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def step_times(arms: Sequence[Arm], settings: Settings, batches: Batches, samples: int) -> dict[str, float]:
    """Seconds of a training step of each arm: forward, backward and update."""
    runs = {arm.kind.name: Run(arm, settings, samples + 1) for arm in arms}

    def stepper(run: Run) -> Callable[[], None]:
        return lambda: run.step(batches)

    return medians({name: stepper(run) for name, run in runs.items()}, samples)


def speed_ups(samples: int) -> list[list[float]]:
    """How many times faster than torch.nn.functional.linear: rows of (b, density, forward, forward + backward)."""
    x, dy = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, WIDTH)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    timed = _passes("dense", x, weight, dy, functional.linear)
    cases = [(b, density) for b in BLOCKS for density in DENSITIES]
    for b, density in cases:
        layer = _layer(b, density)
        timed |= _passes((b, density), x, layer.weight, dy, _product_of(layer))
    seconds = medians(timed, samples)
    dense = [seconds["dense", which] for which in ("forward", "both")]
    rows = []
    for b, density in cases:
        sparse = [seconds[(b, density), which] for which in ("forward", "both")]
        rows.append([b, density, *(d / s for d, s in zip(dense, sparse, strict=True))])
    return rows


def _layer(b: int, density: float) -> bst.BlockSparseLinear:
    layout = graphs.random(WIDTH // b, density=density, block_size=b, seed=1)
    return bst.BlockSparseLinear(WIDTH, WIDTH, layout, bias=False)


def _product_of(layer: bst.BlockSparseLinear) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: bst.linear(x, weight, layer.layout)


def _passes(
    name: Any, x: Tensor, weight: Tensor, dy: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> dict[Any, Callable[[], object]]:
    def forward() -> Tensor:
        with torch.no_grad():
            return product(x, weight)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(product(x, weight), (x, weight), dy)

    return {(name, "forward"): forward, (name, "both"): both}
