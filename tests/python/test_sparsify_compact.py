"""Layers that move to block-sparse storage in mid-training, and what their optimizers and pruners make of it."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- compact_ ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 1e-2 / (i + 1)} for i, q in enumerate(p)]),
}


def small():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(40, 72), nn.GELU(), nn.Linear(72, 24, bias=False), nn.GELU(), nn.Linear(24, 8))
    return model.double()


def masked_steps(model, optimizer, targets, masks, count, seed):
    """Steps of training, with dead blocks held at zero."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(16, 40, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x[:, :8].sin()).square().mean().backward()
        optimizer.step()
        bss.apply_masks(targets, masks)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(name):
    model = small()
    masks = bss.sparsify_(model, "magnitude", sparsity=0.6, block_size=8, ignore="4")
    other = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[name](list(net.parameters())) for net in (model, other)]
    for net, optimizer in zip((model, other), optimizers, strict=True):
        masked_steps(net, optimizer, bss.find_targets(net, 8, ignore="4"), masks, 5, 0)
    made = bss.compact_(model, masks, optimizers[0], block_size=8)
    assert list(made) == ["0", "2"]
    assert model[0] is made["0"]
    assert made["0"].bias is model[0].bias
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 1.0)
    held = [id(p) for group in optimizers[0].param_groups for p in group["params"]]
    assert held == [id(p) for p in model.parameters()]
    assert optimizers[0].state.keys() == set(model.parameters())
    masked_steps(model, optimizers[0], [], {}, 5, 1)
    scheduler.step()
    masked_steps(other, optimizers[1], bss.find_targets(other, 8, ignore="4"), masks, 5, 1)
    for i in (0, 2):
        torch.testing.assert_close(model[i].to_dense().weight, other[i].weight)
    x = torch.randn(3, 40, dtype=torch.float64)
    torch.testing.assert_close(model(x), other(x))
    state = optimizers[0].state_dict()  # resumes
    again = OPTIMIZERS[name](list(model.parameters()))
    again.load_state_dict(state)


def test_moments_of_a_weight_that_lies_as_in_by_out():
    """As that of transformers' Conv1D does. Fused optimizers read state and gradient by the weight's strides."""
    torch.manual_seed(1)
    model = nn.Sequential(type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils", "bias": None})())
    model[0].weight, x = nn.Parameter(torch.randn(32, 48)), torch.randn(64, 32)
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    other, before = copy.deepcopy(model), model[0].weight
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True) for net in (model, other)]

    def gradients():
        (x @ other[0].weight).sin().square().sum().backward()
        bss.find_targets(other, 16)[0].keep_(other[0].weight.grad, masks["0"])

    gradients()
    before.grad = other[0].weight.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    bss.compact_(model, masks, optimizers[0], block_size=16)
    gradients()
    model[0].weight.grad = bst.from_dense(other[0].weight.grad.t(), model[0].layout).contiguous()
    for optimizer in optimizers:
        optimizer.step()
    bss.apply_masks(bss.find_targets(other, 16), masks)
    torch.testing.assert_close(model[0].to_dense().weight, other[0].weight.t())


def test_a_compact_layer_is_compacted_again_with_its_gradient():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=8, ignore="4")
    model(torch.randn(3, 40, dtype=torch.float64)).sum().backward()
    bss.compact_(model, masks, optimizer, block_size=8)
    optimizer.step()
    masks = bss.sparsify_(model, "magnitude", sparsity=0.8, ignore="4", targets="0")
    layer = model[0]
    moments, places = optimizer.state[layer.weight]["exp_avg"].clone(), layer.layout.coordinates()
    kept = masks["0"][torch.from_numpy(places[0]).long(), torch.from_numpy(places[1]).long()]
    gradient = layer.weight.grad.clone()
    bss.compact_(model, masks, optimizer)
    assert model[0].layout.mask().tolist() == masks["0"].tolist()
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments[kept])
    assert torch.equal(model[0].weight.grad, gradient[kept])
    optimizer.step()


def test_compact_refuses_what_it_cannot_move():
    model = small()
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=8, ignore="4")
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"\[compact\] the optimizer does not hold 2"):
        bss.compact_(model, masks, torch.optim.SGD(model[0].parameters(), 0.1), block_size=8)
    adafactor = torch.optim.Adafactor(model.parameters())
    model(torch.randn(3, 40, dtype=torch.float64)).sum().backward()
    adafactor.step()
    with pytest.raises(
        ValueError, match=r"row_var of 0 is \[72, 1\], needs the weight's shape \[72, 40\]: a Adafactor"
    ):
        bss.compact_(model, masks, adafactor, block_size=8)
    with pytest.raises(ValueError, match="a LBFGS keeps a list of parameters of its own"):
        bss.compact_(model, masks, torch.optim.LBFGS(model.parameters()), block_size=8)
    assert repr(model) == repr(before)
    net = nn.ModuleDict({"conv": nn.Conv1d(16, 32, 3), "rnn": nn.LSTM(32, 32), "linear": nn.Linear(32, 32)})
    masks = bss.sparsify_(net, "magnitude", sparsity=0.5, block_size=16)
    with pytest.warns(UserWarning, match="left as they are, with zeros: rnn .an LSTM's two biases"):
        made = bss.compact_(net, masks, block_size=16)
    assert list(made) == ["conv", "linear"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bss.compact_(net, {}, block_size=16) == {}


# ---- Pruners whose layers move -------------------------------------------------------------------------------------


def gradual(model, compact_at=(), kind="MagnitudePruner", steps=40, **options):
    """A training with gradual pruning; (pruner, optimizer)."""
    schedule = bss.PolynomialDecay(final_sparsity=0.8, begin_step=4, end_step=32, frequency=4)
    pruner = getattr(bss, kind)(schedule, block_size=8, ignore="4", compact_at=compact_at, **options)
    pruner.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner.attach(optimizer)
    train(model, optimizer, range(steps))
    return pruner, optimizer


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x[:, :8].sin()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["MagnitudePruner", "GroupLasso"])
def test_a_pruner_whose_layers_move_ends_where_one_whose_layers_stay_does(kind):
    options = {"regrow": False} if kind == "MagnitudePruner" else {}
    model, other = small(), small()
    pruner, optimizer = gradual(model, [0.6, 0.3], kind, **options)
    expected, _ = gradual(other, kind=kind, **options)
    for i in (0, 2):
        assert isinstance(model[i], bst.BlockSparseLinear)
        assert 0.2 <= model[i].layout.density <= 0.3  # has moved twice; what was dropped later is zero
        assert torch.equal(pruner.masks()[str(i)], expected.masks()[str(i)])
        torch.testing.assert_close(model[i].to_dense().weight, other[i].weight)
    assert optimizer.state.keys() == set(model.parameters())
    assert all(row.density == pytest.approx(0.2, abs=0.02) for row in pruner.report().rows)
    assert str(pruner.report()).count("\n") == 3
    pruner.squash_mask()
    assert not any(name.endswith("_gates") for name in model.state_dict())


def test_a_run_whose_layers_moved_resumes_to_the_bit(tmp_path):
    model = small()
    pruner, optimizer = gradual(model, [0.5], steps=21)
    assert isinstance(model[0], bst.BlockSparseLinear)
    bst.save_pretrained(model, tmp_path / "x.safetensors")
    state, moments = pruner.state_dict(), copy.deepcopy(optimizer.state_dict())

    again = bst.load_pretrained(small, tmp_path / "x.safetensors").train()
    other = bss.MagnitudePruner(pruner.schedule, block_size=8, ignore="4", compact_at=[0.5])
    other.prepare(again)
    other.load_state_dict(state)
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
    resumed.load_state_dict(moments)
    other.attach(resumed)
    train(model, optimizer, range(21, 40))
    train(again, resumed, range(21, 40))
    assert model.state_dict().keys() == again.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_wrong_densities_and_a_pruner_without_an_optimizer():
    with pytest.raises(ValueError, match=r"\[MagnitudePruner\] compact_at has 1.5, needs densities between 0 and 1"):
        bss.MagnitudePruner(bss.Constant(0.5), compact_at=[0.5, 1.5])
    with pytest.raises(TypeError, match=r"compact_at is 0\.5, needs densities"):
        bss.MagnitudePruner(bss.Constant(0.5), compact_at=0.5)
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=8, ignore="4", compact_at=[0.5])
    pruner.prepare(small())
    with pytest.raises(RuntimeError, match="compact_at needs attach"):
        pruner.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("fused", [False, True])
def test_compacted_on_a_card(fused):
    net = small().float().cuda()
    masks = bss.sparsify_(net, "magnitude", sparsity=0.5, block_size=8, ignore="4")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    for _ in range(2):
        net(torch.randn(3, 40, device="cuda")).sum().backward()
        optimizer.step()
    moments = optimizer.state[net[0].weight]["exp_avg"].clone()
    bss.compact_(net, masks, optimizer, block_size=8)
    kept = bst.from_dense(moments, net[0].layout)
    assert torch.equal(optimizer.state[net[0].weight]["exp_avg"], kept)
    net(torch.randn(3, 40, device="cuda")).sum().backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_a_model_that_is_itself_the_layer_is_refused():
    """Its caller would go on with the old layer."""
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=16, compact_at=[0.6])
    model = nn.Linear(32, 32)
    with pytest.raises(ValueError, match=r"\[MagnitudePruner\] the model is itself the layer .* torch.nn.Sequential"):
        pruner.prepare(model)
    assert not pruner.layers
    assert set(model.state_dict()) == {"weight", "bias"}
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    with pytest.raises(ValueError, match=r"\[compact\] the model is itself the layer"):
        bss.compact_(model, masks, torch.optim.SGD(model.parameters(), 0.1), block_size=16)


def test_layers_of_a_pruner_are_refused():
    """It would go on with the old ones."""
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = bss.MagnitudePruner(bss.PolynomialDecay(0.5, 0, 4, frequency=1), block_size=16)
    pruner.prepare(model)
    pruner.attach(optimizer)
    for verb, more in ((bss.compact_, (optimizer,)), (bss.convert, ())):
        with pytest.raises(ValueError, match="0 has a MagnitudePruner, which would go on with the old layer"):
            verb(model, pruner.masks(), *more, block_size=16)
    assert isinstance(model[0], nn.Linear)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    model = pruner.convert(model, min_speedup=0)
    rewiring = bss.SET(bss.CosineDrop(10, frequency=2))
    rewiring.prepare(model)
    rewiring.attach(torch.optim.SGD(model.parameters(), 0.1))
    live = torch.from_numpy(model[0].layout.mask())
    masks = {"0": live & (torch.arange(16).view(4, 4) % 3 > 0)}
    with pytest.raises(ValueError, match="0 has a SET, which would go on with the old layer"):
        bss.compact_(model, masks, block_size=16)
    rewiring.detach()
    bss.compact_(model, masks, block_size=16)
    assert model[0].layout.blocks == int(masks["0"].sum()) < int(live.sum())


@pytest.mark.parametrize("verb", [bss.compact_, bss.convert])
def test_masks_are_a_dict(verb):
    with pytest.raises(TypeError, match="masks is None, needs a dict of tensors"):
        verb(nn.Sequential(nn.Linear(32, 32)), None)


def test_layers_of_sparsifiers_that_do_nothing_any_more_are_free():
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=16)
    pruner.prepare(model)
    pruner.attach(optimizer)
    pruner.detach()
    bss.compact_(model, pruner.masks(), optimizer, block_size=16)

    def train_and_forget():
        rewiring = bss.SET(bss.CosineDrop(10, frequency=2))
        rewiring.prepare(model)
        rewiring.attach(torch.optim.SGD(model.parameters(), 0.1))

    train_and_forget()
    gc.collect()
    masks = bss.sparsify_(model, "magnitude", sparsity=0.75, block_size=16)
    assert bss.convert(model, masks, block_size=16, min_speedup=0)[0].layout.blocks == 4
