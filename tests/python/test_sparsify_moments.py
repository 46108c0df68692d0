"""Optimizer state that follows blocks: grown ones move as those of a new optimizer."""

import copy

import pytest
import torch
from conftest import make_layout
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import blocksparse.torch as bst
from blocksparse.torch.sparsify.optimizer import adam
from blocksparse.torch.sparsify.optimizer import moments as moments_module
from blocksparse.torch.sparsify.optimizer.moments import Moments, move_blocks, replace_parameter

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adam, l2": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "maximize": lambda p: torch.optim.Adam(p, 1e-2, maximize=True),
    "no momentum": lambda p: torch.optim.Adam(p, 1e-2, betas=(0.0, 0.99)),
    "large eps": lambda p: torch.optim.Adam(p, 1e-2, eps=0.1),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "lr is a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2, dtype=torch.float64)),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1),
}
SOURCE, KEPT = torch.tensor([0, 2, 0, 3]), torch.tensor([True, True, False, True])


def gradients(count, dtype=torch.float32):
    """Of sizes that differ from block to block."""
    return [torch.randn(4, 8, 8, dtype=dtype) * 10 ** torch.randn(4, 1, 1, dtype=dtype) for _ in range(count)]


def step(optimizer, parameter, gradient):
    parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("watched", ["new", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_grown_blocks_move_as_those_of_a_new_optimizer(name, watched):
    """Block 2 is new after step 40, block 1 was block 2: these and the others are as if nothing had happened."""
    dtype = torch.float64
    weight, grads = torch.randn(4, 8, 8, dtype=dtype), gradients(70, dtype)
    p = nn.Parameter(weight.clone())
    optimizer = OPTIMIZERS[name]([p])
    moments = Moments(optimizer, {"p": p})
    for t in range(40):
        step(optimizer, p, grads[t])
        moments.correct(torch.tensor(t + 1))
    plain = nn.Parameter(p.detach().clone())
    of_plain = OPTIMIZERS[name]([plain])
    of_plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    move_blocks(p.detach(), SOURCE, KEPT)
    moments.follow(p, SOURCE, KEPT)
    rows = torch.tensor([2]) if watched == "new" else torch.arange(4)
    moments.watch({p: (rows, torch.tensor([-1, -2, 40, -1])[rows])})
    assert not p[2].any()
    start = 0.1 if name == "adagrad" else 0
    state = [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor) and v.dim() == 3]
    assert all((v[2] == start).all() for v in state)
    new = nn.Parameter(torch.zeros(1, 8, 8, dtype=dtype))
    of_new = OPTIMIZERS[name]([new])
    for t in range(40, 70):
        step(optimizer, p, grads[t][[0, 1, 2, 3]])
        moments.correct(torch.tensor(t + 1))
        step(of_plain, plain, grads[t][[0, 3, 1, 3]])  # its block 2 has the gradients of ours at 1
        step(of_new, new, grads[t][2:3])
        torch.testing.assert_close(p[2:3], new, rtol=1e-9, atol=1e-9)
    assert torch.equal(p[[0, 1, 3]], plain[[0, 2, 3]])
    assert (p[2] - weight[2]).abs().max() > 1e-3


def test_blocks_of_several_shapes_and_ages_are_corrected_at_once():
    """Weights of two shapes and gates, grown after steps 5 and 8: each block moves as one of a new optimizer."""
    shapes, births = ((4, 8, 8), (4,), (4, 2, 8, 8)), torch.tensor([-1, 5, 8, 5])
    ps = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    optimizer = torch.optim.AdamW(ps, 1e-2)
    moments = Moments(optimizer, {str(i): p for i, p in enumerate(ps)})
    new, of_new = {}, {}
    for t in range(1, 20):
        for p in ps:
            p.grad = torch.randn_like(p)
        optimizer.step()
        moments.correct(torch.tensor(t))
        for key, q in new.items():
            q.grad = torch.stack([ps[key[1]].grad[r] for r in (births == key[0]).nonzero().flatten()])
            of_new[key].step()
            torch.testing.assert_close(ps[key[1]][births == key[0]], q, rtol=1e-9, atol=1e-9)
        if t in births:
            for i, p in enumerate(ps):
                move_blocks(p.detach(), torch.arange(4), births != t)
                moments.follow(p, torch.arange(4), births != t)
                new[t, i] = nn.Parameter(p[births == t].detach().clone())
                of_new[t, i] = torch.optim.AdamW([new[t, i]], 1e-2)
            moments.watch({p: (torch.arange(4), births.where(births <= t, -1)) for p in ps})


class Launches(TorchDispatchMode):
    """Counts ops that a card would launch a kernel for: all but views and allocations."""

    FREE = ("detach", "empty", "expand", "new_empty", "select", "slice", "split_with_sizes", "unbind", "view")
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in self.FREE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [3, 12])
def test_a_correction_is_few_launches(layers):
    """Where it is not compiled: 3 of a layer, and 41 of all of them. Ages differ, as on a card."""
    ps = [nn.Parameter(torch.randn(4, 8, 8)) for _ in range(layers)]
    optimizer = torch.optim.AdamW(ps)
    moments = Moments(optimizer, {str(i): p for i, p in enumerate(ps)})
    moments.watch({p: (torch.arange(4), torch.tensor([-1, -2, 0, 1])) for p in ps})
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    clock = torch.tensor(1)
    with Launches() as launches:
        moments.correct(clock)
    assert 0 < launches.count <= 41 + 3 * layers


@pytest.fixture
def compiled(monkeypatch):
    """Has corrections of several ages compiled, as on a card, by a backend; returns the calls."""
    calls = []

    def use(backend):
        monkeypatch.setattr(moments_module, "compiles", lambda p: adam.COMPILES)
        monkeypatch.setattr(adam, "BACKEND", backend)
        monkeypatch.setattr(adam, "COMPILES", True)
        run = moments_module.add_lack_compiled
        monkeypatch.setattr(moments_module, "add_lack_compiled", lambda *given: (calls.append(given), run(*given)))
        return calls

    torch._dynamo.reset()  # which remembers what shapes differed
    adam._compiled.cache_clear()
    return use


@pytest.mark.parametrize("name", ["amsgrad", "no momentum", "fused", "lr is a tensor"])
def test_grown_blocks_move_so_where_it_is_compiled(name, compiled):
    """By the tracer of PyTorch's compiler. Old blocks are among them."""
    calls = compiled("aot_eager")
    test_grown_blocks_move_as_those_of_a_new_optimizer(name, "all")
    assert len(calls) == 30
    assert adam.COMPILES


def young_parameters(sizes):
    """AdamW after 40 steps with blocks grown after 18 and 36 in each of some parameters [size, 8, 8], and old ones."""
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(size, 8, 8)) for size in sizes]
    optimizer = torch.optim.AdamW(ps, 1e-2)
    for _ in range(40):
        for p in ps:
            p.grad = torch.randn_like(p)
        optimizer.step()
    moments = Moments(optimizer, {str(i): p for i, p in enumerate(ps)})
    moments.watch({p: (torch.arange(len(p) - 1), torch.tensor([-1, 18, 36] * 9)[: len(p) - 1]) for p in ps})
    return ps, moments


def test_a_correction_is_one_kernel_of_a_parameter(compiled):
    """By the compiler for the CPU, whose fusions are those for a card; for two numbers of blocks, then for all."""
    metrics = pytest.importorskip("torch._inductor.metrics")
    compiled("inductor")
    sizes = [7, 9, 12, 20]
    (plain, moments), (ours, of_ours) = young_parameters(sizes), young_parameters(sizes)
    before = [p.detach().clone() for p in plain]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "COMPILES", False)
        moments.correct(torch.tensor(40))
    metrics.reset()
    of_ours.correct(torch.tensor(40))
    assert metrics.generated_kernel_count == 2
    of_ours.correct(torch.tensor(41))
    assert metrics.generated_kernel_count == 2
    moments.correct(torch.tensor(41))
    for p, q, was in zip(plain, ours, before, strict=True):
        old = torch.arange(len(p)) % 3 == 0
        old[-1] = True  # is not watched
        assert torch.equal(q[old], was[old])
        assert (p - was)[~old].abs().amin((1, 2)).min() > 0
        torch.testing.assert_close(q - was, p - was, rtol=1e-4, atol=1e-7)


def test_networks_of_many_shapes_are_compiled_in_one_process(compiled):
    """PyTorch refuses to compile a function more often than 8 times."""
    calls = compiled("eager")
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    ps = [nn.Parameter(torch.ones(5, *shape)) for shape in [(), (8, 8), (16, 16), (2, 8, 8)]]
    optimizer = torch.optim.AdamW(ps)
    moments = Moments(optimizer, {str(i): p for i, p in enumerate(ps)})
    moments.watch({p: (torch.arange(4), torch.tensor([-1, -2, 0, 1])) for p in ps})
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with torch._dynamo.config.patch({limit: 1, "fail_on_recompile_limit_hit": True}):
        moments.correct(torch.tensor(1))
    assert len(calls) == 4
    assert adam.COMPILES


def test_where_nothing_can_be_compiled_it_is_said_once(compiled):
    """A card without a C compiler, say: the same is done by PyTorch's operations."""

    def broken(graph, inputs):
        raise RuntimeError("no C compiler")

    calls = compiled(broken)
    (plain, moments), (ours, of_ours) = young_parameters([5, 6]), young_parameters([5, 6])
    with pytest.warns(
        RuntimeWarning, match="cannot compile the bias correction of young blocks.*no C compiler"
    ) as told:
        of_ours.correct(torch.tensor(40))
    assert len(told) == 1
    assert len(calls) == 1
    moments.correct(torch.tensor(40))
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(p, q)


def test_what_would_happen_without():
    """The correction is no small thing: with Adam's own, the first steps are 3 to 6 times too long."""
    p, grads = nn.Parameter(torch.randn(4, 8, 8)), gradients(60)
    optimizer = torch.optim.Adam([p], 1e-3)
    for t in range(50):
        step(optimizer, p, grads[t].sign())
    moments = Moments(optimizer, {"p": p})
    move_blocks(p.detach(), SOURCE, KEPT)
    moments.follow(p, SOURCE, KEPT)
    step(optimizer, p, torch.ones_like(p))
    expected = (0.1 / (1 - 0.9**51)) / (0.001 / (1 - 0.999**51)) ** 0.5
    torch.testing.assert_close(p[2], torch.full((8, 8), -1e-3 * expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_settled_moments_are_right_for_adams_own_correction(amsgrad):
    """With a gradient that stays, Adam's estimates after the scaling are the gradient and its square: no jump."""
    p, g = nn.Parameter(torch.zeros(2, 8, 8, dtype=torch.float64)), torch.randn(2, 8, 8, dtype=torch.float64)
    optimizer = torch.optim.Adam([p], 1e-2, amsgrad=amsgrad, eps=1e-12)
    for _ in range(300):
        step(optimizer, p, g)
    moments = Moments(optimizer, {"p": p})
    kept = torch.tensor([True, False])
    move_blocks(p.detach(), torch.tensor([0, 0]), kept)
    moments.follow(p, torch.tensor([0, 0]), kept)
    moments.watch({p: (torch.tensor([1]), torch.tensor([300]))})
    for t in range(300, 320):
        step(optimizer, p, g)
        moments.correct(torch.tensor(t + 1))
    moments.settle(p, torch.tensor([0, 20]))
    state, t = optimizer.state[p], 320
    for _ in range(30):
        torch.testing.assert_close(state["exp_avg"] / (1 - 0.9**t), g)
        torch.testing.assert_close(state["exp_avg_sq"] / (1 - 0.999**t), g.square())
        before = p.detach().clone()
        step(optimizer, p, g)
        t += 1
        torch.testing.assert_close(p - before, -1e-2 * g.sign())


def test_a_scalers_skipped_step_corrects_nothing():
    """Fused optimizers are called under a GradScaler all the same."""
    p = nn.Parameter(torch.zeros(4, 8, 8))
    optimizer = torch.optim.AdamW([p], 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    moments = Moments(optimizer, {"p": p})
    moments.watch({p: (torch.tensor([1]), torch.tensor([0]))})
    optimizer.register_step_post_hook(lambda *_: moments.correct(torch.tensor(2)))
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    before = p.detach().clone()
    p.grad.fill_(float("inf"))
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert torch.equal(p, before)


@pytest.mark.parametrize("births", [[0, 0], [0, 1]])
def test_nothing_moves_where_the_rate_is_0_or_the_first_step_was_left_out(births):
    """The bias of 0 steps is 1 / 0."""
    p = nn.Parameter(torch.zeros(4, 8, 8))
    optimizer = torch.optim.AdamW([p], 1e-2, fused=True)
    moments = Moments(optimizer, {"p": p})
    moments.watch({p: (torch.tensor([1, 2]), torch.tensor(births))})
    p.grad = torch.ones_like(p)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    moments.correct(torch.tensor(0))
    del optimizer.found_inf
    optimizer.param_groups[0]["lr"] = 0.0
    for t in (1, 2):
        step(optimizer, p, torch.ones_like(p))
        moments.correct(torch.tensor(t))
    assert torch.equal(p, torch.zeros_like(p))


@pytest.mark.parametrize("births", [[10, 10], [10, 11]])
def test_moments_are_no_older_than_their_parameter(births):
    """Where an optimizer came later than the blocks: Adam's own count is right."""
    p = nn.Parameter(torch.zeros(4, 8, 8))
    optimizer = torch.optim.AdamW([p], 1e-2)
    moments = Moments(optimizer, {"p": p})
    moments.watch({p: (torch.tensor([1, 2]), torch.tensor(births))})
    for t in range(1, 6):
        step(optimizer, p, torch.ones_like(p))
        before = p.detach().clone()
        moments.correct(torch.tensor(t + 20))
        assert torch.equal(p, before)


def test_bfloat16_parameters():
    p = nn.Parameter(torch.zeros(4, 8, 8, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p], 1e-2)
    moments = Moments(optimizer, {"p": p})
    for _ in range(60):
        step(optimizer, p, torch.ones_like(p))
    move_blocks(p.detach(), SOURCE, KEPT)
    moments.follow(p, SOURCE, KEPT)
    moments.watch({p: (torch.tensor([2]), torch.tensor([60]))})
    step(optimizer, p, torch.ones_like(p))
    moments.correct(torch.tensor(61))
    torch.testing.assert_close(p[2].float(), torch.full((8, 8), -1e-2), rtol=2e-2, atol=0)


# ---- Other parameters in the place of dense ones ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_dense_weight_moves_to_blocks_in_mid_training(kind):
    """Afterwards it is trained to the bit as the dense one, masked, would be."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    layout = make_layout()
    inside = bst.to_dense(torch.ones(layout.values_shape), layout)
    dense, other = nn.Parameter(torch.randn(60, 90) * inside), nn.Parameter(torch.randn(3))
    optimizer = kind([{"params": [other], "lr": 0.5}, {"params": [dense]}], lr=1e-2, **options)

    def run(p, gradient):
        other.grad = torch.ones(3)
        step(optimizer, p, gradient)

    grads = [torch.randn(60, 90) * inside for _ in range(20)]
    for g in grads[:10]:
        run(dense, g)
    state = copy.deepcopy(optimizer.state_dict())
    blocks = nn.Parameter(bst.from_dense(dense.detach(), layout))
    replace_parameter(optimizer, dense, blocks, lambda t: bst.from_dense(t, layout))
    assert optimizer.param_groups[1]["params"] == [blocks]
    assert dense not in optimizer.state
    for g in grads[10:]:
        run(blocks, bst.from_dense(g, layout))
    twin = nn.Parameter(dense.detach().clone())
    optimizer = kind([{"params": [other], "lr": 0.5}, {"params": [twin]}], lr=1e-2, **options)
    optimizer.load_state_dict(state)
    for g in grads[10:]:
        run(twin, g)
    assert torch.equal(bst.to_dense(blocks, layout), twin)


def test_replacing_is_all_or_nothing():
    p, new = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2, 4))
    optimizer = torch.optim.Adam([p])
    step(optimizer, p, torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"take gives \[3, 4\] of exp_avg, needs \[2, 4\]"):
        replace_parameter(optimizer, p, new, lambda t: t[:3])
    assert optimizer.param_groups[0]["params"] == [p]
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match=r"does not hold the parameter \[2, 4\]"):
        replace_parameter(optimizer, new, p, lambda t: t)


def test_optimizers_that_are_not_known_are_told_of():
    p = nn.Parameter(torch.randn(4, 8, 8))
    with pytest.warns(UserWarning, match="NAdam is not known here"):
        moments = Moments(optimizer := torch.optim.NAdam([p]), {"p": p})
    step(optimizer, p, torch.randn_like(p))
    before = optimizer.state[p]["exp_avg"].clone()
    moments.follow(p, SOURCE, KEPT)
    after = optimizer.state[p]["exp_avg"]
    assert torch.equal(after[1], before[2])
    assert not after[2].any()
    with pytest.raises(ValueError, match=r"the optimizer does not hold fc\.weight"):
        Moments(optimizer, {"p": p, "fc.weight": nn.Parameter(torch.randn(1))})
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer"):
        Moments(None, {})
