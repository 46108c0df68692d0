"""Sparsifiers of dense training: what all of them promise, and pruning by magnitude."""

import copy
import dataclasses
import gc
import io
import math
import warnings

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout

pytestmark = pytest.mark.usefixtures("one_thread")
CUBIC = bss.PolynomialDecay(0.75, begin_step=2, end_step=12, frequency=2)


def network():
    return nn.Sequential(nn.Linear(32, 60), nn.GELU(), nn.Linear(60, 40), nn.GELU(), nn.Linear(40, 5))


def pruner_of(kind, schedule=CUBIC, ignored=r"^4", **options):
    return kind(schedule, block_size=8, ignore=ignored, **options)


KINDS = {
    "magnitude": lambda: pruner_of(bss.MagnitudePruner),
    "magnitude, no regrowth": lambda: pruner_of(bss.MagnitudePruner, regrow=False),
    "magnitude, global": lambda: pruner_of(bss.MagnitudePruner, scope="global"),
    "lasso": lambda: pruner_of(bss.GroupLasso, strength=3.0),
    "lasso, ramp": lambda: pruner_of(bss.GroupLasso, bss.ThresholdRamp(0.18, 0, 4, 12, frequency=2)),
    "l0": lambda: pruner_of(bss.L0),
    "l0, global": lambda: pruner_of(bss.L0, scope="global"),
    "blast": lambda: pruner_of(bss.Blast, grow=0.3),
}


def optimizer_of(model, pruner, kind=torch.optim.AdamW, **options):
    more = [{"params": pruner.parameters(), "lr": 0.02, "weight_decay": 0.0}] if isinstance(pruner, bss.L0) else []
    return kind([{"params": list(model.parameters())}, *more], **{"lr": 1e-2, **options})


def train(model, optimizer, steps, start=0):
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(16, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :5].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepared(kind="magnitude", optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(1)
    model, pruner = network(), KINDS[kind]()
    pruner.prepare(model)
    made = optimizer_of(model, pruner, optimizer, **options)
    pruner.attach(made)
    return model, pruner, made


def counts(pruner):
    return {name: int(mask.sum()) for name, mask in pruner.masks().items()}


def live(blocks, sparsity):
    return blocks - math.floor(blocks * sparsity + 0.5)


# ---- What all promise ------------------------------------------------------------------------------------------------


def test_preparing_changes_no_parameter():
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    names, x = list(dict(model.named_parameters())), torch.randn(3, 32)
    y = model(x)
    assert bss.MagnitudePruner(CUBIC, block_size=8, ignore="4").prepare(model) is model
    after = model.state_dict()
    assert list(dict(model.named_parameters())) == names
    assert set(after) - set(before) == {"0.weight_gates", "2.weight_gates"}
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert after["0.weight_gates"].dtype == torch.float32
    assert after["0.weight_gates"].shape == (8, 4)
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("kind", [k for k in KINDS if "ramp" not in k])
def test_the_density_is_exact(kind):
    model, pruner, optimizer = prepared(kind)
    blocks = {"0": 8 * 4, "2": 5 * 8}
    for t in range(1, 16):
        train(model, optimizer, 1, t)
        sparsity = CUBIC.sparsity(t if CUBIC.acts_at(t) or t > 12 else t - t % 2)
        if kind.startswith("l0") and t < 12:
            sparsity = 0
        if "global" in kind:
            assert sum(counts(pruner).values()) == live(72, sparsity)
        else:
            assert counts(pruner) == {name: live(n, sparsity) for name, n in blocks.items()}
    assert pruner.finished
    for target in pruner.targets:
        assert not target.norms()[~pruner.masks()[target.name]].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ],
)
def test_dead_blocks_are_zero_after_each_step(kind, optimizer, options):
    model, pruner, made = prepared(kind, optimizer, **options)
    for t in range(14):
        train(model, made, 1, t)
        for target in pruner.targets:
            mask = pruner.masks()[target.name]
            assert not target.norms()[~mask].any()
    assert min(counts(pruner).values()) < 32


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_bit_for_bit(kind):
    for stop in (3, 7, 13):
        model, pruner, optimizer = prepared(kind)
        train(model, optimizer, stop)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), pruner.state_dict()], file)
        train(model, optimizer, 16 - stop, stop)

        torch.manual_seed(7)
        again, same = network(), KINDS[kind]()
        same.prepare(again)
        other = optimizer_of(again, same)
        same.attach(other)
        train(again, other, 2, 90)  # whatever was before is forgotten
        file.seek(0)
        for part, state in zip((again, other, same), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        train(again, other, 16 - stop, stop)
        assert_equal(model.state_dict(), again.state_dict())
        assert_equal(pruner.state_dict(), same.state_dict())
        assert_equal(optimizer.state_dict()["state"], other.state_dict()["state"])


def assert_equal(one, another):
    if isinstance(one, dict):
        assert one.keys() == another.keys()
        for key in one:
            assert_equal(one[key], another[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, another)
    else:
        assert one == another


@pytest.mark.parametrize("kind", KINDS)
def test_an_ordinary_model_is_left(kind):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 13)
    model.eval()
    x = torch.randn(3, 32)
    y, masks = model(x), pruner.masks()
    pruner.squash_mask()
    assert list(model.state_dict()) == list(network().state_dict())
    assert torch.equal(model(x), y)
    assert all(torch.equal(masks[n], bss.block_norms(model.get_submodule(n).weight, 8) > 0) for n in masks)
    train(model, optimizer, 1, 13)
    assert bss.block_norms(model[0].weight, 8).all(), "nothing holds it any more"


@pytest.mark.parametrize("kind", ["magnitude", "l0"])
def test_conversion(kind):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 13 if kind == "magnitude" else 6)
    if kind == "l0":
        with torch.no_grad():
            pruner.log_alpha["2"][1:3] = -9.0  # gates that are shut
    model.eval()
    x, masks = torch.randn(3, 32), pruner.masks()
    y = model(x)
    with pytest.raises(ValueError, match="min_speedup is -1, needs 0 or more"):
        pruner.convert(model, min_speedup=-1)
    assert pruner.layers, "is there as before"
    converted = pruner.convert(model, min_speedup=0)
    assert isinstance(converted[0], bst.BlockSparseLinear)
    assert converted[0].layout.blocks == int(masks["0"].sum())
    assert not [key for key in converted.state_dict() if key.endswith("_gates")]
    torch.testing.assert_close(converted(x), y, rtol=1e-4, atol=1e-5)
    left = nn.Sequential(nn.Linear(32, 64))
    slow = bss.MagnitudePruner(bss.Constant(0.5), block_size=8)
    slow.prepare(left)
    assert slow.convert(left, min_speedup=1e9) is left
    assert list(left.state_dict()) == ["0.weight", "0.bias"], "not fast enough: as it was, with zeros"


@pytest.mark.parametrize("kind", [bss.MagnitudePruner, bss.GroupLasso, bss.Blast])
def test_a_run_that_moves_layers_is_resumed_bit_for_bit(kind):
    def started(seed):
        torch.manual_seed(seed)
        model, pruner = network(), pruner_of(kind, compact_at=[0.6, 0.3])
        pruner.prepare(model)
        optimizer = optimizer_of(model, pruner)
        pruner.attach(optimizer)
        return pruner, model, optimizer

    for stop in (3, 6, 13):
        parts = started(1)
        train(parts[1], parts[2], stop)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        train(parts[1], parts[2], 16 - stop, stop)
        again = started(7)
        file.seek(0)
        for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        train(again[1], again[2], 16 - stop, stop)
        assert isinstance(again[1][0], bst.BlockSparseLinear)
        assert_equal(parts[1].state_dict(), again[1].state_dict())
        assert_equal(parts[0].state_dict(), again[0].state_dict())
        assert counts(parts[0]) == {"0": 8, "2": 10}


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused):
    model, pruner, optimizer = prepared("magnitude", fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(6):
        loss = model(torch.randn(4, 32)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if t == 3:
            model[2].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    assert pruner.steps == 5
    assert counts(pruner)["0"] == live(32, CUBIC.sparsity(4))


def test_a_gradient_that_is_not_finite():
    model, pruner, optimizer = prepared("magnitude", torch.optim.SGD, lr=0.0)
    train(model, optimizer, 3)
    before = pruner.masks()

    def bad_step():
        optimizer.zero_grad()
        model(torch.randn(4, 32)).sum().backward()
        model[2].weight.grad[0, 0] = math.nan
        weight = model[2].weight.detach().clone()
        optimizer.step()
        model[2].weight.data.copy_(weight)

    with pytest.warns(UserWarning, match=r"step 4: 2 has a gradient or weight that is not finite: blocks stay"):
        bad_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bad_step()
    assert all(torch.equal(before[name], mask) for name, mask in pruner.masks().items())
    train(model, optimizer, 1, 5)  # the next step that is finite makes up for it
    assert counts(pruner)["0"] == live(32, CUBIC.sparsity(6))


def test_steps_by_hand():
    torch.manual_seed(1)
    model, pruner = network(), KINDS["magnitude"]()
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    for t in range(14):
        train(model, optimizer, 1, t)
        pruner.step()
    other, same, made = prepared()
    train(other, made, 14)
    assert_equal(model.state_dict(), other.state_dict())
    same.detach()
    steps = same.steps
    train(other, made, 1)
    assert same.steps == steps


def test_two_optimizers():
    model, pruner = network(), KINDS["magnitude"]()
    pruner.prepare(model)
    one, another = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2:].parameters())
    pruner.attach(one, another)
    for _ in range(3):
        model(torch.randn(4, 32)).sum().backward()
        one.step()
        another.step()
    assert pruner.steps == 3


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_dead_blocks_are_zero(kind):
    """And those of live ones are what they are without a pruner, also where micro-batches add up."""
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 13)
    optimizer.zero_grad()
    free = copy.deepcopy(model)  # has no hooks
    for _ in range(3):
        x = torch.randn(4, 32)
        model(x).sum().backward()
        free(x).sum().backward()
    spared = 0
    for target in pruner.targets:
        whole, mask = free.get_submodule(target.path).weight.grad, pruner.masks()[target.name]
        spared += int(target.norms(tensor=whole)[~mask].count_nonzero())
        torch.testing.assert_close(target.parameter.grad, target.kept(whole, mask), rtol=0, atol=0)
    assert spared > 0


@pytest.mark.parametrize("kind", ["magnitude", "blast", "l0"])
def test_compiled_models(kind):
    """Also one that was compiled, and had run, before it was prepared."""
    runs = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model, pruner = network(), KINDS[kind]()
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        forward(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
        pruner.prepare(model)
        optimizer = optimizer_of(model, pruner)
        pruner.attach(optimizer)
        train(forward, optimizer, 14)
        runs.append({**model.state_dict(), **pruner.masks(), "y": forward(torch.ones(16, 32))})
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-3, atol=1e-4)


def test_second_order_gradients_see_the_mask():
    model, pruner, optimizer = prepared("magnitude")
    train(model, optimizer, 13)
    mask = pruner.masks()["0"]
    (gradient,) = torch.autograd.grad(model(torch.randn(4, 32)).square().sum(), model[0].weight, create_graph=True)
    assert not bss.block_norms(gradient, 8)[~mask].any()
    gradient.square().sum().backward()
    assert not bss.block_norms(model[0].weight.grad, 8)[~mask].any()
    assert bss.block_norms(model[0].weight.grad, 8)[mask].any()


@pytest.mark.parametrize("kind", [bss.MagnitudePruner, bss.Blast, bss.GroupLasso, bss.L0])
def test_other_layers(kind):
    """Filters, recurrent weights and our own modules end with the exact number of blocks, too."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(32, 24, 3, padding=1)
            self.up = nn.ConvTranspose1d(24, 20, 3, padding=1)
            self.rnn = nn.LSTM(20, 16, batch_first=True)
            self.own = bst.BlockSparseLinear(16, 48, Layout.from_graph("random(6,2,0.75)", 8, seed=0))
            self.block = bst.BlockSparseConv1d(48, 32, 3, Layout.from_graph("dense(4,6)", 8), padding="same")

        def forward(self, x):
            y, _ = self.rnn(self.up(self.conv(x)).transpose(1, 2))
            return self.block(self.own(y).transpose(1, 2)).tanh()

    model, pruner = (
        Other(),
        pruner_of(kind, ignored=()),
    )
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    pruner.attach(optimizer)
    for t in range(13):
        x = torch.randn(4, 32, 6, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    blocks = {"conv": 12, "up": 9, "rnn.weight_hh_l0": 16, "own": 12, "block": 24}
    assert counts(pruner) == {name: live(n, 0.75) for name, n in blocks.items()}
    for target in pruner.targets:
        assert torch.equal(target.norms() > 0, pruner.masks()[target.name])


# ---- By magnitude ----------------------------------------------------------------------------------------------------


def test_the_largest_blocks_stay():
    model, pruner, optimizer = prepared("magnitude, no regrowth", torch.optim.SGD, lr=0.0)
    norms = {t.name: t.norms() for t in pruner.targets}
    train(model, optimizer, 12)
    for name, mask in pruner.masks().items():
        assert norms[name][mask].min() > norms[name][~mask].max()


def test_of_equal_blocks_the_first_stay():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        nn.init.ones_(layer.weight)
    for scope, wanted in (("layer", [5, 5]), ("global", [10, 0])):
        pruner = bss.MagnitudePruner(bss.Constant(0.7), block_size=8, scope=scope)
        pruner.prepare(copy.deepcopy(model))
        assert list(counts(pruner).values()) == wanted
        for mask in pruner.masks().values():
            assert torch.equal(mask.flatten(), torch.arange(16) < mask.sum())


def test_masks_shrink_without_regrowth():
    model, pruner, optimizer = prepared("magnitude, no regrowth", lr=0.1)
    before = pruner.masks()
    for t in range(15):
        train(model, optimizer, 1, t)
        assert all(not (mask & ~before[name]).any() for name, mask in pruner.masks().items())
        before = pruner.masks()


def test_blocks_come_back_as_they_were():
    model, pruner, optimizer = prepared("magnitude", torch.optim.SGD, lr=0.0)
    train(model, optimizer, 8)
    before = model[0].weight.detach().clone()
    mask = pruner.masks()["0"]
    shadow = pruner.layers["0"].shadow.clone()
    assert torch.equal(bss.block_norms(shadow, 8) > 0, ~mask)
    pruner.layers["0"].target.scale_(model[0].weight.data, torch.where(mask, 1e-3, 1.0))  # live blocks became small
    train(model, optimizer, 2, 8)
    after = pruner.masks()["0"]
    back = after & ~mask
    assert back.sum() == after.sum(), "those that were dropped are larger, and come back"
    full = back.repeat_interleave(8, 0).repeat_interleave(8, 1)[:60]
    assert torch.equal(model[0].weight[full], shadow[full])
    gone = mask & ~after
    full = gone.repeat_interleave(8, 0).repeat_interleave(8, 1)[:60]
    torch.testing.assert_close(pruner.layers["0"].shadow[full], before[full] * 1e-3)


def test_a_sparse_model_is_pruned_further():
    model = network()
    first = bss.MagnitudePruner(bss.Constant(0.5), block_size=8, ignore="4")
    first.prepare(model)
    masks = first.masks()
    first.squash_mask()
    for options in ({}, {"masks": masks}):
        again = copy.deepcopy(model)
        pruner = pruner_of(bss.MagnitudePruner)
        pruner.prepare(again, **options)
        optimizer = optimizer_of(again, pruner)
        pruner.attach(optimizer)
        for t in range(14):
            train(again, optimizer, 1, t)
            assert all(not (mask & ~masks[name]).any() for name, mask in pruner.masks().items()), "zeros stay"
        assert counts(pruner) == {"0": 8, "2": 10}
    pruner = pruner_of(bss.MagnitudePruner)
    pruner.prepare(model, {"0": torch.ones(8, 4), "2": torch.ones(5, 8)})
    assert counts(pruner) == {"0": 32, "2": 40}, "unless they are said to be free"


def test_weights_that_are_all_zero_are_no_pruned_ones():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    nn.init.zeros_(model[1].weight)
    pruner = bss.MagnitudePruner(CUBIC, block_size=8)
    pruner.prepare(model)
    assert counts(pruner) == {"0": 16, "1": 16}


def test_gates_travel_with_the_model():
    model, pruner, optimizer = prepared()
    train(model, optimizer, 13)
    loaded, other = network(), KINDS["magnitude"]()
    other.prepare(loaded)
    loaded.load_state_dict(model.state_dict())
    assert_equal(other.masks(), pruner.masks())
    copied = copy.deepcopy(model)  # whose gates nobody owns: the next pruner goes on from them
    more = pruner_of(bss.MagnitudePruner, bss.Constant(0.9))
    more.prepare(copied)
    assert counts(more) == {"0": live(32, 0.9), "2": live(40, 0.9)}
    assert all(not (mask & ~pruner.masks()[name]).any() for name, mask in more.masks().items())
    moved = model.double()
    assert moved[0].weight_gates.dtype == torch.float64
    assert_equal(pruner.masks(), other.masks())


def test_the_report():
    model, pruner, optimizer = prepared("magnitude, no regrowth", torch.optim.SGD, lr=0.0)
    norms = bss.block_norms(model[0].weight, 8)
    train(model, optimizer, 12)
    report = pruner.report()
    row = report.rows[0]
    assert (row.name, row.shape, row.block_size, row.blocks, row.live) == ("0", (60, 32), 8, 32, 8)
    assert (row.sparsity, row.density) == (0.75, 0.25)
    mask = pruner.masks()["0"]
    assert row.norm_kept == pytest.approx(float(norms[mask].norm() / norms.norm()), rel=1e-5)
    assert row.now_s > 0
    assert row.expected_s > 0
    assert pruner.report(tokens=0).rows[0].now_s is None
    text = str(bss.Report(12, [dataclasses.replace(row, now_s=3e-5, expected_s=1e-5)]))
    assert "60 x 32" in text
    assert "75.00%" in text
    assert "30.0 us" in text
    assert "3.00x" in text
    assert text.splitlines()[-1] == "step 12: 25.00% of all blocks are live"


# ---- Mistakes --------------------------------------------------------------------------------------------------------


def test_an_optimizer_without_the_parameter():
    model, pruner = network(), KINDS["magnitude"]()
    pruner.prepare(model)
    with pytest.raises(ValueError, match=r"the optimizer does not hold the parameter of 2$"):
        pruner.attach(torch.optim.SGD(model[0].parameters(), lr=0.1))
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    l0 = KINDS["l0"]()
    l0.prepare(other := network())
    with pytest.raises(ValueError, match=r"does not hold the parameter of the gates of 0 \(pruner.parameters\(\)\)"):
        l0.attach(torch.optim.SGD(other.parameters(), lr=0.1))


def test_two_sparsifiers_on_one_layer():
    model, pruner, _ = prepared()
    before = model.state_dict()
    with pytest.raises(ValueError, match="0 has a MagnitudePruner already: leave it out by ignore, or call its squash"):
        KINDS["blast"]().prepare(model)
    assert list(before) == list(model.state_dict())
    bss.Blast(CUBIC, block_size=8, targets="1").prepare(nn.Sequential(model[0], nn.Linear(16, 16)))  # the other layer
    pruner.squash_mask()
    KINDS["blast"]().prepare(model)


def test_a_sparsifier_that_moves_blocks_and_a_pruner():
    model = nn.Sequential(bst.BlockSparseLinear(64, 64, Layout.from_graph("random(8,8,0.5)", 8)))
    rewiring = bss.SET(bss.CosineDrop(100))
    rewiring.prepare(model)
    with pytest.raises(ValueError, match="0 has a SET or RigL already, which moves blocks"):
        bss.MagnitudePruner(CUBIC, block_size=8).prepare(model)
    other = nn.Sequential(bst.BlockSparseLinear(64, 64, Layout.from_graph("random(8,8,0.5)", 8)))
    bss.MagnitudePruner(CUBIC, block_size=8).prepare(other)
    with pytest.raises(ValueError, match="0 has a sparsifier already"):
        bss.SET(bss.CosineDrop(100)).prepare(other)


def test_a_pruner_that_nobody_has_any_more():
    """Its gates stay, and the next one goes on from them."""
    model, pruner, optimizer = prepared()
    train(model, optimizer, 13)
    masks = pruner.masks()
    del pruner, optimizer
    gc.collect()
    model(torch.randn(4, 32)).sum().backward()
    assert not bss.block_norms(model[0].weight.grad, 8)[~masks["0"]].any()
    other = KINDS["blast"]()
    other.prepare(model)
    assert_equal(other.masks(), masks)


@pytest.mark.parametrize("kind", ["magnitude", "l0"])
def test_nothing_is_left_of_a_preparation_that_fails(kind, monkeypatch):
    model, pruner = network(), KINDS[kind]()
    before = {key: value.clone() for key, value in model.state_dict().items()}

    works = type(pruner)._prepared

    def fails(self, model):
        works(self, model)
        raise MemoryError

    monkeypatch.setattr(type(pruner), "_prepared", fails)
    with pytest.raises(MemoryError):
        pruner.prepare(model, {"0": torch.zeros(8, 4), "2": torch.zeros(5, 8)})
    assert_equal(before, dict(model.state_dict()))
    assert not model[0]._forward_pre_hooks
    monkeypatch.undo()
    pruner.prepare(model)


def test_the_order_of_calls():
    model, pruner = network(), KINDS["magnitude"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"call prepare\(model\) before attach"):
        pruner.attach(optimizer)
    with pytest.raises(RuntimeError, match=r"call prepare\(model\) first"):
        pruner.step()
    with pytest.raises(RuntimeError, match=r"call prepare\(model\) before load_state_dict"):
        pruner.load_state_dict({})
    pruner.prepare(model)
    with pytest.raises(RuntimeError, match="prepare was called before"):
        pruner.prepare(network())
    pruner.attach(optimizer)
    with pytest.raises(RuntimeError, match=r"is attached already: call detach\(\) first"):
        pruner.attach(optimizer)
    with pytest.raises(RuntimeError, match="is attached to an optimizer, which calls step itself"):
        pruner.step()
    pruner.detach()
    with pytest.raises(TypeError, match=r"optimizer is a Linear, needs a torch.optim.Optimizer"):
        pruner.attach(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="attach needs an optimizer"):
        pruner.attach()


def test_wrong_options():
    with pytest.raises(ValueError, match="scope is 'all', needs 'layer' or 'global'"):
        bss.MagnitudePruner(CUBIC, scope="all")
    with pytest.raises(TypeError, match=r"schedule is 0.9, needs a schedule such as PolynomialDecay"):
        bss.MagnitudePruner(0.9)
    with pytest.raises(ValueError, match="grow is 2, needs 0 to 1"):
        bss.Blast(CUBIC, grow=2)
    with pytest.raises(ValueError, match="strength is -1, needs 0 or more"):
        bss.GroupLasso(CUBIC, strength=-1)
    with pytest.raises(ValueError, match="the schedule ends at step 0, needs 1 or more"):
        bss.L0(bss.Constant(0.5))
    with pytest.warns(UserWarning, match="at sparsity 0.9 no block is left of 0, which have too few"):
        bss.MagnitudePruner(bss.PolynomialDecay(0.9, 5, 9), block_size=32).prepare(nn.Sequential(nn.Linear(64, 64)))


def test_states_of_others():
    model, pruner, optimizer = prepared()
    train(model, optimizer, 5)
    state, before = pruner.state_dict(), copy.deepcopy(model.state_dict())
    wrong = copy.deepcopy(state)
    wrong["layers"]["2"]["mask"] = torch.ones(3, 3)
    with pytest.raises(
        ValueError, match=r"that of 2 is \[3, 3\] \(hash \w{16}\), needs \[5, 8\] \(hash \w{16} with all"
    ):
        pruner.load_state_dict(wrong)
    wrong = copy.deepcopy(state)
    wrong["layers"]["7"] = wrong["layers"].pop("2")
    with pytest.raises(ValueError, match="there is none for 2; there is no weight for 7"):
        pruner.load_state_dict(wrong)
    other = KINDS["blast"]()
    other.prepare(network())
    with pytest.raises(ValueError, match="the state is of MagnitudePruner in format 1, needs Blast"):
        other.load_state_dict(state)
    other = KINDS["magnitude, no regrowth"]()
    other.prepare(network())
    with pytest.raises(ValueError, match="the state of 0 was saved with another `regrow`"):
        other.load_state_dict(state)
    with pytest.raises(TypeError, match="state is a list"):
        pruner.load_state_dict([])
    with pytest.raises(ValueError, match="the state is of nothing in format None"):
        pruner.load_state_dict({})
    assert_equal(before, model.state_dict())
    longer = pruner_of(bss.MagnitudePruner, bss.PolynomialDecay(0.75, 2, 40, frequency=2))
    longer.prepare(network())
    with pytest.warns(UserWarning, match=r"was saved with PolynomialDecay\(.*end_step=12.*goes on with .*end_step=40"):
        longer.load_state_dict(state)
    assert longer.steps == 5
