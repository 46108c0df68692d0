"""Blocks that come back in dense training: their moments begin at zero, with a bias correction of their own."""

import copy

import pytest
import torch
from torch import nn

import blocksparse.torch.sparsify as bss

pytestmark = pytest.mark.usefixtures("one_thread")
AGE, STEPS = 10, 60  # steps before a block is dropped; in all
ADAMS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.99), eps=1e-4),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def gradient(t):
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(t), dtype=torch.float64)


def trained(make, keep):
    """A weight of 2 x 2 blocks; `keep` tells which blocks are live after a step. (model, pruner, optimizer)."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    pruner = bss.MagnitudePruner(bss.PolynomialDecay(0.5, 1, STEPS, 0.5, frequency=1), block_size=8)
    pruner._masks_from = lambda scores: {"0": keep(pruner.steps)}
    pruner.prepare(model)
    optimizer = make(model.parameters())
    pruner.attach(optimizer)
    return model, pruner, optimizer


def one_step(model, optimizer, t):
    optimizer.zero_grad()
    (model[0].weight * gradient(t)).sum().backward()
    optimizer.step()


def away(step):
    """Block (0, 1) is dead from step AGE to 2 AGE."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    mask[0, 1] = not AGE <= step < 2 * AGE
    return mask


@pytest.mark.parametrize("kind", ADAMS)
def test_a_block_that_comes_back_moves_as_one_of_a_new_optimizer(kind):
    model, _, optimizer = trained(ADAMS[kind], away)
    for t in range(2 * AGE):
        one_step(model, optimizer, t)
    state = optimizer.state[model[0].weight]
    assert all(not value[:8, 8:].any() for value in state.values() if value.dim() == 2)
    assert state["exp_avg"][:8, :8].all(), "those of the others stay"

    new = nn.Parameter(model[0].weight[:8, 8:].detach().clone())
    fresh = ADAMS[kind]([new])
    for t in range(2 * AGE, 2 * AGE + 30):
        one_step(model, optimizer, t)
        new.grad = gradient(t)[:8, 8:].contiguous()
        fresh.step()
        torch.testing.assert_close(model[0].weight[:8, 8:].detach(), new.detach(), rtol=1e-9, atol=1e-12)


def test_moments_are_settled_and_other_blocks_never_notice():
    model, _, optimizer = trained(ADAMS["Adam"], away)
    other, _, expected = trained(ADAMS["Adam"], lambda step: torch.ones(2, 2, dtype=torch.bool))
    for t in range(2 * AGE + 33):
        one_step(model, optimizer, t)
        one_step(other, expected, t)
    assert torch.equal(model[0].weight[8:], other[0].weight[8:])
    state, t = optimizer.state[model[0].weight], 2 * AGE + 33
    m = torch.zeros(8, 8, dtype=torch.float64)
    for s in range(2 * AGE, t):
        m = 0.8 * m + 0.2 * gradient(s)[:8, 8:]
    # m of age a, of which the optimizer's own division by 1 - beta^t makes an unbiased mean; one step was added since
    scaled = (m - 0.2 * gradient(t - 1)[:8, 8:]) / 0.8 * (1 - 0.8 ** (t - 1)) / (1 - 0.8**32)
    torch.testing.assert_close(state["exp_avg"][:8, 8:], 0.8 * scaled + 0.2 * gradient(t - 1)[:8, 8:])


def test_blast_grows_blocks_with_moments_of_zero():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()
    pruner = bss.Blast(bss.PolynomialDecay(0.75, 1, 40, frequency=2), block_size=8, grow=1.0)
    pruner.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner.attach(optimizer)
    grown = 0
    for t in range(40):
        before = pruner.masks()
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()
        for target in pruner.targets:
            new = pruner.masks()[target.name] & ~before[target.name]
            grown += int(new.sum())
            for name in ("exp_avg", "exp_avg_sq"):
                assert not target.norms(tensor=optimizer.state[target.parameter][name])[new].any()
    assert grown > 0


def test_a_run_with_young_blocks_is_resumed_bit_for_bit():
    model, pruner, optimizer = trained(ADAMS["AdamW"], away)
    for t in range(2 * AGE + 5):
        one_step(model, optimizer, t)
    again, other, resumed = trained(ADAMS["AdamW"], away)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(pruner.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for t in range(2 * AGE + 5, STEPS):
        one_step(model, optimizer, t)
        one_step(again, resumed, t)
    assert torch.equal(model[0].weight, again[0].weight)


def test_an_optimizer_without_moments_has_nothing_to_correct():
    model, _, optimizer = trained(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), away)
    for t in range(2 * AGE):
        one_step(model, optimizer, t)
    assert not optimizer.state[model[0].weight]["momentum_buffer"][:8, 8:].any()
    before = model[0].weight[:8, 8:].detach().clone()
    one_step(model, optimizer, 2 * AGE)
    torch.testing.assert_close(model[0].weight[:8, 8:].detach(), before - 1e-2 * gradient(2 * AGE)[:8, 8:])
