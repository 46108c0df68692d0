"""The block-sparse LSTM beside torch.nn.LSTM: dense of equal width, and dense of equal recurrent parameters.

    python benchmarks/lstm.py [--hidden 1024] [--density 0.1] [--block 32] [--batch 32 64] [--steps 32] [--bf16]

Times are medians of interleaved runs of one layer over a sequence, in ms a step. `input` is the input's dense
projection, which all of them have; the last column is without it. `torch steps` is our layer, composed of one linear op
for each step from Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.lstm import cell
from blocksparse.torch.recurrent import SharedWeight


def steps_in_python(layer: bst.BlockSparseLSTM, x: Tensor) -> tuple[Tensor, Any]:
    """What there was before the op: a linear op and PyTorch's arithmetic for each step."""
    pre = layer.input[0](x)
    weight, n = SharedWeight(layer.recurrent[0]), x.size(1)
    h = c = x.new_zeros(n, layer.hidden_size)
    seen = []
    for pre_t in pre:
        h, c = cell((pre_t + weight(h)).view(n, 4, -1), c, x.dtype)
        seen.append(h)
    return torch.stack(seen), (h, c)


def run(layer: Callable[[Tensor], Any], x: Tensor, train: bool) -> float:
    """Seconds of one sequence."""
    begin = time.perf_counter()
    if train:
        layer(x)[0].sum().backward()
    else:
        with torch.no_grad():
            layer(x)
    return time.perf_counter() - begin


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bf16", action="store_true", help="all in bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    nb, hidden = args.hidden // args.block, args.hidden
    layout = Layout.from_graph(f"random({nb},{nb},{args.density})", args.block, seed=0)
    narrow = round((layout.blocks * args.block**2) ** 0.5 / 8) * 8  # as many recurrent weights
    sparse = bst.BlockSparseLSTM(hidden, hidden, layout, dtype=dtype)
    narrow_input = nn.Linear(hidden, 4 * narrow, dtype=dtype)
    layers: dict[str, Callable[[Tensor], Any]] = {
        "block-sparse": sparse,
        "torch steps": lambda x: steps_in_python(sparse, x),
        f"nn.LSTM {hidden}": nn.LSTM(hidden, hidden, dtype=dtype),
        f"nn.LSTM {narrow}": nn.LSTM(hidden, narrow, dtype=dtype),
        f"input {hidden}": lambda x: (sparse.input[0](x),),
        f"input {narrow}": lambda x: (narrow_input(x),),
    }
    kind = f"{dtype}, {torch.get_num_threads()} threads, {blocksparse.cpu_isa()}"
    print(f"{layout!r}, {args.steps} steps, {kind}: ms a step, beside block-sparse, without the input")
    for train in (False, True):
        for n in args.batch:
            x = torch.randn(args.steps, n, hidden, dtype=dtype)
            times: dict[str, list[float]] = {name: [] for name in layers}
            for repeat in range(args.repeats + 1):
                for name, layer in layers.items():
                    seconds = run(layer, x, train)
                    if repeat > 0:
                        times[name].append(seconds)
            medians = {name: 1e3 * statistics.median(t) / args.steps for name, t in times.items()}
            ours = medians["block-sparse"]
            inputs = {name: medians[f"input {narrow if str(narrow) in name else hidden}"] for name in medians}
            print(f"{'forward + backward' if train else 'forward'}, n = {n}")
            for name, ms in medians.items():
                print(f"  {name:14} {ms:8.3f} {ms / ours:6.2f}x {max(ms - inputs[name], 0):8.3f}")


if __name__ == "__main__":
    main()
