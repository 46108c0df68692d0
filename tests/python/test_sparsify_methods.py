"""Group lasso, L0 and Blast: their formulas, one by one."""

import copy
import math

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch.sparsify.dense_to_sparse.l0 import expected_gates, open_probability, sample_gates
from blocksparse.torch.sparsify.dense_to_sparse.lasso import shrink_
from pruners import CUBIC, counts, live, network, optimizer_of, prepared, pruner_of, train

pytestmark = pytest.mark.usefixtures("one_thread")


def over(grid, weight, b=8):
    """An entry of a grid at each number of its block."""
    full = grid.repeat_interleave(b, 0).repeat_interleave(b, 1)[: weight.size(0), : weight.size(1)]
    return full.view(*full.shape, *(1,) * (weight.dim() - 2))


# ---- Group lasso -----------------------------------------------------------------------------------------------------


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


# ---- L0 --------------------------------------------------------------------------------------------------------------


def test_hard_concrete_gates():
    """The formulas of arXiv:1712.01312, with beta 2/3, gamma -0.1, zeta 1.1."""
    log_alpha, u = torch.randn(4, 5, dtype=torch.float64) * 3, torch.rand(4, 5, dtype=torch.float64)
    logit = (torch.log(u) - torch.log(1 - u) + log_alpha) / (2 / 3)
    wanted = (1 / (1 + torch.exp(-logit)) * 1.2 - 0.1).clamp(0, 1)
    torch.testing.assert_close(sample_gates(log_alpha, u), wanted)
    torch.testing.assert_close(expected_gates(log_alpha), (torch.sigmoid(log_alpha) * 1.2 - 0.1).clamp(0, 1))
    many = sample_gates(log_alpha[0], torch.rand(200_000, 5, dtype=torch.float64, generator=torch.manual_seed(0)))
    torch.testing.assert_close((many > 0).double().mean(0), open_probability(log_alpha[0]), rtol=0, atol=0.005)


class Reads(nn.Module):
    """Layers of every kind, some of which are read by others."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 36)
        self.conv = nn.Conv1d(36, 16, 3, padding=1)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.own = bst.BlockSparseLinear(16, 24, Layout.from_graph("random(3,2,0.7)", 8, seed=3))
        self.taps = bst.BlockSparseConv1d(24, 16, 3, Layout.from_graph("dense(2,3)", 8), padding="same")
        self.sparse = bst.BlockSparseLSTM(16, 16, Layout.from_graph("dense(2)", 8), batch_first=True)

    def forward(self, x):
        y = self.conv(self.linear(x).transpose(1, 2)).transpose(1, 2)
        y = self.rnn(y)[0]
        y = self.attention(y, y, y)[0]
        return self.sparse(self.taps(self.own(y).transpose(1, 2)).transpose(1, 2))[0]


def test_gate_gradients_are_products_of_blocks():
    """dg_B = <dW_B, W_B>, dW the gradient of the weight that was used; whatever the layer, and whoever reads it."""
    model = Reads()
    pruner = bss.L0(CUBIC, block_size=8)
    pruner.prepare(model)
    kinds = ["linear", "conv", "rnn.weight_hh_l0", "attention.out_proj", "own", "taps"]
    assert list(pruner.layers) == [*kinds, "sparse.input.0", "sparse.recurrent.0"]
    x = torch.randn(2, 5, 24)
    model(x).sin().sum().backward()

    used = copy.deepcopy(Reads())  # the same with gates multiplied into its weights
    used.load_state_dict({k: v for k, v in model.state_dict().items() if not k.endswith("_gates")})
    gates = {}
    for target in bss.find_targets(used, 8):
        layer, log_alpha = pruner.layers[target.name], pruner.log_alpha[target.name].detach().requires_grad_()
        gates[target.name] = log_alpha, sample_gates(log_alpha, pruner._uniform(layer, log_alpha))
        target.scale_(target.parameter.data, gates[target.name][1].detach())
    torch.testing.assert_close(used(x), model(x), rtol=1e-4, atol=1e-5)
    used(x).sin().sum().backward()
    for target in bss.find_targets(used, 8):
        mine = pruner.layers[target.name].target
        dW, W = target.parameter.grad, mine.parameter.detach()
        log_alpha, z = gates[target.name]
        torch.testing.assert_close(mine.parameter.grad, target.times(dW, z.detach()), rtol=1e-3, atol=1e-5)
        products = sum_of_blocks(target, dW * W)
        z.backward(products)
        torch.testing.assert_close(pruner.log_alpha[target.name].grad, log_alpha.grad, rtol=1e-3, atol=1e-5)


def sum_of_blocks(target, tensor):
    grid = torch.zeros(target.grid)
    if target.layout is not None:
        return grid.index_put(target.places(), tensor.flatten(1).sum(1))
    matrix = target.matrix(tensor)
    return torch.stack([torch.stack([c.sum() for c in row.split(8, 1)]) for row in matrix.split(8)])


def test_gates_leave_no_trace_of_a_run():
    model = Reads()
    pruner = bss.L0(CUBIC, block_size=8)
    pruner.prepare(model)
    model(torch.randn(2, 5, 24))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 25))
    for target in pruner.targets:
        assert (
            target.parameter
            is dict(model.named_parameters())[target.name if target.name.endswith("l0") else f"{target.name}.weight"]
        )
    assert model.own.gates_now() is None
    assert model.rnn._flat_weights[1] is model.rnn.weight_hh_l0


def test_samples_are_one_a_step_and_of_the_seed():
    def gates(pruner):
        layer = pruner.layers["0"]
        return sample_gates(pruner.log_alpha["0"], pruner._uniform(layer, pruner.log_alpha["0"]))

    (model, one, optimizer), (_, another, _) = prepared("l0"), prepared("l0")
    first = gates(one)
    assert torch.equal(first, gates(one))
    assert torch.equal(first, gates(another))
    assert not torch.equal(
        one._uniform(one.layers["0"], first)[:5], one._uniform(one.layers["2"], one.log_alpha["2"])[:, :4]
    )
    train(model, optimizer, 1)
    assert not torch.equal(first, gates(one))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_gradient_of_the_lagrangian(scope):
    """l1 (d - target) + l2 (d - target)^2 with d the mean of P(z > 0), added before the step."""
    torch.manual_seed(0)
    model = network()
    pruner = pruner_of(bss.L0, bss.PolynomialDecay(0.6, 0, 50), scope=scope)
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner, torch.optim.SGD)
    pruner.attach(optimizer)
    train(model, optimizer, 4)
    pruner.multipliers = {pool: (0.3 + i, 0.7) for i, pool in enumerate(pruner.multipliers)}
    target = 1 - pruner.schedule.sparsity(4)
    alphas = {name: p.detach().clone().requires_grad_() for name, p in pruner.log_alpha.items()}
    pools = {"": list(alphas)} if scope == "global" else {name: [name] for name in alphas}
    loss = 0
    for pool, names in pools.items():
        l1, l2 = pruner.multipliers[pool]
        d = torch.cat([open_probability(alphas[name]).flatten() for name in names]).mean()
        assert pruner.density()[pool] == pytest.approx(d.item())
        loss = loss + l1 * (d - target) + l2 * (d - target) ** 2
    loss.backward()
    seen = {}
    before = {name: p.detach().clone() for name, p in pruner.log_alpha.items()}
    optimizer.zero_grad()
    model(torch.randn(4, 32)).sum().backward()
    seen = {name: p.grad.clone() for name, p in pruner.log_alpha.items()}
    optimizer.step()
    for name, p in pruner.log_alpha.items():
        torch.testing.assert_close(p, before[name] - 0.02 * (seen[name] + alphas[name].grad), rtol=1e-5, atol=1e-6)


def test_l0_reaches_the_density_before_the_end():
    torch.manual_seed(0)
    model = network()
    pruner = pruner_of(bss.L0, bss.PolynomialDecay(0.75, 0, 400))
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    optimizer.param_groups[1]["lr"] = 0.1
    pruner.attach(optimizer)
    train(model, optimizer, 390)
    for density in pruner.density().values():
        assert density == pytest.approx(0.25, abs=0.05)
    model.eval()
    x = torch.randn(64, 32)
    before = model(x)
    model.train()
    train(model, optimizer, 10, 390)
    assert counts(pruner) == {"0": live(32, 0.75), "2": live(40, 0.75)}
    assert (model.eval()(x) - before).norm() < 0.5 * before.norm()
    assert all(not p.requires_grad for p in pruner.parameters())
    model.train()
    assert torch.equal(model(x), model.eval()(x)), "gates are gone"


def test_l0_folds_the_gates_of_eval_mode():
    model, pruner, optimizer = prepared("l0")
    train(model, optimizer, 5)
    model.eval()
    x = torch.randn(3, 32)
    with torch.no_grad():
        y = model(x)
        for p in pruner.parameters():
            p.copy_(torch.randn_like(p) * 2)
        changed = model(x)
    assert not torch.allclose(y, changed)
    pruner.squash_mask()
    torch.testing.assert_close(model(x), changed)


@pytest.mark.parametrize("kind", ["l0", "magnitude", "blast"])
def test_activation_checkpoints_see_the_same_gates(kind):
    from torch.utils.checkpoint import checkpoint

    gradients = []
    for wrap in (lambda part, x: part(x), lambda part, x: checkpoint(part, x, use_reentrant=False)):
        model, pruner, optimizer = prepared(kind)
        train(model, optimizer, 5)
        optimizer.zero_grad()
        wrap(model, torch.ones(4, 32)).square().sum().backward()
        gradients.append([p.grad for p in [*model.parameters(), *getattr(pruner, "log_alpha", {}).values()]])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_closure_sees_the_lagrangian():
    results = []
    for closed in (False, True):
        model, pruner, optimizer = prepared("l0")

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 32)).square().sum()
            loss.backward()
            return loss

        for _ in range(6):
            if closed:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        results.append([p.detach().clone() for p in pruner.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- Blast -----------------------------------------------------------------------------------------------------------


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
