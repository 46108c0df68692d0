"""The PyTorch front end on a CUDA card."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, make_layout
from test_torch import TOLERANCE, _op_calls, error
from torch.library import opcheck

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.ops import linear as linear_ops

WHY_NOT = blocksparse.cuda_status() if torch.cuda.is_available() else "PyTorch sees no CUDA device"
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)


def leaf(*shape, dtype):
    return torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=True)


def _moved(value):
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return [_moved(v) for v in value] if isinstance(value, list) else value


def _calls_on_cuda(layout, dtype=torch.float32):
    for op, arguments, options in _op_calls(layout, dtype):
        yield op, tuple(_moved(a) for a in arguments), {key: _moved(value) for key, value in options.items()}


@pytest.mark.parametrize("order", ["last", "first"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_linear_agrees_with_dense(layout, dtype, order):
    x, w, bias = leaf(70, 90, dtype=dtype), leaf(*layout.values_shape, dtype=dtype), leaf(60, dtype=dtype)
    if order == "first":
        x = x.detach().t().contiguous().t().requires_grad_()
    y = bst.linear(x, w, layout, bias)
    assert y.stride() == ((60, 1) if order == "last" else (1, 70))
    x64, w64, bias64 = (t.detach().double().requires_grad_() for t in (x, w, bias))
    expected = F.linear(x64, bst.to_dense(w64, layout), bias64)
    assert y.dtype == dtype
    assert error(y, expected) < TOLERANCE[dtype]
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    for got, want in ((x, x64), (w, w64), (bias, bias64)):
        assert error(got.grad, want.grad) < 2 * TOLERANCE[dtype]


@pytest.fixture
def tf32_setting():
    """Puts torch.backends.cuda.matmul.allow_tf32 back."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("n", [20, 6000])
@pytest.mark.parametrize("compiled", [False, True])
def test_tf32_where_pytorch_allows_it(n, compiled, tf32_setting):
    layout = Layout.from_graph("random(20,18,0.4)", 32, seed=1)
    x, w = leaf(n, layout.in_features, dtype=torch.float32), leaf(*layout.values_shape, dtype=torch.float32)
    dy = torch.randn(n, layout.out_features, device="cuda")
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    expected = F.linear(x64, bst.to_dense(w64, layout))
    expected.backward(dy.double())

    def linear(x, w):
        return bst.linear(x, w, layout)

    if compiled:
        linear = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        x.grad = w.grad = None
        y = linear(x, w)
        torch.backends.cuda.matmul.allow_tf32 = not allowed  # what counts is the call
        y.backward(dy)
        for got, want in ((y, expected), (x.grad, x64.grad), (w.grad, w64.grad)):
            relative = ((got - want).norm() / want.norm()).item()
            assert relative < (6e-4 if allowed else 3e-6)
            assert not allowed or relative > 1e-4 or got is w.grad  # few runs of blocks: made in f32 all the same


def test_gradients_of_all_orders():
    layout = Layout.from_graph("random(2,3,0.7)", 8, seed=1, out_features=13, in_features=21)
    x, w = leaf(4, 21, dtype=torch.float64), leaf(*layout.values_shape, dtype=torch.float64)
    gates = torch.rand(layout.blocks, dtype=torch.float64, device="cuda", requires_grad=True)

    def f(x, w, gates):
        return bst.linear(x, w, layout, gates=gates, activation="gelu")

    assert torch.autograd.gradcheck(f, (x, w, gates))
    assert torch.autograd.gradgradcheck(f, (x, w, gates))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(layout, dtype):
    for op, arguments, options in _calls_on_cuda(layout, dtype):
        opcheck(op, arguments, options)


def test_ops_agree_with_the_cpu(layout):
    for (op, arguments, options), (_, moved, moved_options) in zip(
        _op_calls(layout), _calls_on_cuda(layout), strict=True
    ):
        del arguments
        here = [
            t.cpu() if isinstance(t, torch.Tensor) else [u.cpu() for u in t] if isinstance(t, list) else t
            for t in moved
        ]
        options_here = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in moved_options.items()}
        expected, got = op(*here, **options_here), op(*moved, **moved_options)
        for e, g in zip(
            (expected,) if isinstance(expected, torch.Tensor) else expected,
            (got,) if isinstance(got, torch.Tensor) else got,
            strict=True,
        ):
            assert g.is_cuda
            bound = 2e-2 if options.get("tf32") else 1e-4
            torch.testing.assert_close(g.cpu(), e, rtol=bound, atol=bound)


def results_of_calls():
    """Whether the kernels are C++, then what they answer."""
    return [
        linear_ops.CUDA_KERNELS == "C++",
        *(op(*arguments, **options) for op, arguments, options in _calls_on_cuda(make_layout())),
    ]


def test_python_kernels_give_the_same_bits(with_python_kernels):
    is_cpp, *theirs = with_python_kernels("test_torch_cuda.results_of_calls")
    assert not is_cpp
    is_cpp, *mine = results_of_calls()
    assert is_cpp
    assert_same(mine, theirs)


def test_compile_with_gradients(layout):
    layer = bst.BlockSparseLinear(90, 60, layout, activation="silu", device="cuda")
    x = torch.randn(7, 90, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    compiled(x).sum().backward()
    got = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).sum().backward()
    torch.testing.assert_close(got, layer.weight.grad)


def test_graph_of_a_training_step(layout):
    layer = bst.BlockSparseLinear(90, 60, layout, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 90, device="cuda", dtype=torch.bfloat16)

    def step():
        layer.zero_grad(set_to_none=True)
        y = layer(x)
        y.float().square().sum().backward()
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    captured = layer.weight.grad
    for _ in range(3):
        x.normal_()
        with torch.no_grad():
            layer.weight.normal_()
        graph.replay()
        got, gradient = y.clone(), captured.clone()
        expected = step()
        assert torch.equal(got, expected)
        assert torch.equal(gradient, layer.weight.grad)


def test_capture_needs_tables_on_the_card():
    layout = Layout.from_graph("random(4,0.5)", 8, seed=9)
    x, w = torch.randn(4, 32, device="cuda"), torch.randn(layout.values_shape, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="tables are not on cuda:0 yet"), torch.cuda.graph(graph):
        bst.linear(x, w, layout)
    torch.cuda.synchronize()
    assert bst.linear(x, w, layout).isfinite().all()


def test_streams(layout):
    x = [torch.randn(500, 90, device="cuda") for _ in range(4)]
    w = torch.randn(layout.values_shape, device="cuda")
    expected = [bst.linear(t, w, layout) for t in x]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    got = []
    for stream, t in zip(streams, x, strict=True):
        with torch.cuda.stream(stream):
            got.append(bst.linear(t, w, layout))
    torch.cuda.synchronize()
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g, e)


def test_autocast(layout):
    layer = bst.BlockSparseLinear(90, 60, layout, device="cuda")
    x = torch.randn(7, 90, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.float32


def test_wgrad_of_a_list(layout):
    xs = [torch.randn(n, 90, device="cuda") for n in range(1, 100)]
    dys = [torch.randn(n, 60, device="cuda") for n in range(1, 100)]
    got = bst.linear_wgrad(xs, dys, layout)
    expected = bst.linear_wgrad([torch.cat(xs)], [torch.cat(dys)], layout)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad_of_long_lists(block_size, dtype):
    """Of any lengths, none among them; more than one launch takes."""
    layout = Layout.from_graph("random(5,4,0.6)", block_size, seed=5)
    for lengths in ([700, 0, 65, 1, 1300], [0, 3000], [200] * 14 + [65], [64, 2048, 1]):
        xs, dys = (
            [torch.randint(-2, 3, (n, features), device="cuda").bfloat16() for n in lengths]
            for features in (layout.in_features, layout.out_features)
        )
        got = bst.linear_wgrad(xs, dys, layout, dtype=dtype)
        expected = bst.from_dense(torch.cat(dys).double().T @ torch.cat(xs).double(), layout).to(dtype)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("block_size", "density"), [(8, 0.4), (16, 0.5), (32, 0.7), (32, 0.2), (128, 0.5)])
def test_nan_and_inf_reach_what_they_are_multiplied_into(block_size, density):
    """And where W is filled up with zeros (8, 16, 32 that are dense), maybe more outputs of the token, no other one."""
    layout = Layout.from_graph(f"random(12,10,{density})", block_size, seed=3)
    w = torch.randn(layout.values_shape, device="cuda", dtype=torch.bfloat16)
    for n in (30, 700):
        x = torch.randn(n, layout.in_features, device="cuda", dtype=torch.bfloat16)
        x[5, 3], x[17, block_size] = float("nan"), float("inf")
        y = bst.linear(x, w, layout)
        rows = torch.from_numpy(layout.mask()).cuda().repeat_interleave(block_size, 0)
        assert y[5, rows[:, 0]].isnan().all()
        assert not y[17, rows[:, 1]].isfinite().any()
        others = torch.ones(n, dtype=torch.bool, device="cuda")
        others[[5, 17]] = False
        assert y[others].isfinite().all()


def test_devices_must_agree(layout):
    x, w = torch.randn(4, 90, device="cuda"), torch.randn(layout.values_shape)
    with pytest.raises(ValueError, match=r"w is on the CPU, needs cuda:0"):
        bst.linear(x, w, layout)
    with pytest.raises(ValueError, match=r"is on (the CPU|cpu|cuda:0), needs"):
        bst.linear(x.cpu(), w.cuda(), layout)
    with pytest.raises(ValueError, match=r"x is \[4, 91\], layout needs \[N, 90\]"):
        bst.linear(torch.randn(4, 91, device="cuda"), w.cuda(), layout)
    with pytest.raises(ValueError, match=r"dy is \[4, 61\], layout needs \[N, 60\]"):
        bst.linear_wgrad([torch.randn(4, 90, device="cuda")], [torch.randn(4, 61, device="cuda")], layout)
    other = Layout.from_graph("random(9,8,0.9)", 16, seed=4)
    with pytest.raises(ValueError, match="index has"):
        linear_ops.fprop(torch.randn(4, 90, device="cuda"), w.cuda(), bst.index_of(other, "cuda"), 60)


def test_what_does_not_fit_is_refused_before_anything_is_written(layout):
    def tensor(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda").to(dtype)

    x, w = tensor(4, 90), tensor(*layout.values_shape)
    blocks, b = layout.values_shape[:2]
    y = bst.linear(x, w, layout)
    for arguments, match in [
        ({"values": tensor(blocks + 1, b, b)}, "11 blocks"),
        ({"values": w.half()}, "float16|f16"),
        ({"x": x.double(), "values": w}, "float64|f64"),
        ({"x": torch.ones(4, 90, dtype=torch.int32, device="cuda")}, "int32|dtype"),
        ({"bias": tensor(61)}, "bias is"),
        ({"bias": tensor(60).half()}, "bias"),
        ({"gates": tensor(blocks - 1)}, "gates is"),
        ({"gates": tensor(blocks).half()}, "gates"),
        ({"gates": torch.ones(blocks)}, "is on"),
        ({"residual": tensor(3, 60)}, "residual"),
        ({"activation": "tanh"}, "tanh"),
    ]:
        given = {"x": x, "values": w, "layout": layout} | arguments
        with pytest.raises((ValueError, TypeError), match=match):
            bst.linear(**given)
    assert torch.equal(bst.linear(x, w, layout), y)
    for xs, dys, match in [
        ([x], [tensor(5, 60)], "dy"),
        ([x, x], [tensor(4, 60)], "2|1"),
        ([x, x.half()], [tensor(4, 60)] * 2, "float16|f16|dtype"),
    ]:
        with pytest.raises((ValueError, TypeError), match=match):
            bst.linear_wgrad(xs, dys, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [9, 600, 5000])
def test_tensors_that_begin_anywhere(dtype, n):
    """Off the multiples of 16 bytes that fast kernels want: others answer, in any order of strides."""
    layout = Layout.from_graph("random(6,7,0.5)", 32, seed=8)
    memory = torch.randint(-3, 4, (n * 230 + 300,), device="cuda").to(dtype)
    w_memory = torch.randint(-2, 3, (layout.blocks * 1024 + 1,), device="cuda").to(dtype)
    w = w_memory[1:].view(layout.values_shape)
    x = memory[1 : 1 + n * 224].view(n, 224)
    dense = bst.to_dense(w.double(), layout)
    for given in (x, memory[3:].as_strided((n, 224), (229, 1)), memory[3:].as_strided((n, 224), (1, n + 1))):
        expected = given.double() @ dense.T
        assert torch.equal(bst.linear(given, w, layout), expected.to(dtype))
        dy = torch.randint(-1, 2, (n, 192), device="cuda").to(dtype)
        got = bst.linear_wgrad([given], [dy], layout, dtype=torch.float32)
        assert torch.equal(got, bst.from_dense(dy.double().T @ given.double(), layout).float())


def test_a_layout_moves_once(layout):
    fresh = Layout.from_mask(layout.mask(), layout.block_size, out_features=60, in_features=90)
    x, w = torch.randn(4, 90, device="cuda"), torch.randn(fresh.values_shape, device="cuda")
    first = bst.linear(x, w, fresh)
    index = bst.index_of(fresh, x.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert torch.equal(bst.linear(x, w, fresh), first)
        torch.cuda.synchronize()
    assert bst.index_of(fresh, x.device) is index
    assert not [e.name for e in profile.events() if "HtoD" in e.name]


def test_module_moves(layout):
    layer = bst.BlockSparseLinear(90, 60, layout, gates=True)
    x = torch.randn(7, 90)
    here = layer(x)
    there = layer.to("cuda")(x.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)
    state = {key: value.cpu() for key, value in layer.state_dict().items()}
    other = bst.BlockSparseLinear(90, 60, layout, gates=True, device="cuda")
    other.load_state_dict(state)
    assert torch.equal(other(x.cuda()), there)
    assert torch.equal(layer.cpu()(x), here)


# ---- Recurrent networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("given", [None, [4, 0, 2, 1, 4, 3]])
def test_lstm_agrees_with_the_cpu(dtype, given):
    layout = Layout.from_graph("random(3,3,0.7)", 16, seed=2).stack(4)
    pre, w = leaf(4, 6, 4, 48, dtype=dtype), leaf(*layout.values_shape, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    h, c = leaf(6, 48, dtype=dtype), leaf(6, 48, dtype=wide)
    lengths = None if given is None else torch.tensor(given)
    on_cpu = [x.detach().cpu().double().requires_grad_() for x in (pre, w, h, c)]
    y, (h_end, c_end) = bst.lstm(pre, w, layout, (h, c), lengths)
    expected, (h2, c2) = bst.lstm(*on_cpu[:2], layout, tuple(on_cpu[2:]), lengths)
    assert y.is_cuda
    for got, want in ((y, expected), (h_end, h2), (c_end, c2)):
        assert error(got.cpu(), want) < 2 * TOLERANCE[dtype]
    (y.to(wide).sin().sum() + c_end.sum()).backward()
    (expected.sin().sum() + c2.sum()).backward()
    for got, want in zip((pre, w, h, c), on_cpu, strict=True):
        assert error(got.grad.cpu(), want.grad) < 8 * TOLERANCE[dtype]


def test_lstm_in_a_graph():
    layout = Layout.from_graph("random(3,3,0.7)", 16, seed=2)
    layer = bst.BlockSparseLSTM(20, 48, layout, device="cuda")
    x = torch.randn(5, 6, 20, device="cuda")
    lengths = torch.tensor([5, 3, 2, 1, 0, 5], device="cuda")
    with torch.no_grad():
        expected, _ = layer(x, None, lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = layer(x, None, lengths)
        y.zero_()
        graph.replay()
    assert torch.equal(y, expected)


def test_deep_update_agrees_with_the_cpu():
    module = bst.DeepUpdateLSTM.from_graph(12, 48, "ba(6,2)", 8, 3, ports=2, dtype=torch.float64)
    x = torch.randn(5, 4, 12, dtype=torch.float64)
    expected, _ = module(x)
    expected.sin().sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module.cuda()
    y, _ = module(x.cuda())
    y.sin().sum().backward()
    assert error(y.cpu(), expected) < 1e-11
    for p, want in zip(module.parameters(), grads, strict=True):
        assert error(p.grad.cpu(), want) < 1e-9


def test_deep_update_in_bf16_is_as_exact_as_its_rounding():
    layouts = [Layout.from_graph("random(20,20,0.3)", 32, seed=s) for s in range(4)]
    exact = bst.DeepUpdateLSTM(12, 640, layouts, dtype=torch.float64, device="cuda")
    with torch.no_grad():
        for weight in (*(m.weight for m in exact.matrices), exact.gates.weight):
            weight.normal_(std=0.1)
        for p in exact.parameters():
            p.copy_(p.bfloat16())
    module = bst.DeepUpdateLSTM(12, 640, layouts, dtype=torch.bfloat16, device="cuda")
    module.load_state_dict(exact.state_dict())
    x = torch.randn(4, 200, 12, device="cuda").bfloat16()

    def run(module, x):
        module.zero_grad()
        y, _ = module(x)
        y.float().sin().sum().backward()
        with torch.no_grad():
            assert torch.equal(module(x)[0], y), "also when nothing is kept for backward"
        return y, [p.grad for p in module.parameters()]

    expected, wanted = run(exact, x.double())
    y, grads = run(module, x)
    assert error(y.double(), expected) < 0.02
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad.double() - want).norm() < 0.05 * want.norm()
    again, gradients = run(module, x)
    assert torch.equal(again, y)
    assert all(torch.equal(a, b) for a, b in zip(gradients, grads, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_device_works_on_its_own_tensors():
    layout = Layout.from_graph("ba(60,4)", 16, seed=1)
    x, w = torch.randn(40, layout.in_features), torch.randn(layout.values_shape)
    expected = bst.linear(x, w, layout)
    results = []
    for device in ("cuda:1", "cuda:0"):  # the current device is 0 throughout
        a, b = x.to(device).requires_grad_(), w.to(device).requires_grad_()
        y = bst.linear(a, b, layout)
        y.sum().backward()
        assert y.device == b.grad.device == torch.device(device)
        assert error(y.cpu(), expected.double()) < 1e-5
        results.append(b.grad.cpu())
    assert torch.equal(*results)
    with pytest.raises(ValueError, match=r"needs cuda|is on cuda"):
        bst.linear(x.to("cuda:0"), w.to("cuda:1"), layout)
