"""What every process of a group does in test_torch_parallel.py: body(rank, processes, folder)."""

import contextlib
import datetime
import io
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse.torch as bst
from blocksparse import Layout, graphs
from blocksparse.torch.parallel import (
    ColwiseParallel,
    MLPParallel,
    RowwiseParallel,
    deal,
    need_same_layouts,
)

UP = Layout.from_graph("ba(12,2)", 8, out_features=92, in_features=96)  # ragged, with hubs
DOWN = Layout.from_graph("ba(12,3)", 8, seed=1, out_features=96, in_features=92)
TOKENS = 12
EXAMPLE = Path(__file__).parents[2] / "examples" / "several_cards.py"


def make(seed=0):
    """Linear layers with gates and a transposed layout, and a gated MLP."""
    torch.manual_seed(seed)
    first = bst.BlockSparseLinear(96, 92, UP, activation="gelu", gates=True)
    second = bst.BlockSparseLinear(92, 96, UP.t(), gates=True, activation="relu")
    with torch.no_grad():
        first.gates.uniform_(0.5, 1.5)
        second.gates.uniform_(0.5, 1.5)
    return nn.Sequential(first, second, bst.BlockSparseMLP(96, 92, UP, DOWN, bias=True)).double()


def batch(t):
    return torch.randn(2, TOKENS, 96, generator=torch.Generator().manual_seed(t), dtype=torch.float64)


def step(model, optimizer, t, clip=0.01):
    optimizer.zero_grad()
    x = batch(t)
    (model(x) - x.sin()).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return whole(norm).detach()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(mine, theirs):
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(whole(mine[key]), tensor, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


PLANS = {
    "gathered": lambda model, n: {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": MLPParallel()},
    "paired": lambda model, n: {
        "0": ColwiseParallel(d := deal(n, outputs_of=model[0], inputs_of=model[1])),
        "1": RowwiseParallel(d, output_layouts=Shard(1)),
        "2": MLPParallel(input_layouts=Shard(1)),
    },
    "grouped": lambda model, n: {
        "0": ColwiseParallel(d := deal(n, outputs_of=model[0], inputs_of=model[1], group=16)),
        "1": RowwiseParallel(d),
    },
    "tokens": lambda model, n: {
        "0": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)),
        "1": RowwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1), use_local_output=False),
        "2": MLPParallel(input_layouts=Shard(1), output_layouts=Shard(1)),
    },
}


def divided(plan, mesh, seed=0):
    model = make(seed)
    return parallelize_module(model, mesh, PLANS[plan](model, mesh.size()))


# ---- Tensor parallel ------------------------------------------------------------------------------------------------


def styles(rank, n, folder):
    """y, dx and the gradients of parameters, however x and y are divided."""
    mesh = init_device_mesh("cpu", (n,))
    for plan in PLANS:
        one = make()
        model = divided(
            plan, mesh, seed=0 if plan == "grouped" else rank
        )  # of what is divided, the first process's count
        mine = (lambda t: t.chunk(n, 1)[rank]) if plan == "tokens" else (lambda t: t)
        x, xs = (batch(0).requires_grad_() for _ in range(2))
        y, ys = one(x), model(mine(xs))
        torch.testing.assert_close(ys, mine(y))
        y.sin().sum().backward()
        ys.sin().sum().backward()
        if plan == "tokens":
            dist.all_reduce(xs.grad)
        torch.testing.assert_close(xs.grad, x.grad)
        gradients = {name: p.grad for name, p in one.named_parameters()}
        for name, parameter in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            part = getattr(model.get_submodule(owner), "part", None)
            rows = part.rows.get(leaf) if part else None
            found = whole(parameter.grad if rows is None else rows.to_whole(parameter.grad))
            torch.testing.assert_close(found, gradients[name], msg=lambda m, k=name: f"{k}: {m}")
        if plan != "grouped":
            blocks = [model[0].part.layout.blocks, model[2].up.part.layout.blocks]
            assert sum_of(blocks) == [UP.blocks, 2 * UP.blocks]
            assert n > 2 or blocks == [UP.blocks // 2, UP.blocks]


def sum_of(numbers):
    total = torch.tensor(numbers)
    dist.all_reduce(total)
    return total.tolist()


def training(rank, n, folder):
    """Steps of AdamW with clipped gradients; state dicts of any number of processes; saved for other bodies."""
    mesh = init_device_mesh("cpu", (n,))
    one, model = make(), divided("paired", mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, model)]
    for t in range(3):
        norms = [step(m, o, t) for m, o in zip((one, model), optimizers, strict=True)]
        torch.testing.assert_close(*norms)
    saved, moments = dcs.get_state_dict(model, optimizers[1])
    assert_close(saved, one.state_dict())
    assert_close(moments["state"]["0.weight"], optimizers[0].state_dict()["state"][0])  # gates come second
    dcp.save({"model": saved, "optimizer": moments}, checkpoint_id=folder / f"divided-{n}")
    full = dcs.get_model_state_dict(model, options=dcs.StateDictOptions(full_state_dict=True))
    assert all(type(tensor) is torch.Tensor for tensor in full.values())
    again = divided("gathered", mesh, seed=1)
    again.load_state_dict(full if rank == 0 else one.state_dict())  # what one process saves is loaded by all
    assert_close(again.state_dict(), one.state_dict())
    assert "process" in repr(again[0])


def resumed(rank, n, folder):
    """A checkpoint of 2 processes, here or in one process: further steps are those of a run that was never stopped."""
    one = make()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for t in range(5):
        step(one, optimizer, t)
    model = make(1) if n == 1 else divided("tokens" if n == 2 else "gathered", init_device_mesh("cpu", (n,)), seed=1)
    if n == 2:
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, moments = dcs.get_state_dict(model, optimizer)
    dcp.load({"model": found, "optimizer": moments}, checkpoint_id=folder / "divided-2")
    dcs.set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=moments)
    for t in range(3, 5):
        step(model, optimizer, t)
    assert_close(model.state_dict(), one.state_dict())


def from_meta(rank, n, folder):
    """Made on no device, divided, put onto one and loaded; or begun anew."""
    mesh = init_device_mesh("cpu", (n,))
    with torch.device("meta"):
        model = make()
    parallelize_module(model, mesh, PLANS["gathered"](model, n))
    model.to_empty(device="cpu")
    model.load_state_dict(make().state_dict())
    assert_close(model.state_dict(), make().state_dict())
    torch.manual_seed(rank)
    model[2].up.reset_parameters()
    model[1].reset_parameters()
    bound = 1 / (UP.t().coordinates()[0] == 0).sum() ** 0.5 / 8**0.5
    first = whole(model.state_dict()["1.weight"])[UP.t().coordinates()[0] == 0]
    assert 0.9 * bound < first.abs().max() <= bound
    bias = model[1].bias.to_local().clone()
    dist.broadcast(bias, 0)
    assert torch.equal(bias, model[1].bias.to_local())


def with_fsdp(rank, n, folder):
    """FSDP2 over one dimension of a mesh, tensor parallel over the other."""
    mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("data", "tensor"))
    one, model = make(), divided("paired", mesh["tensor"])
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh["data"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, model)]
    for t in range(2):
        for m, o in zip((one, model), optimizers, strict=True):
            step(m, o, t)
    found, moments = dcs.get_state_dict(model, optimizers[1])
    assert_close(found, one.state_dict())
    dcs.set_state_dict(model, optimizers[1], model_state_dict=found, optim_state_dict=moments)
    for m, o in zip((one, model), optimizers, strict=True):
        step(m, o, 2)
    assert_close(model.state_dict(), one.state_dict())


def refusals(rank, n, folder):
    mesh = init_device_mesh("cpu", (n,))
    other = Layout.from_graph("ba(12,2)", 8, seed=5 + rank, out_features=92, in_features=96)
    with pytest.raises(
        ValueError, match=r"different layout: hash [0-9a-f]{16} in process 0, hash [0-9a-f]{16} in process 1"
    ) as e:
        parallelize_module(bst.BlockSparseLinear(96, 92, other), mesh, ColwiseParallel())
    hashes = [
        f"{hash(Layout.from_graph('ba(12,2)', 8, seed=5 + r, out_features=92, in_features=96)):016x}" for r in (0, 1)
    ]
    assert all(text in str(e.value) for text in hashes)
    with pytest.raises(
        ValueError, match=r"\[MLPParallel\] processes have different layout of up: hash [0-9a-f]{16} in"
    ):
        parallelize_module(bst.BlockSparseMLP(96, 92, other, DOWN), mesh, MLPParallel())
    mixed = nn.Sequential(make()[0], bst.BlockSparseLSTM(5, 96, Layout.from_graph("ba(12,2)", 8, seed=rank)))
    with pytest.raises(ValueError, match=r"processes have different 1\.recurrent\.0: hash"):
        need_same_layouts(mixed)
    need_same_layouts(make())
    unlike = bst.BlockSparseLinear(96, 92, UP, bias=rank == 0)
    with pytest.raises(ValueError, match="parameters: weight float32, bias float32 in process 0, weight float32 in pr"):
        parallelize_module(unlike, mesh, ColwiseParallel())
    few = bst.BlockSparseLinear(96, 16, graphs.dense(1, 6, block_size=16))
    with pytest.raises(ValueError, match=f"16 features are 1 units of 16, fewer than the {n} processes"):
        parallelize_module(few, mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="layers have 96, 92 features"):
        deal(n, outputs_of=[few.__class__(92, 96, DOWN), few.__class__(96, 92, UP)])
    with pytest.raises(ValueError, match="needs the deal that the layer at the other end has"):
        ColwiseParallel(output_layouts=Shard(-1))
    with pytest.raises(TypeError, match="takes a BlockSparseLinear or BlockSparseGLU, given a BlockSparseConv2d"):
        parallelize_module(bst.BlockSparseConv2d(96, 92, 3, UP), mesh, ColwiseParallel())
    with pytest.raises(TypeError, match="takes a BlockSparseMLP, given a Linear"):
        parallelize_module(nn.Linear(8, 8), mesh, MLPParallel())
    model = divided("gathered", mesh)
    x = batch(0).requires_grad_()
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(model[0](x).sin().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"\[RowwiseParallel\] has no second derivative"):
        torch.autograd.grad(model[1](x[..., :92]).sin().sum(), x, create_graph=True)
    spread = DTensor.from_local(x, mesh, [Replicate()])
    for layer, given in ((model[0], spread), (model[1], spread[..., :92])):
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            torch.autograd.grad(layer(given).sin().sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="divided already, by ColwiseParallel"):
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match="deal is of 92 features in units of 8 to 5 processes, needs 96"):
        parallelize_module(make(), mesh, {"0": RowwiseParallel(deal(5, outputs_of=make()[0]))})
    uneven = parallelize_module(make()[0], mesh, ColwiseParallel(output_layouts=Shard(0)))
    with pytest.raises(ValueError, match=f"dimension 0 of the output has 7 entries, needs a multiple of the {n} proc"):
        uneven(torch.zeros(7, 96, dtype=torch.float64))
    with pytest.raises(ValueError, match="cannot take another layout"):
        model[0].relayout(UP)
    small = bst.BlockSparseLinear(96, 92, Layout.from_graph("ba(12,4)", 8, out_features=92, in_features=96)).double()
    with pytest.raises(RuntimeError, match=r"0.weight is \[.*, 8, 8\], the whole of it is \[54, 8, 8\]"):
        model.load_state_dict({**make().state_dict(), "0.weight": small.weight})
    swapped = Layout.from_coordinates(*(x[::-1] for x in map(np.ascontiguousarray, UP.t().coordinates())), (12, 12), 8)
    pattern = bst.BlockSparseLinear(96, 96, swapped).pattern
    with pytest.raises(RuntimeError, match=r"0\.weight was saved with Layout"):
        model.load_state_dict({**make().state_dict(), "0.pattern": pattern})


def damaged(rank, n, folder):
    """Checkpoints whose files are short or gone, and of other layouts."""
    model = divided("paired", init_device_mesh("cpu", (n,)))
    found, moments = dcs.get_state_dict(model, torch.optim.AdamW(model.parameters()))
    for name, harm in (("short", lambda f: os.truncate(f, f.stat().st_size // 2)), ("gone", os.unlink)):
        path = folder / f"{name}-{n}"
        if rank == 0:
            shutil.copytree(folder / "divided-2", path)
            harm(path / "__1_0.distcp")
        dist.barrier()
        with pytest.raises(dcp.api.CheckpointException):
            dcp.load({"model": found, "optimizer": moments}, checkpoint_id=path)
    other = nn.Sequential(bst.BlockSparseLinear(96, 92, DOWN.t()).double())
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"model": other.state_dict()}, checkpoint_id=folder / "divided-2")


# ---- FSDP2 and DistributedDataParallel -----------------------------------------------------------------------------


class Everything(nn.Module):
    """Convolution, LSTM, linear layer and MLP, one after the other."""

    def __init__(self):
        super().__init__()
        self.conv = bst.BlockSparseConv2d(96, 92, 3, UP, padding=1)
        self.lstm = bst.BlockSparseLSTM(92, 96, graphs.barabasi_albert(12, 2, block_size=8))
        self.linear = bst.BlockSparseLinear(96, 92, UP)
        self.mlp = bst.BlockSparseMLP(92, 96, DOWN, UP)

    def forward(self, x):  # [tokens, 96] as an image of tokens x 1
        y = self.conv(x.t()[None, :, :, None])[0, :, :, 0].t()
        y, _ = self.lstm(y[:, None])
        return self.mlp(self.linear(y[:, 0]).relu())


def everything(dtype=torch.float64):
    torch.manual_seed(0)
    return Everything().to(dtype)


def one_of(t, rank):
    return torch.randn(TOKENS, 96, generator=torch.Generator().manual_seed(10 * t + rank), dtype=torch.float64)


def sharded(**options):
    model = everything(options.pop("dtype", torch.float64))
    for layer in model.children():
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def steps(model, optimizer, times, ranks):
    for t in times:
        optimizer.zero_grad()
        xs = [one_of(t, rank) for rank in ranks]
        sum(model(x).sin().mean() / len(xs) for x in xs).backward()
        optimizer.step()


def fsdp(rank, n, folder):
    """As one process with the mean of the gradients; halves of the weights; checkpoints on 2 that 3 and 1 load."""
    one = everything()
    steps(one, torch.optim.AdamW(one.parameters(), lr=1e-2), range(3), range(n))
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, range(3), [rank])
    assert_close(model.state_dict(), one.state_dict())
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held < 1.1 * sum(p.numel() for p in one.parameters()) / n
    if n == 2:
        saved, moments = dcs.get_state_dict(model, optimizer)
        dcp.save({"model": saved, "optimizer": moments}, checkpoint_id=folder / "sharded-2")
        torch.save(one.state_dict(), folder / f"one-{rank}.pt")


def fsdp_resumed(rank, n, folder):
    model = everything() if n == 1 else sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, moments = dcs.get_state_dict(model, optimizer)
    dcp.load({"model": found, "optimizer": moments}, checkpoint_id=folder / "sharded-2")
    dcs.set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=moments)
    assert_close(model.state_dict(), torch.load(folder / "one-0.pt"))


def fsdp_options(rank, n, folder):
    """Mixed precision computes in bfloat16 and keeps float32; offloaded weights are the same ones."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(dtype=torch.float32, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    one = everything(torch.float32)
    y = model(one_of(0, rank).float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), one(one_of(0, rank).float()), rtol=0.05, atol=0.02)
    y.sin().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.optim.AdamW(model.parameters()).step()
    few = fully_shard(bst.BlockSparseLinear(16, 16, graphs.dense(1, block_size=16)))  # of fewer blocks than processes
    before = few.weight.full_tensor().clone()
    few(torch.ones(2, 16)).sum().backward()
    torch.optim.AdamW(few.parameters()).step()
    assert sum_of([few.weight.to_local().numel()]) == [256]
    assert not torch.equal(few.weight.full_tensor(), before)


def ddp(rank, n, folder):
    """Two runs give the same bits, and to rounding what one process gives."""
    one = everything()
    steps(one, torch.optim.AdamW(one.parameters(), lr=1e-2), range(3), range(n))
    runs = []
    for _ in range(2):
        model = everything()
        wrapped = DistributedDataParallel(model)
        steps(wrapped, torch.optim.AdamW(model.parameters(), lr=1e-2), range(3), [rank])
        runs.append(model.state_dict())
    assert all(torch.equal(tensor, runs[1][key]) for key, tensor in runs[0].items())
    assert_close(runs[0], one.state_dict())


def death(rank, n, folder):
    """The last process dies; the others get PyTorch's error well within the timeout."""
    model = divided("gathered", init_device_mesh("cpu", (n,)))
    model(batch(0))
    if rank == n - 1:
        os._exit(1)
    begin = datetime.datetime.now()
    with pytest.raises(RuntimeError):
        list(map(model, [batch(0)] * 100))
    assert (datetime.datetime.now() - begin).total_seconds() < processes.TIMEOUT / 2


def example(rank, n, folder):
    """As torchrun starts it, twice: the second run goes on from the checkpoint of the first, by another engine."""
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    losses = []
    for engine, port in zip(("tensor", "fsdp"), (folder / "ports").read_text().split(), strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        sys.argv = [str(EXAMPLE), engine]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        form = rf"{engine} on {n} x cpu: loss ([\d.]+)\n" if rank == 0 else ""
        losses.append(re.fullmatch(form, printed.getvalue()))
    assert rank > 0 or float(losses[1][1]) < float(losses[0][1])
