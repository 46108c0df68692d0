"""Copies of a model that has a pruner, with and without the pruner."""

import copy

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from pruners import KINDS, assert_equal, network, optimizer_of, prepared, pruner_of, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [5, 13])
def test_a_copy_of_both_trains_as_they_do(kind, steps):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, steps)
    again, same, other = copy.deepcopy((model, pruner, optimizer))
    assert not same.attached
    same.attach(other)
    train(model, optimizer, 16 - steps, steps)
    train(again, other, 16 - steps, steps)
    assert pruner.finished
    assert_equal(model.state_dict(), again.state_dict())
    assert_equal(pruner.state_dict(), same.state_dict())
    assert_equal(optimizer.state_dict()["state"], other.state_dict()["state"])
    same.squash_mask()
    assert list(again.state_dict()) == list(network().state_dict())
    assert "0.weight_gates" in model.state_dict()
    assert pruner.attached


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_both_masks_its_first_gradient(kind):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 13)
    again, same = copy.deepcopy((model, pruner))
    for one in (model, again):
        one.zero_grad()
        one(torch.ones(4, 32)).square().sum().backward()
    for mine, its in zip(pruner.targets, same.targets, strict=True):
        dead = ~same.masks()[its.name]
        assert dead.any()
        assert not its.norms(tensor=its.parameter.grad)[dead].any()
        assert torch.equal(its.parameter.grad, mine.parameter.grad)


def test_a_copy_of_both_has_gates_of_its_own():
    model, pruner, optimizer = prepared("l0")
    train(model, optimizer, 5)
    again, same = copy.deepcopy((model.eval(), pruner))
    x = torch.randn(3, 32)
    before = model(x)
    assert torch.equal(again(x), before)
    with torch.no_grad():
        for log_alpha in same.parameters():
            log_alpha.copy_(torch.randn_like(log_alpha) * 2)
    changed = again(x)
    assert not torch.allclose(changed, before)
    pruner.squash_mask()
    torch.testing.assert_close(model(x), before)
    assert torch.equal(again(x), changed)
    same.squash_mask()
    torch.testing.assert_close(again(x), changed)


def test_a_copy_has_layers_that_have_moved():
    model, pruner = network(), pruner_of(bss.MagnitudePruner, compact_at=[0.6])
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    pruner.attach(optimizer)
    train(model, optimizer, 9)
    again, same, other = copy.deepcopy((model, pruner, optimizer))
    same.attach(other)
    for one, its in ((model, optimizer), (again, other)):
        assert isinstance(one[0], bst.BlockSparseLinear)
        train(one, its, 6, 9)
    assert_equal(model.state_dict(), again.state_dict())


def test_another_pruner_cannot_have_what_the_copied_one_has():
    again, _same = copy.deepcopy(prepared("magnitude")[:2])
    with pytest.raises(ValueError, match="0 has a MagnitudePruner already"):
        pruner_of(bss.MagnitudePruner).prepare(again)


# ---- What is made of copies of the model alone -----------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_pruner_is_left_in_a_converted_copy(kind, by_hand):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 13)
    copied, masks = copy.deepcopy(model), pruner.masks()
    x = torch.randn(3, 32)
    want = model(x)
    convert = (
        (lambda *given, **options: bss.convert(*given, masks, block_size=8, **options)) if by_hand else pruner.convert
    )
    assert convert(copied, min_speedup=1e9) is copied
    assert list(copied.state_dict()) == list(network().state_dict()), "no layer was fast enough"
    assert torch.equal(copied(x), want)
    assert all(not bss.block_norms(copied.get_submodule(name).weight, 8)[~mask].any() for name, mask in masks.items())


def test_gates_of_a_pruner_that_goes_on_stay():
    model, pruner, _ = prepared("magnitude")
    pruner.detach()
    bss.convert(model, pruner.masks(), block_size=8, min_speedup=1e9)
    assert pruner.masks().keys() == {"0", "2"}
    pruner.squash_mask()
    assert list(model.state_dict()) == list(network().state_dict())


def test_a_buffer_that_only_has_the_name_of_gates_stays():
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].register_buffer("weight_gates", torch.ones(3))
    bss.convert(model, bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=8), block_size=8, min_speedup=1e9)
    assert "0.weight_gates" in model.state_dict()


def test_a_converted_copy_asks_for_no_gates():
    """An average that was made while gates were learned has hooks that ask for them."""
    model, pruner, optimizer = prepared("l0")
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, value, count: value)
    train(model, optimizer, 13)
    average.update_parameters(model)
    x = torch.randn(3, 32)
    converted = pruner.convert(average.module, min_speedup=1e9)
    assert torch.equal(converted(x), model(x))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in converted.modules())


# ---- Gates that are being learned ------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_what_a_file_or_another_network_would_not_compute_is_refused(copied, tmp_path):
    model, pruner, optimizer = prepared("l0")
    train(model, optimizer, 5)
    pruner.detach()
    given = copy.deepcopy(model) if copied else model
    x, before, file = torch.randn(3, 32), copy.deepcopy(given.state_dict()), tmp_path / "l0.safetensors"
    y = given.eval()(x)
    for op, take in (
        ("save_pretrained", lambda: bst.save_pretrained(given, file)),
        ("convert", lambda: bss.convert(given, pruner.masks(), block_size=8, min_speedup=0)),
        ("compact", lambda: bss.compact_(given, pruner.masks(), block_size=8)),
    ):
        with pytest.raises(
            ValueError, match=rf"\[{op}\] the model multiplies 0, 2 by gates .* finish the L0's schedule"
        ):
            take()
    assert not file.exists()
    assert_equal(given.state_dict(), before)
    assert torch.equal(given(x), y)

    pruner.squash_mask()
    bst.save_pretrained(model, file)
    torch.testing.assert_close(bst.load_pretrained(network, file)(x), model.eval()(x), rtol=0, atol=0)
    torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "l0" not in kind])
def test_pruners_whose_weights_are_the_parameters_can_be_saved_at_any_step(kind, tmp_path):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 5)
    x, file = torch.randn(3, 32), tmp_path / "half.safetensors"
    bst.save_pretrained(model, file)
    assert torch.equal(bst.load_pretrained(network, file)(x), model.eval()(x))
    converted = bss.convert(copy.deepcopy(model), pruner.masks(), block_size=8, min_speedup=0)
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
