"""Pruning by magnitude, what came of it, and mistakes."""

import copy
import dataclasses
import gc
import math
import warnings

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from pruners import CUBIC, KINDS, assert_equal, counts, live, network, optimizer_of, prepared, pruner_of, train

pytestmark = pytest.mark.usefixtures("one_thread")


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
    with pytest.raises(ValueError, match=r"the optimizer does not hold the parameter of 2: give it, or leave out by"):
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
    with pytest.raises(ValueError, match="multiplier_rate is nan, needs a finite number"):
        bss.L0(CUBIC, multiplier_rate=float("nan"))
    with pytest.raises(TypeError, match="multipliers is 1, needs two numbers"):
        bss.L0(CUBIC, multipliers=1)
    for schedule in (bss.CosineDrop(9), bss.ThresholdRamp(0.1, 1, 2, 5)):  # which would fail in mid-training
        with pytest.raises(TypeError, match=f"schedule is a {type(schedule).__name__}, needs a schedule such as"):
            bss.MagnitudePruner(schedule)
    with pytest.warns(UserWarning, match="at sparsity 0.9 no block is left of 0: take smaller blocks"):
        bss.MagnitudePruner(bss.PolynomialDecay(0.9, 5, 9), block_size=32).prepare(nn.Sequential(nn.Linear(64, 64)))
    model = nn.Sequential(nn.Linear(64, 64))
    pruner = bss.MagnitudePruner(bss.PolynomialDecay(0.9, 5, 9), block_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no block is left"):
            pruner.prepare(model)
    assert list(model.state_dict()) == ["0.weight", "0.bias"], "where warnings are errors, too, nothing was changed"


class TooMuch:
    """A schedule of a user's own."""

    begin_step, end_step, final_sparsity = 1, 3, 0.5

    def acts_at(self, step):
        return step > 0

    def sparsity(self, step):
        return 1.7


@pytest.mark.parametrize("kind", [bss.MagnitudePruner, bss.Blast])
def test_a_schedule_of_ones_own_that_says_nonsense(kind):
    model, pruner = network(), kind(TooMuch(), block_size=8, ignore="4")
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    pruner.attach(optimizer)
    with pytest.raises(ValueError, match=rf"\[{kind.__name__}\] the schedule's sparsity is 1.7, needs 0 <="):
        train(model, optimizer, 1)


def test_wrong_choices_of_blocks():
    scores = {"a": torch.rand(4, 4)}
    for sparsity in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"\[choose_blocks\] sparsity is"):
            bss.choose_blocks(scores, sparsity)
    with pytest.raises(ValueError, match="scope is 'row', needs 'layer' or 'global'"):
        bss.choose_blocks(scores, 0.5, "row")
    with pytest.raises(ValueError, match=r"\[choose_blocks\] scores of b have NaN, need numbers"):
        bss.choose_blocks({"a": torch.ones(2, 2), "b": torch.tensor([[1.0, math.nan]])}, 0.5)


def test_a_pruner_without_a_model():
    pruner, model = bss.MagnitudePruner(CUBIC, block_size=8), network()
    for verb, call in (("report", pruner.report), ("convert", lambda: pruner.convert(model))):
        with pytest.raises(RuntimeError, match=rf"{verb} needs a model: call prepare\(model\) first"):
            call()
    pruner.prepare(model)
    pruner.squash_mask()
    with pytest.raises(RuntimeError, match="convert needs a model"):  # else a dense model would come back
        pruner.convert(model)


def test_a_buffer_of_the_users_is_not_overwritten():
    model = network()
    model[0].register_buffer("weight_gates", torch.zeros(3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"0 has a tensor \[3\] of the name weight_gates, where gates \["):
        bss.MagnitudePruner(CUBIC, block_size=8).prepare(model)
    assert_equal(before, model.state_dict())


def test_damaged_states_change_nothing():
    _, pruner, _ = prepared()
    state, before = pruner.state_dict(), copy.deepcopy(pruner.state_dict())
    layer = state["layers"]["2"]
    for wrong, message in (
        ({k: v for k, v in state.items() if k != "steps"}, "the state is damaged: KeyError: 'steps'"),
        ({**state, "steps": "many"}, "the state is damaged: .* steps is 'many', needs an integer"),
        (
            {**state, "layers": {**state["layers"], "2": {**layer, "dropped": torch.zeros(1, 1)}}},
            "dropped of 2 is .1, 1",
        ),
        ({**state, "layers": {**state["layers"], "2": {**layer, "shadow": torch.zeros(1, 1)}}}, "shadow of 2 is .1, 1"),
        ({k: v for k, v in state.items() if k != "schedule"}, "the state is damaged: KeyError: 'schedule'"),
        ({**state, "regrown": {"2": {3: torch.zeros(1, 1)}}}, "regrown of 2 is .1, 1"),
        ({**state, "regrown": {"2": torch.zeros(1, 1)}}, "the state is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            pruner.load_state_dict(wrong)
        assert str(pruner.state_dict()) == str(before)
    _, pruner, _ = prepared("l0")
    state, before = pruner.state_dict(), copy.deepcopy(pruner.state_dict())
    log_alpha = {name: torch.ones_like(values) for name, values in state["log_alpha"].items()}
    for damage, message in (
        ({"multipliers": {"0": [1.0], "2": [1.0, 2.0]}}, "multipliers of 0 are .*, needs two numbers"),
        ({"multipliers": {"0": 1, "2": 2}}, "the state is damaged"),
        ({"gated": None}, "the state is damaged: .* gated is None, needs True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            pruner.load_state_dict({**state, "log_alpha": log_alpha, **damage})
        assert str(pruner.state_dict()) == str(before)


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
