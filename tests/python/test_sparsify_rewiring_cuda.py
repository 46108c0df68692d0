"""SET and RigL on a CUDA card: the same as on the CPU, without waiting for the host, in CUDA graphs."""

import copy

import pytest
import torch
from conftest import assert_same, make_layout
from test_sparsify_rewiring import METHODS, OFTEN, grids, masks_of, sparse_layers  # noqa: F401 - grids is a fixture
from test_torch_cuda import pytestmark  # noqa: F401 - skips all of these where there is no card
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch import device_layout
from blocksparse.torch.device_layout import changing_layout
from blocksparse.torch.sparsify.optimizer import adam
from blocksparse.torch.sparsify.optimizer.moments import Moments
from blocksparse.torch.sparsify.sparse_to_sparse.rewired_layer import places_of

SHAPE = (40, 90)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        bst.BlockSparseLinear(90, 60, make_layout(), activation="gelu"),
        bst.BlockSparseLinear(60, 90, make_layout().t(), gates=True),
    )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(*SHAPE, generator=generator), torch.randn(*SHAPE, generator=generator)


class Run:
    """A network in training; `x` and `w` are what a captured step reads."""

    def __init__(self, method, device="cuda", schedule=OFTEN, **options):
        self.model = network().to(device)
        self.x, self.w = (t.to(device) for t in batch(0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, **options)
        self.rewiring = METHODS[method](schedule)
        self.rewiring.prepare(self.model)
        self.rewiring.attach(self.optimizer, hook=False)

    def load(self, step):
        for mine, new in zip((self.x, self.w), batch(step), strict=True):
            mine.copy_(new)

    def train(self):
        self.optimizer.zero_grad()
        (self.model(self.x).square() * self.w).sum().backward()
        self.optimizer.step()

    def eager(self, steps):
        for step in steps:
            self.load(step)
            self.train()
            self.rewiring.step()

    def capture(self, acts):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            if acts and isinstance(self.rewiring, bss.RigL):
                with self.rewiring.observing():
                    self.train()
            else:
                self.train()
            self.rewiring.step(acts=acts)
        return graph


def same_masks(a, b):
    return all(torch.equal(mask, masks_of(b)[name]) for name, mask in masks_of(a).items())


@pytest.fixture
def side_stream():
    """Which warm-ups of captures want."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("method", METHODS)
def test_a_card_moves_the_blocks_that_the_cpu_moves(method):
    card, host = Run(method), Run(method, "cpu")
    parameters, places = list(card.model.parameters()), [p.data_ptr() for p in card.model.parameters()]
    for steps in (range(4), range(4, 8)):
        card.eager(steps)
        host.eager(steps)
        assert same_masks(card.model, host.model)
        for mine, other in zip(card.model.parameters(), host.model.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-3, atol=1e-4)
            for key in ("exp_avg", "exp_avg_sq"):
                moments = card.optimizer.state[mine][key].cpu(), host.optimizer.state[other][key]
                torch.testing.assert_close(*moments, rtol=1e-2, atol=1e-4)
    assert all(p is q for p, q in zip(card.model.parameters(), parameters, strict=True))
    assert [p.data_ptr() for p in card.model.parameters()] == places
    assert [row.grown for row in card.rewiring.report().rows] == [row.grown for row in host.rewiring.report().rows]


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_waits_for_the_host(method, options):
    run = Run(method, **options)
    run.eager(range(10))  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):  # exchanges, and blocks that are young no more
            run.train()
            run.rewiring.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.rewiring.steps == 60
    assert run.rewiring.report().skipped == 0


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_do_what_eager_ones_do(method, side_stream):
    """Two graphs, replayed as the schedule says."""
    eager, captured = Run(method, capturable=True), Run(method, capturable=True)
    eager.eager(range(24))
    captured.eager(range(8))
    graphs = {acts: captured.capture(acts) for acts in (False, True)}
    assert captured.rewiring.steps == 8  # a capture runs nothing
    before = masks_of(captured.model)
    for step in range(8, 24):
        captured.load(step)
        graphs[OFTEN.acts_at(step + 1)].replay()
    torch.cuda.synchronize()
    assert captured.rewiring.steps == eager.rewiring.steps == 24
    assert same_masks(eager.model, captured.model)
    assert any(not torch.equal(mask, before[name]) for name, mask in masks_of(captured.model).items())
    for mine, other in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    for name, layer in sparse_layers(captured.model).items():
        state = captured.model.state_dict()[f"{name}.pattern"].cpu().numpy()
        assert Layout.from_pattern(state) == layer.layout


def test_a_graph_that_is_captured_before_any_step_does_the_same(side_stream):
    """Then the bias correction cannot be compiled any more, and is PyTorch's operations."""
    eager, captured = Run("SET", capturable=True), Run("SET", capturable=True)
    for run in (eager, captured):
        for _ in range(3):  # the optimizer's state
            run.train()
    graphs = {acts: captured.capture(acts) for acts in (False, True)}
    eager.eager(range(16))
    for step in range(16):
        captured.load(step)
        graphs[OFTEN.acts_at(step + 1)].replay()
    torch.cuda.synchronize()
    assert same_masks(eager.model, captured.model)
    for mine, other in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_compiled_correction_is_that_of_pytorchs_operations(dtype, monkeypatch):
    """Of two shapes and three numbers of blocks; old ones stay as they are to the bit, and repeats are the same."""
    pytest.importorskip("triton")
    moved = []
    for compiles in (False, True, True):
        monkeypatch.setattr(adam, "COMPILES", compiles)
        torch.manual_seed(0)
        ps = [
            nn.Parameter(torch.zeros(shape, dtype=dtype, device="cuda"))
            for shape in [(7, 8, 8), (9, 8, 8), (12, 8, 8), (6,)]
        ]
        optimizer = torch.optim.AdamW(ps, 1e-2)
        for _ in range(40):
            for p in ps:
                p.grad = torch.randn(p.shape).to(p)
            optimizer.step()
        moments = Moments(optimizer, {str(i): p for i, p in enumerate(ps)})
        births = torch.tensor([-1, 18, 36, -2, 36], device="cuda")
        moments.watch({p: (torch.arange(5, device="cuda"), births) for p in ps})
        for p in ps:
            p.detach().zero_()  # 16 bits then show all of what is added
        moments.correct(torch.tensor(40, device="cuda"))
        assert compiles == adam.COMPILES
        moved.append([p.detach() for p in ps])
    for plain, ours, again in zip(*moved, strict=True):
        assert not ours[[0, 3]].any()
        assert not ours[5:].any()
        assert plain[[1, 2, 4]].any()
        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(ours, plain, rtol=rtol, atol=1e-7)
        assert torch.equal(ours, again)


def test_a_capture_has_to_say_whether_it_acts(side_stream):
    run = Run("SET", capturable=True)
    run.eager(range(5))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.train()
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            run.rewiring.step()


def test_a_run_on_a_card_is_resumed_to_the_bit():
    run = Run("exact")
    run.eager(range(10))
    states = copy.deepcopy([x.state_dict() for x in (run.model, run.optimizer, run.rewiring)])
    run.eager(range(10, 30))
    again = Run("exact")
    for thing, state in zip((again.model, again.optimizer, again.rewiring), states, strict=True):
        thing.load_state_dict(state)
    again.eager(range(10, 30))
    assert same_masks(run.model, again.model)
    assert_same(list(run.model.state_dict().values()), list(again.model.state_dict().values()))


def test_models_leave_the_card_with_their_pattern():
    run = Run("bound")
    run.eager(range(6))
    masks, y = masks_of(run.model), run.model(run.x).cpu()
    for other in (copy.deepcopy(run.model), copy.deepcopy(run.model).cpu()):
        device = next(other.parameters()).device
        torch.testing.assert_close(other(run.x.to(device)).cpu(), y, rtol=1e-3, atol=1e-3)
        assert all(torch.equal(mask, masks[name]) for name, mask in masks_of(other).items())
    other = copy.deepcopy(run.model)
    run.eager(range(6, 10))
    assert all(torch.equal(mask, masks[name]) for name, mask in masks_of(other).items())
    assert not same_masks(run.model, other)
    host = network()
    with pytest.raises(RuntimeError, match="this layer has"):
        host.load_state_dict(run.model.state_dict())
    run.model.cpu()
    with pytest.raises(RuntimeError, match="is on cpu, was prepared on cuda"):
        run.rewiring.step(acts=True)


def test_what_is_not_finite_is_said_when_the_host_hears_of_it():
    run = Run("SET")
    run.eager(range(3))
    masks = masks_of(run.model)

    def break_and_go_on():
        run.train()
        run.model[0].weight.grad[0, 0, 0] = float("nan")
        run.rewiring.step()
        torch.cuda.synchronize()
        run.eager([4])

    with pytest.warns(RuntimeWarning, match="not finite at step [45] or before") as told:
        break_and_go_on()
    assert len(told) == 1
    assert all(torch.equal(mask, masks[name]) for name, mask in masks_of(run.model).items())
    assert run.rewiring.report().skipped == 1


# ---- Layouts that change in place ------------------------------------------------------------------------------------


def test_a_layout_is_made_anew_in_place():
    masks = [torch.zeros(40 * 30, dtype=torch.bool) for _ in range(3)]
    for mask in masks:
        mask[torch.randperm(40 * 30)[:211]] = True
    hosts = [Layout.from_mask(mask.view(40, 30).numpy(), 16, out_features=637) for mask in masks]
    layout = changing_layout(hosts[0], torch.device("cuda", torch.cuda.current_device()))
    view, place = layout.t(), bst.index_of(layout, "cuda:0").data_ptr()
    x, w = torch.randn(50, 480, device="cuda"), torch.randn(211, 16, 16, device="cuda")
    for mask, host in zip(masks, hosts, strict=True):
        layout.remake(mask.view(40, 30).cuda())
        assert layout == host
        assert view == host.t()
        assert bst.index_of(layout, "cuda:0").data_ptr() == place
        torch.testing.assert_close(bst.linear(x, w, layout), bst.linear(x, w, host), rtol=1e-3, atol=1e-3)
    turned = changing_layout(hosts[0].t(), x.device)
    turned.remake(masks[1].view(40, 30).cuda())
    assert turned == hosts[1].t()


@pytest.mark.parametrize("few", [1 << 22, 0])
def test_a_layout_is_made_anew_from_places(few, monkeypatch):
    """By the kernel that reads a mask, and without one."""
    monkeypatch.setattr(device_layout, "FEW_PLACES", few)
    hosts = [Layout.from_graph("ba(300,4,blocks=3000)", 16, seed=seed) for seed in range(3)]  # with rows that are cut
    layout = changing_layout(hosts[0], torch.device("cuda", torch.cuda.current_device()))
    x, w = torch.randn(50, 4800, device="cuda"), torch.randn(3000, 16, 16, device="cuda")
    for host in hosts:
        layout.remake_at(places_of(host).cuda())
        assert layout == host
        torch.testing.assert_close(bst.linear(x, w, layout), bst.linear(x, w, host), rtol=1e-3, atol=1e-3)
        y, expected = bst.linear(x, w, layout.t()), bst.linear(x, w, host.t())
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


def test_a_backward_pass_of_former_tables_says_so():
    layout = changing_layout(make_layout(), torch.device("cuda", torch.cuda.current_device()))
    x, w = torch.randn(5, 90, device="cuda"), torch.randn(layout.values_shape, device="cuda", requires_grad=True)
    y = bst.linear(x, w, layout)
    layout.remake(torch.from_numpy(make_layout().mask()).cuda())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_masks_that_are_no_masks_are_refused():
    layout = changing_layout(make_layout(), torch.device("cuda", torch.cuda.current_device()))
    mask = torch.from_numpy(make_layout().mask()).cuda()
    for bad, message in [
        (mask[:3], r"mask is \[3, 6\] on cuda:0, needs \[4, 6\]"),
        (mask.cpu(), "on cpu, needs"),
        (mask.float(), "mask is torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            layout.remake(bad)
    with pytest.raises(ValueError, match="for layouts that changing_layout"):
        Layout.from_device_mask(mask, 16, out_features=60, in_features=90).remake(mask)
    layout.remake(torch.ones_like(mask))
    with pytest.raises(ValueError, match="mask holds 24 blocks"):
        layout.check()
