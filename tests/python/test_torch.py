import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, make_layout
from torch.library import opcheck

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.ops import linear as ops

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)).item()


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.fixture
def small():
    return Layout.from_graph("random(2,3,0.7)", 8, seed=1, out_features=13, in_features=21)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_linear_agrees_with_dense(isa, layout, dtype):
    x, w, bias = leaf(2, 3, 90, dtype=dtype), leaf(*layout.values_shape, dtype=dtype), leaf(60, dtype=dtype)
    y = bst.linear(x, w, layout, bias)
    x64, w64, bias64 = (t.detach().double().requires_grad_() for t in (x, w, bias))
    expected = F.linear(x64, bst.to_dense(w64, layout), bias64)
    assert y.dtype == dtype
    assert error(y, expected) < TOLERANCE[dtype]
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    for got, want in ((x, x64), (w, w64), (bias, bias64)):
        assert got.grad.dtype == dtype
        assert error(got.grad, want.grad) < 2 * TOLERANCE[dtype]


def test_gradients_of_all_orders(small):
    x, w, bias = leaf(4, 21), leaf(*small.values_shape), leaf(13)
    gates = torch.rand(small.blocks, dtype=torch.float64, requires_grad=True)
    for activation in ("none", "gelu", "silu"):

        def f(x, w, bias, gates, activation=activation):
            return bst.linear(x, w, small, bias, gates=gates, activation=activation)

        assert torch.autograd.gradcheck(f, (x, w, bias, gates))
        assert torch.autograd.gradgradcheck(f, (x, w, bias, gates))
    y, residual = leaf(4, 13), leaf(4, 21)

    def transposed(y, w, residual):
        return bst.linear(y, w, small.t(), residual=residual)

    assert torch.autograd.gradcheck(transposed, (y, w, residual))
    assert torch.autograd.gradgradcheck(transposed, (y, w, residual))


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_a_sum_of_gradients(small, gated):
    """Whose own gradients are constants, of no strides."""
    x, w = leaf(4, 21), leaf(*small.values_shape)
    gates = torch.rand(small.blocks, dtype=torch.float64, requires_grad=True) if gated else None
    leaves, results = [t for t in (x, w, gates) if t is not None], []
    dense = w if gates is None else w * gates.view(-1, 1, 1)
    for y in (bst.linear(x, w, small, gates=gates), F.linear(x, bst.to_dense(dense, small))):
        grads = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.sum() for g in grads), leaves))
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs) < 1e-12


def test_only_wanted_gradients_are_made(small):
    w = leaf(*small.values_shape)
    for wants_x, wants_w in itertools.product((False, True), repeat=2):
        x = torch.randn(4, 21, dtype=torch.float64, requires_grad=wants_x)
        w = torch.randn(*small.values_shape, dtype=torch.float64, requires_grad=wants_w)
        y = bst.linear(x, w, small)
        assert y.requires_grad == (wants_x or wants_w)
        if y.requires_grad:
            y.sum().backward()
        assert (x.grad is not None) == wants_x
        assert (w.grad is not None) == wants_w


def test_activation_is_fused_without_gradient_only_in_speed(layout):
    x, w, bias, residual = torch.randn(9, 90), torch.randn(layout.values_shape), torch.randn(60), torch.randn(9, 60)
    for activation in ("none", "relu", "gelu", "silu"):
        options = {"residual": residual, "activation": activation}
        fused = bst.linear(x, w, layout, bias, **options)
        apart = bst.linear(x, w.clone().requires_grad_(), layout, bias, **options)
        torch.testing.assert_close(fused, apart.detach(), rtol=1e-5, atol=1e-5)


def _op_calls(layout, dtype=torch.float32):
    index = bst.index_of(layout)
    x, dy = torch.randn(7, layout.in_features, dtype=dtype), torch.randn(7, layout.out_features, dtype=dtype)
    w, gates = torch.randn(layout.values_shape, dtype=dtype), torch.rand(layout.blocks)
    bias = torch.randn(layout.out_features, dtype=dtype)
    sizes = (layout.blocks, layout.block_size)
    first = torch.randn(layout.in_features, 7, dtype=dtype).t()
    yield ops.linear, (x, w, index, bias, layout.out_features), {}
    yield ops.linear, (first, w, index, None, layout.out_features), {}
    yield ops.fprop, (x, w, index, layout.out_features), {}
    yield ops.fprop, (first, w, index, layout.out_features), {}
    yield ops.fprop, (x.view(1, 7, -1), w, index, layout.out_features), {"bias": bias, "gates": gates, "activation": 2}
    yield ops.fprop, (x, w, index, layout.out_features), {"residual": dy}
    yield ops.dgrad, (dy, w, index, layout.in_features), {"gates": gates}
    yield ops.dgrad, (x, w, index, layout.out_features, True), {}
    yield ops.wgrad, (x, dy, index, *sizes), {}
    yield ops.wgrad, (x, dy, index, *sizes), {"wide": True, "values": w, "gates": gates, "gate_gradient": True}
    yield ops.wgrad_list, ([x, x], [dy, dy], index, *sizes), {}
    for op, arguments in (
        (ops.linear, (x, w, index, bias, layout.out_features)),
        (ops.fprop, (x, w, index, layout.out_features)),
        (ops.dgrad, (dy, w, index, layout.in_features)),
        (ops.wgrad, (x, dy, index, *sizes)),
    ):
        yield op, arguments, {"tf32": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(layout, dtype):
    for op, arguments, options in _op_calls(layout, dtype):
        opcheck(op, arguments, options)


def results_of_calls():
    """Whether the kernels are C++, then what they answer."""
    return [ops.KERNELS == "C++", *(op(*arguments, **options) for op, arguments, options in _op_calls(make_layout()))]


def test_python_kernels_give_the_same_bits(with_python_kernels):
    """The kernels over ctypes, which older PyTorch gets, against the C++ ones."""
    is_cpp, *theirs = with_python_kernels("test_torch.results_of_calls")
    assert not is_cpp
    is_cpp, *mine = results_of_calls()
    assert is_cpp
    assert_same(mine, theirs)


def test_compile_with_gradients(layout):
    for gates in (False, True):
        layer = bst.BlockSparseLinear(90, 60, layout, gates=gates, activation="gelu")
        compiled = torch.compile(layer, fullgraph=True, dynamic=False)
        x = torch.randn(5, 90, requires_grad=True)
        y = compiled(x)
        y.square().sum().backward()
        grads = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
        x.grad = None
        layer.zero_grad()
        layer(x).square().sum().backward()
        for got, want in zip(grads, [x.grad, *(p.grad for p in layer.parameters())], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x))


def test_compile_of_the_function_and_dynamic_shapes(layout):
    w = torch.randn(layout.values_shape)
    compiled = torch.compile(lambda x: bst.linear(x, w, layout).relu(), fullgraph=True, dynamic=True)
    for n in (3, 7, 12):
        x = torch.randn(n, 90)
        torch.testing.assert_close(compiled(x), bst.linear(x, w, layout).relu())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_functions_with_several_layouts(small, backend):
    other = Layout.from_graph("random(3,2,0.7)", 8, seed=2, out_features=21, in_features=13)
    w, v = torch.randn(small.values_shape, requires_grad=True), torch.randn(other.values_shape)

    def both(x):
        return bst.linear(bst.linear(bst.linear(x, w, small), v, other), w, small)

    x = torch.randn(5, 21)
    torch.testing.assert_close(torch.compile(both, backend=backend, fullgraph=True)(x), both(x))


def test_export(layout):
    layer = bst.BlockSparseLinear(90, 60, layout).eval()
    x = torch.randn(5, 90)
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(layout, dtype):
    layer = bst.BlockSparseLinear(90, 60, layout)
    x = torch.randn(9, 90, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
        with torch.no_grad():
            assert layer(x).dtype == dtype
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    reference = layer.to_dense()
    x2 = x.detach().clone().requires_grad_()
    reference(x2).square().sum().backward()
    assert error(y, reference(x2)) < 2e-2
    assert error(x.grad, x2.grad) < 3e-2
    assert error(layer.weight.grad, bst.from_dense(reference.weight.grad, layout)) < 3e-2


def test_memory_layouts(layout):
    w = torch.randn(layout.values_shape, dtype=torch.float64)
    dense = bst.to_dense(w, layout)
    storage = torch.randn(90, 11, dtype=torch.float64)
    for x in (
        storage.t(),  # features first
        torch.randn(11, 180, dtype=torch.float64)[:, ::2],
        torch.randn(1, 90, dtype=torch.float64).expand(11, 90),
        torch.randn(3, 90, 4, dtype=torch.float64).transpose(1, 2),
        torch.randn(90, dtype=torch.float64),
        torch.randn(0, 90, dtype=torch.float64),
        torch.randn(11, 100, dtype=torch.float64)[:, 5:95],
    ):
        x = x.detach().requires_grad_()
        y = bst.linear(x, w.requires_grad_(), layout)
        torch.testing.assert_close(y, F.linear(x, dense), rtol=1e-12, atol=1e-12)
        y.sum().backward()  # dy is expanded
        torch.testing.assert_close(x.grad, dense.sum(0).expand_as(x))
    y = bst.linear(storage.t(), w, layout)
    assert y.t().is_contiguous(), "features-first is answered in kind"


def test_wgrad_of_a_list(layout):
    xs = [torch.randn(n, 90) for n in (3, 8)]
    dys = [torch.randn(n, 60) for n in (3, 8)]
    dense = sum(dy.t() @ x for x, dy in zip(xs, dys, strict=True))
    torch.testing.assert_close(bst.linear_wgrad(xs, dys, layout), bst.from_dense(dense, layout), rtol=1e-4, atol=1e-4)
    half = bst.linear_wgrad([x.bfloat16() for x in xs], [dy.bfloat16() for dy in dys], layout, dtype=torch.float32)
    assert half.dtype == torch.float32
    with pytest.raises(ValueError, match="xs is empty"):
        bst.linear_wgrad([], [], layout)
    with pytest.raises(ValueError, match="as many of each"):
        bst.linear_wgrad(xs, dys[:1], layout)


def test_two_threads_at_once(layout):
    from concurrent.futures import ThreadPoolExecutor

    layer = bst.BlockSparseLinear(90, 60, layout)
    xs = [torch.randn(20, 90) for _ in range(8)]
    with torch.no_grad():
        expected = [layer(x) for x in xs]

    def run(x):
        with torch.no_grad():
            return [layer(x) for _ in range(50)][-1]

    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(run, xs), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w, x: bst.linear(x[:, :80], w[0], w[1]), r"x is \[5, 80\], layout needs \[N, 90\]"),
        (lambda w, x: bst.linear(x.double(), w[0], w[1]), "values are torch.float32, needs torch.float64"),
        (lambda w, x: bst.linear(x, w[0][1:], w[1]), r"w is \[.*needs \["),
        (lambda w, x: bst.linear(x, w[0], w[1], torch.zeros(59)), r"bias is \[59\], needs \[60\]"),
        (lambda w, x: bst.linear(x, w[0], w[1], torch.zeros(60).double()), "bias is f64, needs f32"),
        (lambda w, x: bst.linear(x, w[0], w[1], gates=torch.zeros(3)), "gates is"),
        (lambda w, x: bst.linear(x, w[0], w[1], residual=torch.zeros(5, 59)), "residual is"),
        (lambda w, x: bst.linear(x, w[0], w[1], activation="tanh"), "activation is 'tanh'"),
        (lambda w, x: bst.linear(x.int(), w[0].int(), w[1]), r"a tensor of torch\.int32, needs one of"),
        (lambda w, x: ops.fprop(x, w[0], torch.zeros(40, dtype=torch.int32), 60), "no layout index"),
        (
            lambda w, x: ops.fprop(x, w[0], torch.zeros(40), 60),
            r"index is torch.float32 \[40\], needs the int32 tensor",
        ),
    ],
)
def test_says_what_is_wrong(layout, call, text):
    with pytest.raises(ValueError, match=text):
        call((torch.randn(layout.values_shape), layout), torch.randn(5, 90))


# ---- BlockSparseLinear ----------------------------------------------------------------------------------------------


def test_second_gradient_goes_through_the_casts_of_autocast(layout):
    torch.manual_seed(0)
    ours = bst.BlockSparseLinear(90, 60, layout)
    dense = ours.to_dense()
    x = torch.randn(16, 90)

    def penalty_gradient(layer, autocast):
        layer.zero_grad()
        y = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            (dx,) = torch.autograd.grad(layer(y).float().square().sum(), y, create_graph=True)
        dx.square().sum().backward()
        return layer.weight.grad

    truth = bst.from_dense(penalty_gradient(dense, False), layout)
    assert error(penalty_gradient(ours, False), truth) < 1e-5
    assert error(penalty_gradient(ours, True), truth) < 2e-2


def test_evaluating_before_training(layout):
    fresh = Layout.from_pattern(layout.pattern())
    w = torch.randn(fresh.values_shape, requires_grad=True)
    with torch.inference_mode():
        bst.linear(torch.randn(3, 90), w, fresh)
    bst.linear(torch.randn(3, 90), w, fresh).sum().backward()
    with torch._subclasses.FakeTensorMode():
        assert bst.linear(
            torch.randn(3, 90), torch.randn(fresh.values_shape), Layout.from_pattern(fresh.pattern())
        ).shape == (3, 60)


def test_same_arguments_with_and_without_gradient(layout):
    w = torch.randn(layout.values_shape)
    for residual in (torch.zeros(1, 60), torch.zeros(3, 60, dtype=torch.float64)):
        for wanted in (False, True):
            with pytest.raises(ValueError, match="residual is"):
                bst.linear(torch.randn(3, 90), w.clone().requires_grad_(wanted), layout, residual=residual)
    for name in ("bias", "gates", "residual"):
        with pytest.raises(ValueError, match="0 dimensions"):
            bst.linear(torch.randn(3, 90), w, layout, **{name: torch.tensor(5.0)})
    with pytest.raises(TypeError, match="x is a ndarray"):
        bst.linear(torch.randn(3, 90).numpy(), w, layout)
    with pytest.raises(TypeError, match="layout is a str"):
        bst.linear(torch.randn(3, 90), w, "ba(4,2)")
    y = bst.linear(torch.randn(2, 1, 1, 3, 1, 2, 90), w, layout)
    assert y.shape == (2, 1, 1, 3, 1, 2, 60)


def test_a_mask_on_the_host_is_not_one_on_a_card():
    with pytest.raises(ValueError, match=r"needs a tensor on a CUDA device; Layout.from_mask takes others"):
        Layout.from_device_mask(torch.ones(2, 2), 8)
