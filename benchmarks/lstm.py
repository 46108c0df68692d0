"""The block-sparse LSTM beside torch.nn.LSTM: dense of equal width, and dense of equal recurrent parameters.

    python benchmarks/lstm.py [--hidden 1024] [--density 0.1] [--block 32] [--batch 32 64] [--steps 32] [--bf16]
    python benchmarks/lstm.py --device cuda --hidden 8192 --inputs 64 --density 0.05 --steps 64 --batch 16 64 --bf16

Times are medians of interleaved runs of one layer over a sequence, in ms a step. `input` is the input's dense
projection, which all of them have; the last column is without it. `torch steps` is our layer, composed of one linear op
for each step from Python. On a card `graph` is a replay of our layer captured in a CUDA graph, and `steps, graph` the
same with a launch for each product, even where all steps can be one.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse._core import library
from blocksparse.torch.lstm import cell
from blocksparse.torch.recurrent import SharedWeight

Layer = Callable[[Tensor], Any]


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


def call(layer: Layer, x: Tensor, train: bool) -> None:
    """One sequence, with gradients or without."""
    if train:
        layer(x)[0].sum().backward()
    else:
        with torch.no_grad():
            layer(x)


def seconds(run: Callable[[], None], cuda: bool) -> float:
    """What a run takes, on a card by events."""
    if not cuda:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


def use_stream() -> None:
    """From here on PyTorch queues on a stream of its own, for the default one cannot be captured."""
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def captured(layer: Layer, x: Tensor, train: bool, kernel: str) -> Callable[[], None]:
    """A replay of a graph, with the library's CUDA kernel of that name ("": its choice)."""
    library.call("bs_set_cuda_kernel", kernel.encode())
    call(layer, x, train)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call(layer, x, train)
    library.call("bs_set_cuda_kernel", b"")
    return graph.replay


def dense_lstm(inputs: int, hidden: int, dtype: torch.dtype) -> nn.LSTM:
    """With its weights in one piece, as cuDNN wants them."""
    layer = nn.LSTM(inputs, hidden, dtype=dtype)
    layer.flatten_parameters()
    return layer


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inputs", type=int, help="features of x; by default as many as units")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bf16", action="store_true", help="all in bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    cuda = args.device == "cuda"
    if cuda:
        use_stream()
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    nb, hidden, inputs = args.hidden // args.block, args.hidden, args.inputs or args.hidden
    layout = Layout.from_graph(f"random({nb},{nb},{args.density})", args.block, seed=0)
    narrow = round((layout.blocks * args.block**2) ** 0.5 / 8) * 8  # as many recurrent weights
    sparse = bst.BlockSparseLSTM(inputs, hidden, layout, dtype=dtype)
    narrow_input = nn.Linear(inputs, 4 * narrow, dtype=dtype)
    layers: dict[str, Layer] = {
        "block-sparse": sparse,
        "torch steps": lambda x: steps_in_python(sparse, x),
        f"nn.LSTM {hidden}": dense_lstm(inputs, hidden, dtype),
        f"nn.LSTM {narrow}": dense_lstm(inputs, narrow, dtype),
        f"input {hidden}": lambda x: (sparse.input[0](x),),
        f"input {narrow}": lambda x: (narrow_input(x),),
    }
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads, {blocksparse.cpu_isa()}"
    print(f"{layout!r}, {args.steps} steps, {dtype}, {where}: ms a step, beside block-sparse, without the input")
    for train in (False, True):
        for n in args.batch:
            x = torch.randn(args.steps, n, inputs, dtype=dtype)
            runs: dict[str, Callable[[], None]] = {
                name: functools.partial(call, layer, x, train) for name, layer in layers.items()
            }
            if cuda:
                runs["graph"] = captured(sparse, x, train, "")
                if n <= 64 and args.bf16 and not train:
                    runs["steps, graph"] = captured(sparse, x, train, "stream_w")
            times: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(args.repeats + 1):
                for name, run in runs.items():
                    taken = seconds(run, cuda)
                    if repeat > 0:
                        times[name].append(taken)
            medians = {name: 1e3 * statistics.median(t) / args.steps for name, t in times.items()}
            ours = medians["graph" if cuda else "block-sparse"]
            of_input = {name: medians[f"input {narrow if str(narrow) in name else hidden}"] for name in medians}
            print(f"{'forward + backward' if train else 'forward'}, n = {n}")
            for name, ms in medians.items():
                print(f"  {name:14} {ms:8.4f} {ms / ours:6.2f}x {max(ms - of_input[name], 0):8.4f}")


if __name__ == "__main__":
    main()
