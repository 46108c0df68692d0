"""Blast: prunes by norm and grows by gradient."""

import copy
import math

import pytest
import torch

import blocksparse.torch.sparsify as bss
from pruners import CUBIC, counts, live, network, optimizer_of, prepared, pruner_of, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_blast_prunes_by_norm_and_grows_by_gradient(scope):
    torch.manual_seed(2)
    model = network()
    pruner = pruner_of(bss.Blast, grow=0.5, scope=scope)
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    pruner.attach(optimizer)
    for t in range(1, 13):
        norms_before = None
        x = torch.randn(8, 32)
        optimizer.zero_grad()
        free = copy.deepcopy(model)
        for part in x.split(4):  # two micro-batches
            model(part).square().mean().backward()
        grown_by = [torch.zeros(0)] * 2
        dense = []
        for part in x.split(4):
            grads = torch.autograd.grad(free(part).square().mean(), [free[0].weight, free[2].weight])
            dense.append([bss.block_norms(g, 8) for g in grads])
        grown_by = [a + b for a, b in zip(*dense, strict=True)]
        # The norms that decide are those after the step.
        with torch.no_grad():
            before = pruner.masks()
            hooked = pruner._handles[1]
            hooked.remove()
            optimizer.step()
            for target in pruner.targets:
                target.keep_(target.parameter.data, before[target.name])
            norms_before = [t.norms() for t in pruner.targets]
            pruner._step()
        pruner._handles[1] = optimizer.register_step_post_hook(lambda o, a, k: pruner._after_step(o))
        if t % 2:
            continue
        passed = max(t - 2, 0) / 10
        share = 0.5 * (1 + math.cos(math.pi * passed)) / 2
        for i, scores in enumerate([0, 1] if scope == "layer" else [None]):
            pick = (
                (lambda grids, s=scores: grids[s].flatten())
                if scope == "layer"
                else (lambda grids: torch.cat([g.flatten() for g in grids]))
            )
            norms, gradients = pick(norms_before), pick(grown_by)
            mask = pick(list(pruner.masks().values()))
            k = live(len(norms), CUBIC.sparsity(t))
            g = math.floor(k * share + 0.5)
            stay = norms.sort(descending=True, stable=True).indices[: k - g]
            rest = gradients.clone()
            rest[stay] = -1
            wanted = torch.zeros(len(norms), dtype=torch.bool)
            wanted[stay] = True
            wanted[rest.sort(descending=True, stable=True).indices[:g]] = True
            assert torch.equal(mask, wanted), (t, i)
            assert int(mask.sum()) == k
    assert share == 0


def test_grown_blocks_start_at_zero():
    model, pruner = network(), pruner_of(bss.Blast, bss.PolynomialDecay(0.75, 1, 40, frequency=2), grow=1.0)
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    pruner.attach(optimizer)
    grown = 0
    for t in range(40):
        before = pruner.masks()
        train(model, optimizer, 1, t)
        for target in pruner.targets:
            new = pruner.masks()[target.name] & ~before[target.name]
            grown += int(new.sum())
            assert not target.norms()[new].any()
    assert grown > 0


def test_blast_without_gradients_prunes_by_norm():
    model = network()
    pruner = pruner_of(bss.Blast, bss.Constant(0.5))
    norms = bss.block_norms(model[0].weight, 8)
    pruner.prepare(model)
    assert norms[pruner.masks()["0"]].min() >= norms[~pruner.masks()["0"]].max()


def test_blast_and_a_dead_blocks_nan():
    """What is not finite in the gradient of a block that is dead is seen, too."""
    model, pruner, optimizer = prepared("blast")
    train(model, optimizer, 7)
    before = pruner.masks()
    dead = (~before["0"]).nonzero()[0]
    optimizer.zero_grad()
    model[0].weight.register_hook(lambda g: g)
    model(torch.randn(4, 32)).sum().backward()
    pruner._gradients["0"][tuple(dead)] = math.nan
    with pytest.warns(UserWarning, match="step 8: 0 has a gradient or weight that is not finite"):
        optimizer.step()
    assert all(torch.equal(mask, before[name]) for name, mask in pruner.masks().items())
    train(model, optimizer, 1)
    assert counts(pruner)["0"] == live(32, CUBIC.sparsity(9))
