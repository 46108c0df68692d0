"""The deep-update LSTM: block-sparse beside dense of equal parameters and of equal width.

    python benchmarks/deep_update.py [--hidden 5600] [--density 0.04] [--narrow 1120] [--batch 256] [--steps 8]
    python benchmarks/deep_update.py --hidden 18432 --block 64 --graph "ba(288,3,blocks=2448)" --narrow 3168 --no-wide
    python benchmarks/deep_update.py --device cpu --hidden 896 --block 8 --density 0.05 --narrow 200 --batch 64

Times are medians of interleaved runs, in us a step: on a card of replays of CUDA graphs, of bf16 parameters and
activations; on the CPU in f32. `torch` is the same network with PyTorch's operations between its matrices. `--out`
appends a line of JSON for each pass.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.deep_update import EPSILON
from blocksparse.torch.lstm import cell, start_of
from blocksparse.torch.recurrent import SharedWeight
from lstm import call, captured, seconds, use_stream

Layer = Callable[[Tensor], Any]


def torch_steps(module: bst.DeepUpdateLSTM, x: Tensor) -> tuple[Tensor, Any]:
    """The network of linear layers and PyTorch's operations."""

    def norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], gain, shift, EPSILON)

    m, a = (norm(F.linear(x, module.input[k]), *module.input_norm[k]).unbind() for k in (0, 1))
    shared = [SharedWeight(layer) for layer in (*module.matrices, module.gates)]
    norms = [pair.unbind() for pair in module.matrix_norm.unbind()]
    gain, shift = module.gate_norm.unbind()
    h, c = start_of(m[0].unsqueeze(0), None)
    seen = []
    for m_t, a_t in zip(m, a, strict=True):
        for j, pair in enumerate(norms):
            h = norm(shared[j](h), *pair)
            h = h * m_t if j == 0 else (h + a_t if j == 1 else h).relu()
        z = shared[-1](h).view(-1, 4, module.hidden_size)
        z = torch.addcmul(shift, F.layer_norm(z, z.shape[-1:], eps=EPSILON), gain)
        h, c = cell(z, c, z.dtype)
        seen.append(h)
    return torch.stack(seen), (h, c)


def append_line(args: argparse.Namespace, graph: str, train: bool, us_per_step: dict[str, float], where: str) -> None:
    """Appends a line of JSON to args.out."""
    line = {
        "network": f"deep-update {args.hidden}, {args.inner} matrices",
        "layout": f"{graph}, b = {args.block}",
        "passes": "forward and backward" if train else "forward",
        "n": args.batch,
        "dtype": "bfloat16" if args.device == "cuda" else "float32",
        "us_per_step": {name: round(us, 1) for name, us in us_per_step.items()},
        "machine": where,
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
    }
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--hidden", type=int, default=5600)
    parser.add_argument("--density", type=float, default=0.04, help="of random layouts")
    parser.add_argument("--graph", help="of all layouts, instead of random ones")
    parser.add_argument("--narrow", type=int, default=1120, help="units of the dense network of equal parameters")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--inner", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--wide", action=argparse.BooleanOptionalAction, default=True, help="time a dense one as wide")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, appended to")
    args = parser.parse_args()
    torch.set_default_device(args.device)
    torch.set_num_threads(args.threads)
    cuda = args.device == "cuda"
    if cuda:
        use_stream()
    dtype, hidden, inputs = torch.bfloat16 if cuda else torch.float32, args.hidden, 64
    nb = hidden // args.block
    graph = args.graph or f"random({nb},{nb},{args.density})"
    layouts = [Layout.from_graph(graph, args.block, seed=s) for s in range(args.inner + 1)]
    sparse = bst.DeepUpdateLSTM(inputs, hidden, layouts, dtype=dtype)
    narrow = bst.DeepUpdateLSTM(inputs, args.narrow, None, args.inner, dtype=dtype)
    layers: dict[str, Layer] = {
        "block-sparse": sparse,
        "block-sparse, torch": functools.partial(torch_steps, sparse),
        f"dense {args.narrow}": narrow,
        f"dense {args.narrow}, torch": functools.partial(torch_steps, narrow),
    }
    if args.wide:
        wide = bst.DeepUpdateLSTM(inputs, hidden, None, args.inner, dtype=dtype)
        layers |= {f"dense {hidden}": wide, f"dense {hidden}, torch": functools.partial(torch_steps, wide)}
    where = torch.cuda.get_device_name() if cuda else f"{args.threads} threads, {blocksparse.cpu_isa()}"
    print(f"{layouts[0]!r}, inner = {args.inner}, n = {args.batch}, {dtype}, {where}: us a step")
    x = torch.randn(args.steps, args.batch, inputs, dtype=dtype)
    for train in (False, True):
        runs: dict[str, Callable[[], None]] = {
            name: captured(layer, x, train, "") if cuda else functools.partial(call, layer, x, train)
            for name, layer in layers.items()
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                taken = seconds(run, cuda)
                if repeat > 0:
                    times[name].append(taken)
        medians = {name: 1e6 * statistics.median(t) / args.steps for name, t in times.items()}
        print("forward + backward" if train else "forward")
        for name, us in medians.items():
            print(f"  {name:20} {us:8.1f} {us / medians['block-sparse']:6.2f}x")
        if args.out:
            append_line(args, graph, train, medians, where)


if __name__ == "__main__":
    main()
