"""Group lasso: its proximal step, its rate, its thresholds."""

import copy
import math

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch.sparsify.dense_to_sparse.lasso import shrink_
from pruners import CUBIC, counts, network, optimizer_of, prepared, pruner_of, train

pytestmark = pytest.mark.usefixtures("one_thread")


def over(grid, weight, b=8):
    """An entry of a grid at each number of its block."""
    full = grid.repeat_interleave(b, 0).repeat_interleave(b, 1)[: weight.size(0), : weight.size(1)]
    return full.view(*full.shape, *(1,) * (weight.dim() - 2))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(30, 20),
        nn.Conv2d(24, 16, 3),
        nn.Linear(32, 32).double(),
        bst.BlockSparseLinear(32, 64, Layout.from_graph("random(8,4,0.5)", 8)),
    ],
)
def test_the_proximal_step(layer):
    """W_B <- W_B (1 - min(rate / |W_B|_2, 1)), with 1e-12 under the root."""
    (target,) = bss.find_targets(nn.Sequential(layer), 8)
    before, norms = target.parameter.detach().clone(), target.norms()
    rate = float(norms[norms > 0].median())
    shrink_(target, rate)
    factors = torch.tensor([[1 - min(rate / math.sqrt(n * n + 1e-12), 1) for n in row] for row in norms.tolist()])
    torch.testing.assert_close(
        target.parameter.detach(), target.times(before, factors.to(before)), rtol=1e-4, atol=1e-6
    )
    assert 0 < int((target.norms() > 0).sum()) < int((norms > 0).sum())
    target.parameter.data.zero_()
    shrink_(target, rate)
    assert not target.parameter.any(), "blocks of zeros stay zeros, and are no NaN"
    for wrong in (-1e-3, math.nan, torch.tensor(-1.0)):
        with pytest.raises(ValueError, match=r"\[shrink_\] rate is .*, needs 0 or more"):
            shrink_(target, wrong)


def test_the_proximal_step_of_16_bits_is_as_long_on_the_average():
    torch.manual_seed(1)
    layer = nn.Linear(256, 256, bias=False).bfloat16()
    target, before = bss.find_targets(layer, 32)[0], layer.weight.detach().float()
    shrink_(target, 0.003 * float(target.norms().mean()))
    assert float((layer.weight * before).sum() / before.square().sum()) == pytest.approx(0.997, abs=0.001)


def test_lasso_minimises_its_penalty():
    """For a quadratic loss the fixed point of gradient and proximal steps is the block soft threshold."""
    model = nn.Sequential(nn.Linear(16, 24, bias=False))
    goal = torch.randn(24, 16) * over(torch.rand(3, 2) * 2, model[0].weight)
    pruner = bss.GroupLasso(bss.Constant(0.1, begin_step=400), block_size=8, strength=5.0)
    pruner.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner.attach(optimizer)
    for _ in range(399):
        optimizer.zero_grad()
        (0.5 * (model[0].weight - goal).square().sum()).backward()
        optimizer.step()
    norms = bss.block_norms(goal, 8)
    wanted = goal * over((1 - 5.0 / norms).clamp(min=0), goal)
    torch.testing.assert_close(model[0].weight.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_the_rate_of_lasso():
    model, pruner, optimizer = prepared("lasso", torch.optim.SGD, lr=0.01)
    free = copy.deepcopy(model)
    train(free, optimizer_of(free, pruner, torch.optim.SGD, lr=0.01), 1)
    train(model, optimizer, 1)
    norms = bss.block_norms(free[2].weight, 8)
    wanted = free[2].weight * over((1 - 0.01 * 3.0 / norms).clamp(min=0), free[2].weight)  # strength x learning rate
    torch.testing.assert_close(model[2].weight, wanted)
    pruner.detach()
    with pytest.raises(RuntimeError, match="is not attached to an optimizer, so needs rate="):
        pruner.step()
    by_hand = bss.GroupLasso(CUBIC, block_size=8, rate=0.5)
    by_hand.prepare(nn.Sequential(nn.Linear(16, 16)))
    before = by_hand.targets[0].norms()
    by_hand.step()
    torch.testing.assert_close(by_hand.targets[0].norms(), (before - 0.5).clamp(min=0), rtol=1e-4, atol=1e-5)


def test_lasso_ends_with_its_schedule():
    model, pruner, optimizer = prepared("lasso", torch.optim.SGD, lr=0.0)
    pruner.rate = 0.01
    train(model, optimizer, 12)
    before = model[0].weight.detach().clone()
    train(model, optimizer, 3)
    assert torch.equal(before, model[0].weight)


def test_a_threshold_drops_what_is_below():
    ramp = bss.ThresholdRamp(0.25, 0, 4, 12, frequency=2)
    model = network()
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=0.1)
    pruner = pruner_of(bss.GroupLasso, ramp, rate=0.0)
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner, torch.optim.SGD, lr=0.0)
    pruner.attach(optimizer)
    largest = {t.name: t.norms(math.inf) for t in pruner.targets}
    for t in range(1, 14):
        train(model, optimizer, 1)
        at = min(t - t % 2, 12)
        for name, mask in pruner.masks().items():
            assert torch.equal(mask, largest[name] >= ramp.threshold(at))
    assert 0 < counts(pruner)["2"] < 40


def test_a_step_by_hand_without_a_rate_counts_nothing():
    pruner = bss.GroupLasso(bss.PolynomialDecay(0.5, 0, 4, frequency=1), block_size=16)
    pruner.prepare(nn.Sequential(nn.Linear(32, 32)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="needs rate="):
            pruner.step()
    assert pruner.steps == 0
