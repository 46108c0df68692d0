"""Steps of dense training that are skipped, or whose gradients are not finite."""

import copy
import math
import warnings

import pytest
import torch

import blocksparse.torch.sparsify as bss
from pruners import CUBIC, KINDS, assert_equal, counts, live, network, prepared, train

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(kind, bad):
    """Nothing changes, whichever parameter's gradient it is; the run goes on as if there had been no such batch."""
    runs = []
    for broken in (None, "0.weight", "2.bias"):
        model, pruner, optimizer = prepared(kind)
        train(model, optimizer, 5)
        if broken:
            before = [copy.deepcopy(part.state_dict()) for part in (model, pruner, optimizer)]
            optimizer.zero_grad()
            model(torch.randn(4, 32, generator=torch.Generator().manual_seed(9))).sum().backward()
            model.get_parameter(broken).grad.view(-1)[0] = bad
            with pytest.warns(RuntimeWarning, match=r"step 6 is skipped: a gradient is not finite"):
                optimizer.step()
            for part, state in zip((model, pruner, optimizer), before, strict=True):
                assert_equal(part.state_dict(), state)
        train(model, optimizer, 9, 5)
        runs.append([part.state_dict() for part in (model, pruner, optimizer)])
    for run in runs[1:]:
        for own, other in zip(run, runs[0], strict=True):
            assert_equal(own, other)


def test_a_skipped_step_counts_for_no_other_pruner_of_the_optimizer():
    model = network()
    pruners = [bss.MagnitudePruner(CUBIC, block_size=8, targets=f"^{name}") for name in (0, 2)]
    for pruner in pruners:
        pruner.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for pruner in pruners:
        pruner.attach(optimizer)
    for bad in ("0.weight", "2.weight"):
        train(model, optimizer, 2)
        optimizer.zero_grad()
        model(torch.randn(4, 32)).sum().backward()
        model.get_parameter(bad).grad[0, 0] = math.nan
        with pytest.warns(RuntimeWarning, match="is skipped"):
            optimizer.step()
    train(model, optimizer, 1)
    assert [pruner.steps for pruner in pruners] == [5, 5]


def test_sparse_gradients_and_closures_that_are_not_finite():
    table, linear = torch.nn.Embedding(10, 32, sparse=True), torch.nn.Linear(32, 32)
    model = torch.nn.Sequential(table, linear)
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=8, targets="1")
    pruner.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner.attach(optimizer)
    scales = iter([1.0, math.nan, 1.0])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(4)).sum() * next(scales)
        loss.backward()
        return loss

    optimizer.step(closure)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        optimizer.step(closure)
    assert_equal(model.state_dict(), before)
    optimizer.step(closure)
    assert pruner.steps == 2
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_a_gradient_that_is_not_finite_where_steps_are_by_hand():
    torch.manual_seed(1)
    model, pruner = network(), KINDS["magnitude"]()
    pruner.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(bad):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).sum().backward()
        if bad:
            model[2].weight.grad[0, 0] = math.nan
        pruner.step()

    for _ in range(3):
        step(bad=False)
    before = pruner.masks()
    with pytest.warns(UserWarning, match=r"step 4: 2 has a gradient or weight that is not finite: blocks stay"):
        step(bad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(bad=True)
    assert all(torch.equal(before[name], mask) for name, mask in pruner.masks().items())
    step(bad=False)  # the next step that is finite makes up for it
    assert counts(pruner)["0"] == live(32, CUBIC.sparsity(6))
