"""Steps of block-sparse layers on several cards, by PyTorch's engines, beside the same on one.

    torchrun --nproc-per-node 2 benchmarks/parallel.py                       # cards if there are enough, with NCCL
    torchrun --nproc-per-node 2 benchmarks/parallel.py --size 1024 --tokens 128 --block 16   # on a CPU, with Gloo

The model is pairs of layers, `size` -> `size` -> `size`, with balanced rows and, after the first of each pair, GELU.
`one` is a process that has the card (and its node) to itself while the others wait. A line of JSON each:

    tensor          a pair divided by its hidden features: forward and backward with dx, `tokens` in all processes
    tensor_tokens   likewise, of x and y that are divided by tokens. `part_ms`: a part alone, without exchange
    ddp, fsdp       steps of AdamW on `--pairs` pairs, `tokens` in each process; weights are float32, products bfloat16.
                    `same_bits`: whether a second run of ddp ends with the same weights, to the bit, in all processes
    exchange        all-reduce of what tensor parallel sums, alone
    deal            how evenly blocks are shared, of scale-free layouts

Times are medians over steps of the slowest process; memory is the most of a process (bytes).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse.torch as bst
from blocksparse import graphs
from blocksparse.torch import parallel
from machine import header

Options = argparse.Namespace
WARM_UPS = 3


def pair(options: Options, seed: int, dtype: torch.dtype, device: torch.device, parts: int = 1) -> bst.BlockSparseMLP:
    """Two layers with a GELU between them; with a part of the features between them, and of the blocks."""
    nodes = options.size // options.block
    hidden, degree = nodes // parts, max(parts, round(options.density * nodes))
    up = graphs.balanced_random(hidden, nodes, degree=degree, block_size=options.block, seed=2 * seed)
    down = graphs.balanced_random(nodes, hidden, degree=degree // parts, block_size=options.block, seed=2 * seed + 1)
    layer: Any = {"gated": False, "activation": "gelu", "device": device, "dtype": dtype}
    return bst.BlockSparseMLP(options.size, hidden * options.block, up, down, **layer)


def timed(run: Callable[[], None], options: Options, device: torch.device, together: bool = True) -> float:
    """Median milliseconds of a run; of the slowest process, if all of them run."""
    times = []
    for _ in range(WARM_UPS + options.steps):
        if together:
            dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    median = torch.tensor(statistics.median(times[WARM_UPS:]), device=device)
    if together:
        dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


def synchronize(device: torch.device) -> None:
    """Waits for the card, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def alone() -> Iterator[bool]:
    """True in the first process; the others wait until it is done."""
    yield dist.get_rank() == 0
    dist.barrier()


def tensor_parallel(options: Options, mesh: DeviceMesh, device: torch.device) -> Iterator[dict[str, Any]]:
    """A pair on one card, then divided in both ways."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    one = pair(options, 0, dtype, device)
    x = torch.randn(options.tokens, options.size, device=device, dtype=dtype)
    dy = torch.randn_like(x)
    expected = one(x).detach()

    def both(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
        leaf = x.clone().requires_grad_()

        def run() -> None:
            model(leaf).backward(dy)
            leaf.grad = None
            model.zero_grad()

        return run

    times = torch.zeros(2, device=device)
    with alone() as mine:
        if mine:
            for i, alone_here in enumerate((one, pair(options, 0, dtype, device, mesh.size()))):
                times[i] = timed(both(alone_here, x, dy), options, device, together=False)
    dist.broadcast(times, 0)
    one_ms, part_ms = times.tolist()
    state, whole = one.state_dict(), held_bytes(one.parameters())
    del one
    for name, layouts in (("tensor", None), ("tensor_tokens", Shard(0))):
        model = pair(options, 0, dtype, device)
        model.load_state_dict(state)
        parallelize_module(model, mesh, parallel.MLPParallel(input_layouts=layouts, output_layouts=layouts))
        parts: Any = model  # whose layers have become others
        part = [t.chunk(mesh.size())[mesh.get_local_rank()] if layouts else t for t in (x, dy, expected)]
        error = ((model(part[0]) - part[2]).norm() / part[2].norm()).item()
        ms = timed(both(model, part[0], part[1]), options, device)
        yield {
            "what": name, "ms": ms, "one_ms": one_ms, "part_ms": part_ms, "speed_up": one_ms / ms,
            "relative_error": error,
            "blocks": gathered([parts.up.part.layout.blocks, parts.down.part.layout.blocks], device),
            "parameter_bytes": [of[0] for of in gathered([held_bytes(parts.parameters())], device)],
            "one_parameter_bytes": whole,
        }  # fmt: skip
    total = torch.randn_like(x)
    yield {"what": "exchange", "bytes": total.nbytes, "ms": timed(lambda: _all_reduce(total), options, device)}


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def gathered(numbers: list[int], device: torch.device) -> list[list[int]]:
    """Those of all processes."""
    mine = torch.tensor(numbers, device=device)
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    return [t.tolist() for t in of_all]


def data_parallel(options: Options, mesh: DeviceMesh, device: torch.device) -> Iterator[dict[str, Any]]:
    """Steps of AdamW: one process, DistributedDataParallel, FSDP2."""
    one = 0.0
    with alone() as mine:
        if mine:
            one = train("one", options, mesh, device)["ms"]
    ddp, again, fsdp = (train(name, options, mesh, device) for name in ("ddp", "ddp", "fsdp"))
    same = all(first == other for first, other in zip(ddp["bits"], again["bits"], strict=True))
    common = {"one_ms": one} if dist.get_rank() == 0 else {}
    for name, made in (("ddp", {**ddp, "same_bits": same}), ("fsdp", {**fsdp, "of_ddp": fsdp["ms"] / ddp["ms"]})):
        del made["bits"]
        yield {"what": name, **common, **made, **({"of_ideal": one / made["ms"]} if common else {})}


def train(name: str, options: Options, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Times steps, and says what of the model a process holds."""
    gc.collect()  # models of before, whose hooks make rings
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    layers = [pair(options, i, torch.float32, device) for i in range(options.pairs)]
    model = nn.Sequential(*layers)
    trained: nn.Module = model
    half: contextlib.AbstractContextManager[Any] = torch.autocast(device.type, torch.bfloat16)
    if name == "ddp":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    elif name == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        half = contextlib.nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    own = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(options.tokens, options.size, device=device, generator=own)
    loss = x.new_zeros(())

    def run() -> None:
        optimizer.zero_grad()
        with half:
            made = trained(x).float().square().mean()
        made.backward()
        loss.copy_(made.detach())
        optimizer.step()

    ms = timed(run, options, device, together=name != "one")
    parameters = list(model.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    held = {
        "parameters": held_bytes(parameters),
        "gradients": held_bytes(p.grad for p in parameters if p.grad is not None),
        "moments": held_bytes(moments),
    }
    if device.type == "cuda":
        held["peak"] = torch.cuda.max_memory_allocated()
    found: dict[str, Any] = {"ms": ms, "bytes": held}
    if name != "one":
        dist.all_reduce(loss)
        bits = [int(local(p).view(torch.int32).long().sum()) for p in parameters]
        found |= {"loss": loss.item() / dist.get_world_size(), "bits": gathered(bits, device)}
    return found


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Of this process's parts."""
    return sum(local(t).nbytes for t in tensors)


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def deals(options: Options) -> Iterator[dict[str, Any]]:
    """How far the processes' numbers of blocks are apart, of a deal and of cuts into equal rows."""
    for nodes, links in ((384, 8), (1024, 8), (1024, 51)):
        layouts = [graphs.barabasi_albert(nodes, links, block_size=32, seed=seed) for seed in (0, 1)]
        sizes = (32 * nodes, 32 * nodes)
        up, down = (bst.BlockSparseLinear(*sizes, layout, device="meta") for layout in layouts)
        for processes in (2, 4, 8):
            dealt = parallel.deal(processes, outputs_of=up, inputs_of=down)
            rows = torch.bincount(torch.from_numpy(layouts[0].coordinates()[0]))
            columns = torch.bincount(torch.from_numpy(layouts[1].coordinates()[1]))
            hands = [torch.from_numpy(hand) for hand in dealt.hands]
            apart = [spread([int(counts[hand].sum()) for hand in hands]) for counts in (rows, columns)]
            cut = spread([int(part.sum()) for part in rows.chunk(processes)])
            yield {
                "what": "deal", "graph": f"ba({nodes},{links})", "processes": processes, "most_over_least": max(apart),
                "cut_into_equal_rows": cut,
            }  # fmt: skip


def spread(counts: list[int]) -> float:
    """Most over least."""
    return max(counts) / max(min(counts), 1)


def topology() -> str:
    """What `nvidia-smi topo -m` says; nothing where it is not there."""
    try:
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def parse() -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=12288, help="features of a layer")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=2, help="pairs of layers that ddp and fsdp train")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    """See above."""
    options = parse()
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_cards = torch.cuda.device_count() >= here
    device = torch.device("cuda", local_rank) if on_cards else torch.device("cpu")
    if on_cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cards else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def show(record: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)

    found = header(on_cards, options.steps, {"torch": torch.__version__})
    found |= {"processes": dist.get_world_size(), "backend": dist.get_backend(), "topology": topology()}
    if on_cards:
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
        found["NCCL_CGA_CLUSTER_SIZE"] = os.environ.get("NCCL_CGA_CLUSTER_SIZE")  # a tenth of the time depends on it
    show({**found, **vars(options)})
    for record in tensor_parallel(options, mesh, device):
        show(record)
    for record in data_parallel(options, mesh, device):
        show(record)
    if dist.get_rank() == 0:
        for record in deals(options):
            show(record)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
