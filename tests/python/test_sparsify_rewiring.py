"""SET and RigL on the CPU: blocks of a fixed number that change their places."""

import copy

import pytest
import torch
from conftest import assert_same, make_channels, make_layout
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch import device_layout
from blocksparse.torch.sparsify.sparse_to_sparse import exchange, rewired_layer

METHODS = {
    "SET": lambda schedule, **options: bss.SET(schedule, **options),
    "exact": lambda schedule, **options: bss.RigL(schedule, **options),
    "bound": lambda schedule, **options: bss.RigL(schedule, grow="bound", **options),
}
OFTEN = bss.CosineDrop(end_step=1000, alpha=0.4, frequency=4)


def linears():
    return nn.Sequential(
        bst.BlockSparseLinear(90, 60, make_layout(), activation="gelu"),
        bst.BlockSparseLinear(60, 90, make_layout().t(), gates=True),
    )


def convs():
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    back = Layout.from_graph("random(4,3,0.5)", 8, seed=2, out_features=30, in_features=21)
    return nn.Sequential(
        bst.BlockSparseConv2d(30, 21, 3, make_channels(), padding=1, channel_order=order, activation="relu"),
        bst.BlockSparseConvTranspose2d(21, 30, 2, back, gates=True),
    )


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = bst.BlockSparseLSTM(6, 32, Layout.from_graph("random(4,4,0.5)", 8, seed=1), 2)

    def forward(self, x):
        return self.lstm(x)[0]


NETWORKS = {"linear": (linears, (20, 90)), "conv": (convs, (2, 30, 5, 4)), "lstm": (Lstm, (5, 3, 6))}


def sparse_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Module) and hasattr(m, "layout")}


def dense_of(layer):
    kernel = getattr(layer, "kernel_size", None)
    return bst.to_dense(layer.weight.detach(), layer.layout, kernel)


def masks_of(model):
    return {name: torch.from_numpy(layer.layout.mask()) for name, layer in sparse_layers(model).items()}


def batch(shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def backward(model, shape, seed):
    """A loss without symmetries."""
    y = model(batch(shape, seed))
    (y.square() * batch(y.shape, seed + 1000)).sum().backward()


def train(model, optimizer, shape, steps):
    for seed in steps:
        optimizer.zero_grad()
        backward(model, shape, seed)
        optimizer.step()


def started(network, method, schedule=OFTEN, optimizer=torch.optim.AdamW, attach=True, **options):
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make()
    of_model = optimizer(model.parameters(), 1e-3)
    rewiring = METHODS[method](schedule, **options)
    rewiring.prepare(model)
    if attach:
        rewiring.attach(of_model)
    return model, of_model, rewiring, shape


@pytest.fixture(params=["few places", "many places"])
def grids(request, monkeypatch):
    """Whether these small grids are treated as ones whose places are too many to be looked at all at once."""
    if request.param == "many places":
        monkeypatch.setattr(rewired_layer, "MANY_PLACES", 0)
        monkeypatch.setattr(device_layout, "FEW_PLACES", 0)
        for name in ("FEW_PLACES", "DENSE"):
            monkeypatch.setattr(exchange, name, 0)


# ---- What an exchange does -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_an_exchange(network, method):
    """The count stays; who goes and how many; new blocks are 0 with moments of 0; the others are where they were."""
    model, optimizer, _, shape = started(network, method)
    twin, of_twin, _, _ = started(network, method, bss.CosineDrop(end_step=1, frequency=4))
    parameters = list(model.parameters())
    train(model, optimizer, shape, range(3))
    train(twin, of_twin, shape, range(3))
    assert all(torch.equal(a, masks_of(twin)[name]) for name, a in masks_of(model).items())
    before = masks_of(model)
    train(model, optimizer, shape, [3])
    train(twin, of_twin, shape, [3])
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for name, layer in sparse_layers(model).items():
        other = sparse_layers(twin)[name]
        was, now = before[name], torch.from_numpy(layer.layout.mask())
        blocks = layer.layout.blocks
        assert layer.weight.shape == other.weight.shape
        assert int(now.sum()) == blocks == int(was.sum())
        room = was.numel() - blocks
        count = min(int(OFTEN.share(4) * blocks + 0.5), int(0.4 * blocks + 0.5), room)
        assert int((now & ~was).sum()) == int((was & ~now).sum()) == count > 0
        # Who goes: the lowest norms of what is in the matrix, gates multiplied in.
        norms = bss.block_norms(dense_of(other), layer.layout.block_size)
        if other.gates is not None:
            out, in_ = other.layout.coordinates()
            norms[out, in_] *= other.gates.detach().abs()
        lowest = norms.masked_fill(~was, torch.inf).flatten().argsort(stable=True)[:count]
        assert torch.equal(lowest.sort().values, (was & ~now).flatten().nonzero().flatten())
        check_follows(layer, optimizer, other, of_twin, was, now)


def check_follows(layer, optimizer, other, of_other, was, now):
    """Who comes is zero, as are its gradient and moments; who stays is as before, as are its own."""
    kernel, b = getattr(layer, "kernel_size", None), layer.layout.block_size
    pairs = [(layer.weight.detach(), other.weight.detach()), (layer.weight.grad, other.weight.grad)]
    pairs += [(optimizer.state[layer.weight][k], of_other.state[other.weight][k]) for k in ("exp_avg", "exp_avg_sq")]
    for mine, before in pairs:
        mine, before = bst.to_dense(mine, layer.layout, kernel), bst.to_dense(before, other.layout, kernel)
        stays = (now & was).repeat_interleave(b, 0).repeat_interleave(b, 1)[: mine.size(0), : mine.size(1)]
        stays = stays.view(*stays.shape, *(1,) * (mine.dim() - 2))
        assert torch.equal(mine, torch.where(stays, before, 0))
        assert torch.where(stays, before, 0).any()
    assert optimizer.state[layer.weight]["step"] == of_other.state[other.weight]["step"]
    if layer.gates is not None:
        gates = torch.ones_like(now, dtype=torch.float32)
        out, in_ = other.layout.coordinates()
        gates[out, in_] = other.gates.detach()
        gates[now & ~was] = 1
        out, in_ = layer.layout.coordinates()
        assert torch.equal(layer.gates, gates[out, in_])


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("network", NETWORKS)
def test_rigl_grows_where_a_dense_gradient_is_largest(network):
    """The dense network has the same function; its gradient has the blocks that are not there, too."""
    model, optimizer, _, shape = started(network, "exact")
    train(model, optimizer, shape, range(3))
    before = masks_of(model)
    full = copy.deepcopy(model)
    for module in full.modules():
        for name, layer in list(module.named_children()):
            if hasattr(layer, "layout"):
                setattr(module, name, with_all_blocks(layer))
    backward(full, shape, 3)
    train(model, optimizer, shape, [3])
    for name, layer in sparse_layers(model).items():
        was, now = before[name], torch.from_numpy(layer.layout.mask())
        scores = full.get_submodule(name).weight.grad.flatten(1).norm(dim=1).view(was.shape).masked_fill(was, -1)
        grown = (now & ~was).flatten().nonzero().flatten()
        best = scores.flatten().argsort(descending=True, stable=True)[: grown.numel()]
        assert torch.equal(best.sort().values, grown)


def with_all_blocks(layer):
    """The same layer with zeros in place of the blocks that are not there."""
    grid, sizes, b = layer.layout.grid, layer.layout.sizes, layer.layout.block_size
    everything = Layout.from_mask(torch.ones(grid).numpy(), b, out_features=sizes[0], in_features=sizes[1])
    made = copy.deepcopy(layer)
    values = layer.weight.detach()
    if layer.gates is not None:
        values = values * layer.gates.detach().view(-1, *(1,) * (values.dim() - 1))
    dense = bst.to_dense(values, layer.layout, getattr(layer, "kernel_size", None))
    made.gates, made._gated = None, False
    made.weight = nn.Parameter(bst.from_dense(dense, everything))
    made.layout, made._transposed = everything, False
    made.place(torch.device("cpu"))
    return made


def test_several_uses_in_one_backward_pass_count_together():
    """The score is the norm of the sum over them, not the sum of norms; of gradients added up, the last pass counts."""
    torch.manual_seed(0)
    layer = bst.BlockSparseLinear(64, 64, Layout.from_graph("random(8,8,0.3)", 8, seed=1))
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
    rewiring = bss.RigL(bss.CosineDrop(end_step=100, alpha=0.4, frequency=1))
    rewiring.prepare(layer)
    rewiring.attach(optimizer)
    was = torch.from_numpy(layer.layout.mask())
    layer(torch.randn(9, 64)).sum().backward()  # does not count
    xs = [torch.randn(9, 64) for _ in range(2)]
    dys = [torch.randn(9, 64), torch.randn(4, 64)]
    x = torch.cat([xs[0], xs[1][:4]])
    (layer(xs[0]) * dys[0]).sum().add((layer(xs[1][:4]) * dys[1]).sum()).backward()
    scores = bss.block_norms(torch.cat(dys).T @ x, 8).masked_fill(was, -1)
    optimizer.step()
    grown = (torch.from_numpy(layer.layout.mask()) & ~was).flatten().nonzero().flatten()
    best = scores.flatten().argsort(descending=True, stable=True)[: grown.numel()]
    assert grown.numel() > 0
    assert torch.equal(best.sort().values, grown)


@pytest.mark.parametrize("method", ["exact", "bound"])
def test_rigl_looks_at_steps_that_act_alone(method, monkeypatch):
    seen = []
    for name in ("grow_scores", "grow_bound"):
        f = getattr(rewired_layer, name)
        monkeypatch.setattr(rewired_layer, name, lambda *a, f=f, n=name: (seen.append((step, n)), f(*a))[1])
    model, optimizer, _, shape = started("linear", method, bss.CosineDrop(end_step=9, alpha=0.4, frequency=4))
    for step in range(1, 14):
        train(model, optimizer, shape, [step])
    assert seen == [(s, "grow_scores" if method == "exact" else "grow_bound") for s in (4, 4, 8, 8)]


def test_all_places_are_visited_by_set():
    torch.manual_seed(0)
    layer = bst.BlockSparseLinear(64, 64, Layout.from_graph("random(8,8,0.25)", 8, seed=1))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    rewiring = bss.SET(bss.CosineDrop(end_step=10_000, alpha=0.5, frequency=1))
    rewiring.prepare(layer)
    rewiring.attach(optimizer)
    visits = torch.zeros(8, 8)
    for _ in range(300):
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()
        visits += torch.from_numpy(layer.layout.mask())
    assert visits.min() > 0.25 * 300 * 0.3
    assert visits.sum() == 300 * layer.layout.blocks
    row = rewiring.report().rows[0]
    assert (row.shape, row.block_size, row.blocks, row.density) == ((64, 64), 8, 16, 0.25)
    assert row.grown >= 0.5
    assert f"{row.grown:.2%}\n300 steps, 0 updates left out" in str(rewiring.report())


def test_inactive_outputs_of_a_ragged_edge_do_not_decide():
    """What lies in the last blocks outside of the matrix is ignored by norms, however large."""
    layer = bst.BlockSparseLinear(20, 24, Layout.from_mask([[1, 0, 1], [0, 1, 1], [1, 1, 0]], 8, in_features=20))
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.weight[1, :, 4:] = 1e6  # block (0, 2), half of which is outside
        layer.weight[1, :, :4] = 1.1
        layer.weight[3, :, :4] = 1.2
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    rewiring = bss.SET(bss.CosineDrop(end_step=100, alpha=0.2, frequency=1))
    rewiring.prepare(layer)
    rewiring.attach(optimizer)
    layer(torch.randn(3, 20)).sum().backward()
    optimizer.step()
    assert not layer.layout.mask()[0, 2]
    assert layer.layout.mask().sum() == 6


# ---- Own bias correction in a run ----------------------------------------------------------------------------------


def half_full():
    layout = Layout.from_graph("random(8,8,0.5)", 8, seed=1)
    return bst.BlockSparseLinear(64, 64, layout, bias=False, dtype=torch.float64)


def test_young_blocks_move_as_those_of_a_new_optimizer():
    """Through hooks and two exchanges, against one new Adam for each exchange."""
    torch.manual_seed(0)
    layer = half_full()
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-2)
    rewiring = bss.SET(bss.CosineDrop(end_step=60, alpha=0.3, frequency=20), seed=5)
    rewiring.prepare(layer)
    rewiring.attach(optimizer)
    new = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
    born = of_new = None
    for step in range(1, 55):
        gradient = torch.randn(64, 64, dtype=torch.float64) * 10 ** torch.randn(64, 64, dtype=torch.float64)
        before = torch.from_numpy(layer.layout.mask())
        layer.weight.grad = bst.from_dense(gradient, layer.layout)
        optimizer.step()
        if of_new is not None:
            new.grad = gradient.clone()
            of_new.step()
            mine = bst.to_dense(layer.weight.detach(), layer.layout)
            alive = born & torch.from_numpy(layer.layout.mask()) & before
            inside = alive.repeat_interleave(8, 0).repeat_interleave(8, 1)
            assert inside.any() or step == 40  # when all of the first ones may go again
            torch.testing.assert_close(mine[inside], new.detach()[inside], rtol=1e-9, atol=1e-9)
        if step in (20, 40):
            born = torch.from_numpy(layer.layout.mask()) & ~before
            with torch.no_grad():
                new.zero_()
            of_new = torch.optim.AdamW([new], 1e-2)


@pytest.mark.parametrize("detached", [True, False])
def test_moments_go_on_when_blocks_are_young_no_more(detached):
    """With a gradient that stays, Adam moves each weight by lr at each step, on and on."""
    layer = half_full()
    optimizer = torch.optim.Adam(layer.parameters(), 1e-3, eps=1e-12)
    rewiring = bss.SET(bss.CosineDrop(end_step=100, alpha=0.3, frequency=50))
    rewiring.prepare(layer)
    rewiring.attach(optimizer)
    for step in range(1, 120):
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        if step == 57 and detached:
            rewiring.detach()
        if step != 50:
            torch.testing.assert_close(before - layer.weight, torch.full_like(before, 1e-3))
    assert rewiring.report().rows[0].grown > 0


@pytest.mark.parametrize("steps", [10, 11])  # the next one acts, and backward passes are being looked at; or not
@pytest.mark.parametrize("method", METHODS)
def test_a_copy_of_both_trains_as_they_do(method, steps):
    schedule = bss.CosineDrop(end_step=30, alpha=0.4, frequency=4)
    model, optimizer, rewiring, shape = started("linear", method, schedule, seed=11)
    train(model, optimizer, shape, range(steps))
    again, same, other = copy.deepcopy((model, rewiring, optimizer))
    assert rewiring.attached
    assert not same.attached
    same.attach(other)
    for one, its in ((model, optimizer), (again, other)):
        train(one, its, shape, range(steps, 40))
    assert_same(list(model.state_dict().values()), list(again.state_dict().values()))
    assert all(torch.equal(a, masks_of(again)[name]) for name, a in masks_of(model).items())
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert_same(list(optimizer.state[p].values()), list(other.state[q].values()))
    assert str(rewiring.report()) == str(same.report())
    with pytest.raises(ValueError, match="has a sparsifier already"):
        type(rewiring)(schedule).prepare(again)
