"""What a call from Python costs: problems so small that there is next to nothing to compute, eagerly, on one thread.

    python benchmarks/calls.py [--device cuda]
    BLOCKSPARSE_TORCH_KERNELS=python python benchmarks/calls.py      with kernels in Python over ctypes

Microseconds a call, the best of 7 times 1000, as a table; on a card until the call is queued. Those of modules without
gradient include torch.no_grad().
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.ops import conv as conv_ops
from blocksparse.torch.ops import linear as linear_ops
from blocksparse.torch.ops import lstm as lstm_ops

Calls = Iterator[tuple[str, Callable[[], object]]]


def microseconds(call: Callable[[], object], device: str) -> float:
    """The best mean of 7."""
    best = float("inf")
    for _ in range(7):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            call()
        best = min(best, (time.perf_counter() - start) * 1e3)
    return best


def passes(name: str, layer: nn.Module, x: Tensor) -> Calls:
    """A module alone, with a graph for its gradients, and with these."""
    y = layer(x)
    wanted, dy = [x, *layer.parameters()], torch.ones_like(y)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    yield f"{name}, no gradient", forward
    yield f"{name}, gradients wanted", lambda: layer(x)
    yield f"{name}, backward", lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)


def linear_calls(layout: Layout, device: str) -> Calls:
    """16 x 16 over 8 tokens."""
    x = torch.randn(8, 16, device=device, requires_grad=True)
    layer, dense = bst.BlockSparseLinear(16, 16, layout, device=device), nn.Linear(16, 16, device=device)
    given = (x.detach(), layer.weight.detach(), layer.tables(x.device), None, 16)
    yield "linear op", lambda: linear_ops.linear(*given)
    beside = (x.detach(), dense.weight.detach())
    yield "F.linear", lambda: nn.functional.linear(*beside)
    yield from passes("BlockSparseLinear", layer, x)
    yield from passes("nn.Linear", dense, x)


def conv_calls(layout: Layout, kernel: int, device: str) -> Calls:
    """16 channels over an image of 4 x 4, channels-last."""
    x = torch.randn(1, 16, 4, 4, device=device).to(memory_format=torch.channels_last)
    dy = torch.ones_like(x)
    layer = bst.BlockSparseConv2d(16, 16, kernel, layout, padding=kernel // 2, device=device)
    dense: Any = nn.Conv2d(16, 16, kernel, padding=kernel // 2, device=device)
    dense.to(memory_format=torch.channels_last)
    w, index, geometry, size = layer.weight.detach(), layer.tables(x.device), layer.geometry, (4, 4)
    name = f"{kernel} x {kernel}"
    yield f"conv_fprop op, {name}", lambda: conv_ops.fprop(x, w, index, geometry, 16, True)
    yield f"conv_dgrad op, {name}", lambda: conv_ops.dgrad(dy, w, index, geometry, 16, size, True)
    yield f"conv_wgrad op, {name}", lambda: conv_ops.wgrad(x, dy, index, geometry, *w.shape[::3])
    x = x.clone().requires_grad_()
    yield from passes(f"BlockSparseConv2d, {name}", layer, x)
    yield from passes(f"nn.Conv2d, {name}", dense, x)


def lstm_calls(layout: Layout, device: str) -> Calls:
    """A step of 16 units."""
    pre, w = (torch.randn(shape, device=device) for shape in ((1, 1, 4, 16), layout.values_shape))
    index = bst.index_of(layout, device)
    y, _, _, gates, cells = lstm_ops.forward(pre, w, index, None, None, None, True)
    saved = (w, index, y, gates, cells, None, None, None)
    yield "lstm_forward op", lambda: lstm_ops.forward(pre, w, index, None, None, None, True)
    yield "lstm_backward op", lambda: lstm_ops.backward(*saved, y, None, None)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device: str = parser.parse_args().device
    torch.set_num_threads(1)
    layout = Layout.from_graph("diagonal(2)", 8)
    kinds = [module.KERNELS if device == "cpu" else module.CUDA_KERNELS for module in (linear_ops, conv_ops, lstm_ops)]
    print(f"torch {torch.__version__}, kernels of the linear op, convolutions, the LSTM: {', '.join(kinds)}\n")
    print("| call | us |\n| --- | --- |")
    for calls in (
        linear_calls(layout, device),
        conv_calls(layout, 1, device),
        conv_calls(layout, 3, device),
        lstm_calls(layout.stack(4), device),
    ):
        for name, call in calls:
            print(f"| {name} | {microseconds(call, device):.1f} |")


if __name__ == "__main__":
    main()
