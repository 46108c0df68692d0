"""SET and RigL in two processes; and on a task where they pay."""

from pathlib import Path

import pytest
import torch
from ranks import run_program, run_ranks
from test_sparsify_rewiring import METHODS
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- Several processes ---------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_sparsify_rewiring import NETWORKS, METHODS, OFTEN, backward, masks_of
if sys.argv[3] == "strips":  # scores of all places are not in memory at once, and averaged strip by strip
    from blocksparse.torch.sparsify.sparse_to_sparse import rewired_layer
    rewired_layer.MANY_PLACES = 0
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, (make, shape) = dist.get_rank(), NETWORKS["linear"]
torch.manual_seed(0)
model = make()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
rewiring = METHODS[sys.argv[2]](OFTEN, seed=rank)
rewiring.prepare(wrapped)
rewiring.attach(optimizer)
for step in range(14):
    optimizer.zero_grad()
    backward(wrapped, shape, 100 * step + rank)  # each has data of its own
    if step == 7 and rank == 1 and sys.argv[3] == "nan":
        model[0].weight.grad[0, 0, 0] = float("nan")  # of one alone, so that the weights differ afterwards
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    if step == 7 and sys.argv[3] == "nan":
        with torch.no_grad():
            [p.copy_(b) for p, b in zip(model.parameters(), before)]
            [v.nan_to_num_() for s in optimizer.state.values() for v in s.values()]
masks = [m.flatten() for m in masks_of(model).values()]
everyone = [torch.empty_like(torch.cat(masks)) for _ in range(2)]
dist.all_gather(everyone, torch.cat(masks))
assert torch.equal(*everyone), "patterns differ"
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(everyone, weights)
if sys.argv[3] != "nan":
    assert torch.equal(*everyone), "weights differ"
assert rewiring.report().rows[0].grown > 0
digest = sum(i * int(place) for i, place in enumerate(torch.cat(masks).nonzero()))
print(f"rank {rank} skipped {rewiring.report().skipped} places {digest}\\n", end="", flush=True)
dist.barrier()  # a process that ends while the other still talks to it may abort
dist.destroy_process_group()
"""


def places_of(method, how):
    """What all processes ended with, as one number."""
    found = set()
    for rank, ended in enumerate(run_ranks(run_program, PROGRAM, Path(__file__).parent, method, how)):
        assert ended.status == 0, ended
        (line,) = ended.stdout.splitlines()
        assert line.startswith(f"rank {rank} skipped {int(how == 'nan')} places ")
        found.add(int(line.split()[-1]))
    (places,) = found
    return places


@pytest.mark.parametrize("method", ["SET", "bound"])
def test_two_processes_take_the_same_pattern(method):
    assert places_of(method, "finite") > 0


def test_two_processes_take_the_same_pattern_however_they_score():
    exact = places_of("exact", "finite")
    assert places_of("exact", "strips") == exact
    assert places_of("exact", "nan") != exact  # an exchange was left out, by both


# ---- That it pays --------------------------------------------------------------------------------------------------


def final_loss(method, seed):
    """Of a student of a network that reads 6 of 128 blocks of inputs, relative to its variance."""
    generator, inputs, b = torch.Generator().manual_seed(seed), 1024, 8
    first, last = torch.randn(32, inputs, generator=generator), torch.randn(16, 32, generator=generator)
    reads = torch.zeros(128).index_fill_(0, torch.randperm(128, generator=generator)[:6], 1).repeat_interleave(b)
    first *= reads * 48**-0.5
    torch.manual_seed(seed)
    layout = Layout.from_graph("random(16,128,0.02)", b, seed=seed)
    model = nn.Sequential(bst.BlockSparseLinear(inputs, 128, layout, activation="gelu"), nn.Linear(128, 16))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    if method != "static":
        rewiring = METHODS[method](bss.CosineDrop(end_step=300, alpha=0.3, frequency=10), seed=seed)
        rewiring.prepare(model)
        rewiring.attach(optimizer)
    losses = []
    for step in range(400):
        x = torch.randn(128, inputs, generator=generator)
        y = (x @ first.T).tanh() @ last.T
        loss = (model(x) - y).square().mean() / y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 350:
            losses.append(loss.item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("seed", [0, 1])
def test_rigl_is_better_than_set_and_set_than_a_static_layout(seed):
    losses = {method: final_loss(method, seed) for method in ("exact", "bound", "SET", "static")}
    print(losses)
    assert losses["exact"] < losses["SET"] - 0.05
    assert losses["bound"] < losses["static"] - 0.2
    assert losses["SET"] < losses["static"] - 0.05
