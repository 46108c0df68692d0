"""State dicts of block-sparse layers through what programs save, share and load them by."""

import copy

import pytest
import torch
from ranks import run_program, run_ranks
from test_torch_averages import MODULES, as_of_version_01, run, shaken
from torch import nn

import blocksparse.torch as bst
from blocksparse import Layout

OTHERS = [which for which in MODULES if which != "weight norm"]


@pytest.mark.parametrize("which", OTHERS)
def test_safetensors(which, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    make, shape = MODULES[which]
    model, again = shaken(make()), make()
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert safetensors.load_model(again, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(run(again, shape), run(model, shape))
    old = {k: v.contiguous() for k, v in as_of_version_01(model).items()}
    safetensors.save_file(old, tmp_path / "old.safetensors")
    again = make()
    again.load_state_dict(safetensors.load_file(tmp_path / "old.safetensors"))
    assert torch.equal(run(again, shape), run(model, shape))


@pytest.mark.parametrize("which", MODULES)
def test_copies_and_calls_with_other_tensors(which):
    make, shape = MODULES[which]
    model, other = shaken(make()), make()
    expected = run(model, shape)
    for _ in range(2):  # before and after tables were asked for
        assert torch.equal(run(copy.deepcopy(model), shape), expected)
    torch.manual_seed(7)
    x = torch.randn(shape)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        y = torch.func.functional_call(other, state, (x,))
    assert torch.equal(y[0] if isinstance(y, tuple) else y, expected)


@pytest.mark.parametrize("which", OTHERS)
def test_modules_on_meta(which):
    make, shape = MODULES[which]
    model = shaken(make())
    with torch.device("meta"):
        empty = make()
    assert all(v.is_meta for v in empty.state_dict().values())
    assert empty.load_state_dict(model.state_dict(), assign=True) == ([], [])
    assert torch.equal(run(empty, shape), run(model, shape))
    with torch.device("meta"):
        empty = make()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(run(empty, shape), run(model, shape))
    model.load_state_dict(make().to("meta").state_dict(), assign=True)
    assert next(model.parameters()).is_meta


def test_weight_norm_on_meta():
    layer, x = (
        bst.weight_norm(
            bst.BlockSparseLinear(30, 21, Layout.from_graph("dense(3,4)", 8, out_features=21, in_features=30))
        ),
        torch.randn(2, 30),
    )
    empty = copy.deepcopy(layer).to("meta")
    assert empty(x.to("meta")).shape == (2, 21)
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("which", ["linear", "conv", "wide conv"])
def test_export(which, tmp_path):
    make, shape = MODULES[which]
    model = shaken(make())
    torch.manual_seed(7)
    x = torch.randn(shape)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), run(model, shape))
    torch.export.save(exported, tmp_path / "model.pt2")
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), run(model, shape))


def test_a_refused_state_dict_leaves_the_weights(layout):
    """Of another layout with as many blocks, whose weights would fit."""
    wrong = Layout.from_graph("random(4,6,0.4)", 16, seed=4, out_features=60, in_features=90)
    assert wrong.blocks == layout.blocks
    layer, other = (bst.BlockSparseLinear(90, 60, one, gates=True) for one in (layout, wrong))
    nn.init.uniform_(other.gates)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for state in (other.state_dict(), as_of_version_01(other)):
        for strict, assign in ((True, False), (False, False), (True, True)):
            with pytest.raises(RuntimeError, match="was saved with Layout"):
                layer.load_state_dict(state, strict=strict, assign=assign)
            assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    conv, other = (bst.BlockSparseConv1d(90, 60, k, layout, channel_order=range(90)) for k in (3, 3))
    before = {k: v.clone() for k, v in conv.state_dict().items()}
    state = other.state_dict()
    for wrong in ({"order": state["order"].zero_()}, {"kernel": state["kernel"] + 1}, {"pattern": torch.zeros(3)}):
        with pytest.raises(RuntimeError):
            conv.load_state_dict({**other.state_dict(), **wrong})
        assert all(torch.equal(v, before[k]) for k, v in conv.state_dict().items())


PROCESSES = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import blocksparse.torch as bst
from blocksparse import Layout

dist.init_process_group("gloo")
rank, layout = dist.get_rank(), Layout.from_graph("random(3,4,0.5)", 8, seed=1, out_features=21, in_features=30)
torch.manual_seed(9)
x = torch.randn(2, 30, 4, 3)

def network(device=None):
    order = torch.randperm(30, generator=torch.Generator().manual_seed(rank))  # the first process tells the others
    first = bst.BlockSparseConv2d(30, 21, 3, layout, padding=1, channel_order=order, device=device)
    return torch.nn.Sequential(first, bst.BlockSparseConv2d(21, 30, 1, layout.t(), device=device))

def sharded(device=None):
    model = network(device)
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model

def same(model):
    assert torch.allclose(model(x), expected, atol=1e-5)

torch.manual_seed(rank)
model = network()
parallel = torch.nn.parallel.DistributedDataParallel(model)
y = parallel(x)
parts = [torch.empty_like(y) for _ in range(2)]
dist.all_gather(parts, y.detach())
assert torch.equal(*parts)
y.sum().backward()
expected, state = model(x).detach(), {k: v.clone() for k, v in model.state_dict().items()}
old = {**state, "0.pattern": torch.from_numpy(layout.pattern()), "0.channel_order": model[0].channel_order}
del old["0.order"]

other = sharded()
options = {"full_state_dict": True}
for more in ({}, {"broadcast_from_rank0": True}, {"cpu_offload": True}):
    given = dict(state) if rank == 0 or "broadcast_from_rank0" not in more else {}
    set_model_state_dict(other, given, options=StateDictOptions(**options, **more))
    same(other)
    whole = get_model_state_dict(other, options=StateDictOptions(**options))
    assert whole.keys() == state.keys() and all(torch.equal(v, state[k]) for k, v in whole.items())
other(x).sum().backward()
from_old = sharded()
set_model_state_dict(from_old, dict(old), options=StateDictOptions(**options))
same(from_old)

dcp.save({"model": get_model_state_dict(other)}, checkpoint_id=sys.argv[1])
loaded = sharded()
parts = get_model_state_dict(loaded)
dcp.load({"model": parts}, checkpoint_id=sys.argv[1])
set_model_state_dict(loaded, parts)
same(loaded)

for empty in (sharded("meta").to_empty(device="cpu"), network("meta")):
    given = dict(state) if rank == 0 else {}
    set_model_state_dict(empty, given, options=StateDictOptions(**options, broadcast_from_rank0=True))
    same(empty)
"""


def test_processes(tmp_path):
    """DistributedDataParallel, fully_shard and distributed checkpoints."""
    ended = run_ranks(run_program, PROCESSES, tmp_path / "checkpoint")
    assert [one.status for one in ended] == [0, 0], ended
