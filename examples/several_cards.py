"""One model trained by several processes: torchrun --nproc-per-node 2 examples/several_cards.py tensor."""

# [readme]
import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse.torch as bst
from blocksparse import graphs
from blocksparse.torch import parallel

parser = argparse.ArgumentParser()
parser.add_argument("engine", choices=["ddp", "fsdp", "tensor"])
engine = parser.parse_args().engine
CHECKPOINT = Path("checkpoint")
local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
kind = "cuda" if torch.cuda.device_count() >= here else "cpu"
device = torch.device(kind, local_rank if kind == "cuda" else None)
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, processes = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(kind, (processes,))

torch.manual_seed(0)  # all begin alike
up = graphs.barabasi_albert(64, 4, block_size=16, seed=0)  # 1024 x 1024, 14 % of the blocks
down = graphs.barabasi_albert(64, 4, block_size=16, seed=1)
model = nn.Sequential(bst.BlockSparseMLP(1024, 1024, up, down), bst.BlockSparseMLP(1024, 1024, up, down)).to(device)
parallel.need_same_layouts(model)
if engine == "tensor":  # each process has a part of each weight, and sees all tokens
    parallelize_module(model, mesh, {"*": parallel.MLPParallel()})
elif engine == "fsdp":  # each process keeps a part of each weight, and has its own tokens
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
trained = DistributedDataParallel(model) if engine == "ddp" else model

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if CHECKPOINT.exists():  # of any engine, saved by any number of processes
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=CHECKPOINT)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

for step in range(20):
    tokens = torch.randn(64, 1024, generator=torch.Generator().manual_seed(step))
    mine = tokens if engine == "tensor" else tokens.chunk(processes)[rank]
    optimizer.zero_grad()
    loss = (trained(mine.to(device)) - mine.to(device).sin()).square().mean()
    loss.backward()
    optimizer.step()

weights, moments = get_state_dict(model, optimizer)
whole = CHECKPOINT.with_suffix(".new")  # takes the place of the last one when it is complete
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=whole)
if rank == 0:
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    whole.rename(CHECKPOINT)
mean = loss.detach() / processes
dist.all_reduce(mean)
if rank == 0:
    print(f"{engine} on {processes} x {kind}: loss {mean:.4f}")
dist.destroy_process_group()
# [readme]
