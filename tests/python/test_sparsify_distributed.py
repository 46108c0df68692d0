"""Sparsifiers in two processes that train in parallel: every one takes the same blocks."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import blocksparse.torch.sparsify as bss

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo"),
]
SCHEDULE = bss.PolynomialDecay(0.75, begin_step=2, end_step=12, frequency=2)
KINDS = {
    "magnitude": lambda: bss.MagnitudePruner(SCHEDULE, block_size=8),
    "lasso": lambda: bss.GroupLasso(SCHEDULE, block_size=8, scope="global"),
    "blast": lambda: bss.Blast(SCHEDULE, block_size=8, grow=0.5),
    "l0": lambda: bss.L0(SCHEDULE, block_size=8),
}


def run(rank, kind, folder, processes):
    """Trains on this process's half of each batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()
    pruner = KINDS[kind]()
    pruner.prepare(model)
    wrapped = DistributedDataParallel(model) if processes > 1 else model
    gates = [{"params": pruner.parameters(), "lr": 0.05}] if kind == "l0" else []
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, *gates], lr=1e-2)
    pruner.attach(optimizer)
    for t in range(14):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        x = x.chunk(processes)[rank]
        optimizer.zero_grad()
        (wrapped(x) - x.sin()).square().mean().backward()
        optimizer.step()
    torch.save({**pruner.masks(), **model.state_dict()}, f"{folder}/{processes}-{rank}.pt")


def process(train, *arguments):
    dist.init_process_group("gloo")
    try:
        train(int(os.environ["RANK"]), *arguments)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_take_the_same_blocks(kind, tmp_path):
    ended = run_ranks(process, run, kind, str(tmp_path), 2)
    assert [one.status for one in ended] == [0, 0], ended
    first, second = (torch.load(tmp_path / f"2-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert sum(int(first[name].sum()) for name in ("0", "2")) == 16
    if kind != "blast":  # which adds up the norms of each process's gradient
        run(0, kind, str(tmp_path), 1)
        alone = torch.load(tmp_path / "1-0.pt")
        for key in first:
            torch.testing.assert_close(first[key], alone[key], rtol=1e-8, atol=1e-10)


# ---- Layers that move to block-sparse storage ------------------------------------------------------------------------


def run_moving(rank, folder, processes, wraps):
    """As `run`, with layers that move; wrapped anew when they have, if `wraps`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()
    pruner = bss.MagnitudePruner(SCHEDULE, block_size=8, compact_at=[0.6, 0.3])
    pruner.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner.attach(optimizer)
    wrapped, moves, error = DistributedDataParallel(model) if processes > 1 else model, 0, ""
    for t in range(14):
        if pruner.moves > moves and processes > 1 and wraps:
            wrapped, moves = DistributedDataParallel(model), pruner.moves
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(t), dtype=torch.float64).chunk(processes)[rank]
        optimizer.zero_grad()
        (wrapped(x) - x.sin()).square().mean().backward()
        try:
            optimizer.step()
        except RuntimeError as raised:
            error = str(raised)
            break
    state = {"moves": pruner.moves, "error": error, "weights": model.state_dict(), "masks": pruner.masks()}
    torch.save(state, f"{folder}/moving-{processes}-{rank}-{wraps}.pt")


def run_moving_twice(rank, folder):
    run_moving(rank, folder, 2, True)
    run_moving(rank, folder, 2, False)


def test_layers_move_in_two_processes(tmp_path):
    ended = run_ranks(process, run_moving_twice, str(tmp_path))
    assert [one.status for one in ended] == [0, 0], ended
    first, second = (torch.load(tmp_path / f"moving-2-{rank}-True.pt") for rank in (0, 1))
    assert first["moves"] == 2
    assert not first["error"]
    assert first["weights"]["0.weight"].dim() == 3, "is in blocks"
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    run_moving(0, str(tmp_path), 1, True)
    alone = torch.load(tmp_path / "moving-1-0-True.pt")
    assert all(torch.equal(mask, first["masks"][name]) for name, mask in alone["masks"].items())
    for name, value in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-8, atol=1e-10)
    for rank in (0, 1):  # one that goes on with the old wrapper learns so in all processes, at the first step
        state = torch.load(tmp_path / f"moving-2-{rank}-False.pt")
        assert state["moves"] == 1
        assert "processes have different gradients of 0, 2, which have moved" in state["error"]
