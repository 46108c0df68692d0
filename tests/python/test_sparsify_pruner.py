"""What all sparsifiers of dense training promise."""

import copy
import io

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from pruners import CUBIC, KINDS, assert_equal, counts, live, network, optimizer_of, prepared, pruner_of, train

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_the_model_computes_as_the_model_does(kind):
    model, _, optimizer = prepared(kind)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, value, count: value).eval()
    x = torch.randn(3, 32)
    for t in range(14):  # with gates of L0, and after their end
        train(model.train(), optimizer, 1, t)
        average.update_parameters(model)
        y = average(x)
        assert torch.equal(y, model.eval()(x))


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


@pytest.mark.parametrize("kind", [bss.MagnitudePruner, bss.GroupLasso, bss.Blast])
def test_gradients_are_masked_in_the_first_step_of_a_run_whose_layers_had_moved(kind):
    torch.manual_seed(1)
    model, pruner = network(), pruner_of(kind, compact_at=[0.6])
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    pruner.attach(optimizer)
    train(model, optimizer, 13)
    again, same = network(), pruner_of(kind, compact_at=[0.6])
    same.prepare(again)
    same.attach(optimizer_of(again, same))
    same.load_state_dict(pruner.state_dict())
    again.load_state_dict(model.state_dict())
    again(torch.randn(16, 32)).square().mean().backward()
    for target in same.targets:  # clipping sees these gradients before the pruner's own first step
        dead = ~same.masks()[target.name]
        assert bool((dead & target.present()).any())
        assert not target.norms(tensor=target.parameter.grad)[dead].any()


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


def test_a_schedule_that_is_wrong_at_step_0_leaves_the_model_alone():
    class Wrong:
        final_sparsity, begin_step, end_step = 0.5, 0, 5

        def acts_at(self, step):
            return True

        def sparsity(self, step):
            return 1.5

    model = nn.Sequential(nn.Linear(32, 32))
    pruner = bss.MagnitudePruner(Wrong(), block_size=16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1\.5"):
            pruner.prepare(model)
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    with pytest.raises(TypeError, match="needs a schedule such as PolynomialDecay"):
        bss.MagnitudePruner(bss.Constant)


def test_a_scheduler_of_rates_is_no_optimizer():
    model = nn.Sequential(nn.Linear(32, 32))
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=16)
    pruner.prepare(model)
    rates = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 2)
    with pytest.raises(TypeError, match="optimizer is a StepLR, needs"):
        pruner.attach(rates)


def test_a_function_that_chooses_takes_a_name_and_a_module():
    with pytest.raises(TypeError, match="a function of name and module"):
        bss.MagnitudePruner(bss.Constant(0.5), targets=lambda name: True).prepare(nn.Sequential(nn.Linear(32, 32)))


def test_a_state_that_is_assigned_has_its_first_gradient_masked():
    model = nn.Sequential(nn.Linear(32, 32))
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=16)
    pruner.prepare(model)
    model.load_state_dict({name: entry.clone() for name, entry in model.state_dict().items()}, assign=True)
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 32)).square().mean().backward()
    weight = model[0].weight
    assert weight.grad.any()
    assert not weight.grad[weight == 0].any()
