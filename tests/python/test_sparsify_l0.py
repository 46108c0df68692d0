"""L0: its gates, its Lagrangian, and what is left of them."""

import copy

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch.sparsify.dense_to_sparse.l0 import expected_gates, open_probability, sample_gates
from pruners import CUBIC, counts, live, network, optimizer_of, prepared, pruner_of, train

pytestmark = pytest.mark.usefixtures("one_thread")


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


def trained_l0(steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    pruner = bss.L0(bss.PolynomialDecay(0.75, 1, 8, frequency=1, power=1), block_size=16)
    pruner.prepare(model)
    optimizer = torch.optim.Adam([*model.parameters(), *pruner.parameters()], 1e-2)
    pruner.attach(optimizer)
    train_l0(model, optimizer, range(steps))
    return model, pruner, optimizer


def train_l0(model, optimizer, steps):
    for step in steps:
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def test_a_state_of_before_the_end_is_gone_on_with_by_a_pruner_that_has_ended():
    model, pruner, optimizer = trained_l0(3)
    state = copy.deepcopy((pruner.state_dict(), model.state_dict(), optimizer.state_dict()))
    train_l0(model, optimizer, range(3, 12))
    want = copy.deepcopy(model.state_dict())
    assert pruner.finished
    for one, saved in zip((pruner, model, optimizer), state, strict=True):
        one.load_state_dict(saved)
    train_l0(model, optimizer, range(3, 12))
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


def test_a_copy_has_no_gates_to_be_converted_with():
    model, pruner, _ = trained_l0(3)
    x = torch.randn(4, 64)
    want = model.eval()(x)
    with pytest.raises(ValueError, match=r"\[L0\] a copy of the model has no gates of its own, .* step 8, of which 3"):
        pruner.convert(copy.deepcopy(model), min_speedup=0)
    torch.testing.assert_close(model(x), want)  # nothing has happened
    torch.testing.assert_close(pruner.convert(model, min_speedup=0)(x), want, rtol=1e-4, atol=1e-5)
    model, pruner, _ = trained_l0(9)
    want = model.eval()(x)
    torch.testing.assert_close(pruner.convert(copy.deepcopy(model), min_speedup=0)(x), want, rtol=1e-4, atol=1e-5)


def test_hooks_that_bring_gates_keep_no_layer_from_being_timed_or_converted():
    model, pruner, optimizer = trained_l0(3)
    assert all(row.expected_s > 0 for row in pruner.report().rows)
    early = copy.deepcopy(model)  # has the hooks still when the pruner has ended
    train_l0(model, optimizer, range(3, 9))
    made = pruner.convert(early, min_speedup=0)
    assert not any(type(layer) is nn.Linear for layer in made.modules())
