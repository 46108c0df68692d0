"""Forward-mode differentiation and torch.func: right through linear and convolution, refused by everything else."""

import pytest
import torch
import torch.nn.functional as F
from test_torch import error
from torch import func
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch import norm
from blocksparse.torch.recurrent import SharedWeight

HIDDEN = 16


def gate():
    return Layout.from_graph("random(2,2,0.8)", 8, seed=1)


def linear_call(order="last", transposed=False):
    """f(x, values, gates, bias, residual), and such tensors."""
    layout = Layout.from_graph("random(3,2,0.7)", 8, seed=1, out_features=19, in_features=13)
    layout = layout.t() if transposed else layout
    x = torch.randn(4, layout.in_features).double()
    x = x.t().contiguous().t() if order == "first" else x
    values, gates = torch.randn(layout.values_shape).double(), torch.rand(layout.blocks).double()
    bias, residual = torch.randn(layout.out_features).double(), torch.randn(4, layout.out_features).double()

    def f(x, values, gates, bias, residual):
        return bst.linear(x, values, layout, bias, gates=gates, residual=residual, activation="silu")

    return f, (x, values, gates, bias, residual)


def conv_call(last=False):
    layout = Layout.from_graph("random(2,3,0.7)", 8, seed=1, out_features=13, in_features=20)
    x, values = torch.randn(2, 20, 4, 3).double(), torch.randn(layout.blocks, 9, 8, 8).double()
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    gates, bias = torch.rand(layout.blocks).double(), torch.randn(13).double()

    def f(x, values, gates, bias):
        return bst.conv2d(
            x, values, layout, bias, kernel_size=3, padding=1, stride=(2, 1), gates=gates, activation="silu"
        )

    return f, (x, values, gates, bias)


CALLS = {
    "linear": linear_call,
    "linear, features first": lambda: linear_call("first"),
    "linear, transposed": lambda: linear_call(transposed=True),
    "conv": conv_call,
    "conv, channels last": lambda: conv_call(True),
}


@pytest.mark.parametrize("call", CALLS)
def test_tangents_are_those_of_differences(call):
    f, tensors = CALLS[call]()
    leaves = tuple(t.clone().requires_grad_() for t in tensors)
    assert gradcheck(f, leaves, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(f, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("call", CALLS)
def test_tangents_of_tensors_that_want_no_gradient(call):
    f, tensors = CALLS[call]()
    tangents = tuple(torch.randn_like(t) for t in tensors)
    expected = (f(*(t + 1e-6 * d for t, d in zip(tensors, tangents, strict=True))) - f(*tensors)) / 1e-6
    _, tangent = func.jvp(f, tensors, tangents)
    assert error(tangent, expected) < 1e-5
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(f(*map(forward_ad.make_dual, tensors, tangents)))
    assert torch.equal(got.tangent, tangent)
    assert error(got.primal, f(*tensors)) < 1e-12
    for i in range(len(tensors)):  # each alone

        def alone(t, i=i):
            return f(*tensors[:i], t, *tensors[i + 1 :])

        numeric = (alone(tensors[i] + 1e-6 * tangents[i]) - alone(tensors[i])) / 1e-6
        assert error(func.jvp(alone, (tensors[i],), (tangents[i],))[1], numeric) < 1e-5


def beside_dense(which):
    """The same function with blocks and with a dense weight, and x and values."""
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=1)
    if which == "linear":
        return (
            lambda x, values: bst.linear(x, values, layout).sin().sum(),
            lambda x, values: F.linear(x, bst.to_dense(values, layout)).sin().sum(),
            (torch.randn(3, 16).double(), torch.randn(layout.values_shape).double()),
        )
    return (
        lambda x, values: bst.conv1d(x, values, layout, kernel_size=2).sin().sum(),
        lambda x, values: F.conv1d(x, bst.to_dense(values, layout, kernel_size=(2,))).sin().sum(),
        (torch.randn(2, 16, 3).double(), torch.randn(layout.blocks, 2, 8, 8).double()),
    )


@pytest.mark.parametrize("which", ["linear", "conv"])
def test_forward_mode_within_forward_mode_is_refused(which):
    function, _, (x, values) = beside_dense(which)
    with pytest.raises(NotImplementedError, match="forward mode has no forward mode"):
        func.jacfwd(func.jacfwd(function))(x, values)


def test_tables_that_a_transform_asks_for_first_outlast_it():
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=1)
    x, values = torch.randn(3, 16).double(), torch.randn(layout.values_shape).double()
    loss = lambda x: bst.linear(x, values, layout).sin().sum()  # noqa: E731
    hessian = func.hessian(loss)(x)
    assert hessian.shape == (3, 16, 3, 16)
    assert error(func.grad(loss)(x), torch.autograd.functional.jacobian(loss, x)) < 1e-12


@pytest.mark.parametrize("which", ["linear", "conv"])
def test_compiled_transforms_are_left_to_eager_mode(which):
    function, _, (x, values) = beside_dense(which)
    function(x, values)
    of_both = func.grad(function, argnums=(0, 1))
    got = torch.compile(of_both, backend="aot_eager")(x, values)
    for mine, exact in zip(got, of_both(x, values), strict=True):
        assert error(mine, exact) < 1e-12


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("which", ["linear", "conv"])
def test_transforms_of_transforms_agree_with_dense(which):
    *functions, (x, values) = beside_dense(which)
    for argnums in (0, 1):
        transforms = [func.grad, func.jacfwd, func.jacrev]
        if which == "linear" or argnums == 0:  # 768 weights would take a second
            transforms += [func.hessian]
        for transform in transforms:
            got, want = (transform(f, argnums=argnums)(x, values) for f in functions)
            assert error(got, want) < 1e-12
    rows = [func.vmap(func.grad(f), in_dims=(0, None))(x.unsqueeze(1), values) for f in functions]
    assert error(*rows) < 1e-12


def test_tangents_under_autocast():
    layer = bst.BlockSparseLinear(16, 16, gate())
    x, dx = torch.randn(5, 16), torch.randn(5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, dy = func.jvp(layer, (x,), (dx,))
    assert y.dtype == dy.dtype == torch.bfloat16
    assert error(dy.float(), F.linear(dx, layer.to_dense().weight)) < 2e-2


def test_gradients_along_a_tangent_of_the_weight():
    """Hessian times vector, forward over reverse, as functional_call gives it."""
    layer = bst.BlockSparseLinear(16, 16, gate(), dtype=torch.float64)
    x, v = torch.randn(5, 16).double(), torch.randn_like(layer.weight)

    def loss(weight):
        return func.functional_call(layer, {"weight": weight}, (x,)).sin().sum()

    weight = layer.weight.detach()
    _, got = func.jvp(func.grad(loss), (weight,), (v,))
    step = 1e-6
    expected = (func.grad(loss)(weight + step * v) - func.grad(loss)(weight - step * v)) / (2 * step)
    assert error(got, expected) < 1e-7


def lstm(x):
    return bst.lstm(x, torch.randn(gate().stack(4).values_shape), gate().stack(4))[0]


def layer_norm(x):
    return norm.layer_norm(x.view(-1, 1, 4 * HIDDEN), torch.ones(1, 4 * HIDDEN), torch.zeros(1, 4 * HIDDEN))


def wgrad(x):
    return bst.linear_wgrad([x[0, :, :HIDDEN]], [x[1, :, :HIDDEN].contiguous()], gate())


def cell_with_dropout(x):
    return bst.DeepUpdateLSTM(4 * HIDDEN, HIDDEN, gate(), 2, dropout=0.5)(x)[0]


REFUSED = {
    "lstm": lstm,
    "layer_norm": layer_norm,
    "linear_wgrad": wgrad,
    "multiplicative": lambda x: bst.MultiplicativeLSTM(4 * HIDDEN, HIDDEN, gate())(x)[0],
    "deep_update": lambda x: bst.DeepUpdateLSTM(4 * HIDDEN, HIDDEN, gate(), 2)(x)[0],
    "deep_update, dense": lambda x: bst.DeepUpdateLSTM(4 * HIDDEN, HIDDEN, None, 2)(x)[0],
    "SharedWeight": lambda x: SharedWeight(
        bst.BlockSparseLinear(4 * HIDDEN, HIDDEN, Layout.from_graph("dense(2,8)", 8))
    )(x[0]),
}


@pytest.mark.parametrize("which", REFUSED)
@pytest.mark.parametrize("grad", [False, True])
def test_others_refuse_tangents(which, grad):
    f, x = REFUSED[which], torch.randn(3, 2, 4 * HIDDEN)
    # The norm in front of a deep-update LSTM's steps is the first to meet the tangent.
    message = rf"\[({which.split(',')[0]}|layer_norm)\] a tensor has a tangent"
    with torch.set_grad_enabled(grad):
        with pytest.raises(NotImplementedError, match=message):
            func.jvp(f, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
            f(forward_ad.make_dual(x.clone().requires_grad_(grad), x))
        with forward_ad.dual_level():
            assert torch.isfinite(f(x)).all(), "without a tangent there is no reason to"


@pytest.mark.parametrize("which", ["lstm", "layer_norm", "multiplicative", "deep_update", "deep_update, dense"])
def test_their_gradients_refuse_tangents(which):
    x = torch.randn(3, 2, 4 * HIDDEN, requires_grad=True)
    y = REFUSED[which](x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a tensor has a tangent"):
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.randn_like(y), torch.randn_like(y)))


def test_third_derivatives_with_gates():
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=1)
    x, w = (0.2 * torch.randn(shape, dtype=torch.float64) for shape in ((3, 16), layout.values_shape))
    given = [t.requires_grad_() for t in (x, w, torch.rand(layout.blocks, dtype=torch.float64))]
    results = []
    for call in (
        lambda x, w, gates: bst.linear(x, w, layout, gates=gates),
        lambda x, w, gates: x @ bst.to_dense(w * gates.view(-1, 1, 1), layout).t(),
    ):
        value, made = call(*given).sin().sum(), []
        for i in range(4):
            grads = torch.autograd.grad(value, given, create_graph=True)
            made += grads
            value = sum((g * (k + i + 1) / 4).sin().sum() for k, g in enumerate(grads))
        results.append(made)
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs) < 1e-9
