"""Second derivatives of recurrent networks: those of dense ones, or a refusal. Never zeros, never nothing."""

import itertools

import pytest
import torch
from test_torch import error
from test_torch_cells import MODULES, shaken
from test_torch_lstm import reference
from test_torch_sequences import inputs, make
from torch import nn
from torch.autograd import functional, gradgradcheck

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.norm import layer_norm
from blocksparse.torch.recurrent import SharedWeight, apply_cell

DOUBLE = torch.float64
HIDDEN, INPUT, N = 8, 2, 1
LOSSES = {
    "sum": lambda y, h, c: y.sum() + h.sum() + c.sum(),  # whose own gradient is constant
    "y alone": lambda y, h, c: y.sum(),
    "c alone": lambda y, h, c: c.sum(),
    "curved": lambda y, h, c: y.sin().sum() + (h * c).sum() + (c * c).sum(),
}


def full(hidden=HIDDEN):
    return Layout.from_graph(f"dense({hidden // 8})", 8)


def twins(layers=1, **options):
    sparse = bst.BlockSparseLSTM(INPUT, HIDDEN, full(), layers, dtype=DOUBLE, **options)
    return sparse, sparse.to_dense()


@pytest.mark.parametrize("loss", LOSSES)
def test_hessians_of_inputs_are_those_of_nn_lstm(loss):
    layers = 2 if loss == "curved" else 1
    sparse, dense = twins(layers)
    x = torch.randn(2, N, INPUT, dtype=DOUBLE)
    state = tuple(torch.randn(layers, N, HIDDEN, dtype=DOUBLE) for _ in "hc")

    def through(network):
        def f(x, h, c):
            y, (h, c) = network(x, (h, c))
            return LOSSES[loss](y, h, c)

        return f

    got, want = (functional.hessian(through(network), (x, *state)) for network in (sparse, dense))
    for mine, theirs in zip(itertools.chain(*got), itertools.chain(*want), strict=True):
        assert theirs.abs().max() > 1e-4
        assert error(mine, theirs) < 1e-10
    v = tuple(torch.randn_like(t) for t in (x, *state))
    for product in (functional.hvp, functional.vhp):
        got, want = (product(through(network), (x, *state), v)[1] for network in (sparse, dense))
        assert all(error(mine, theirs) < 1e-10 for mine, theirs in zip(got, want, strict=True))


def test_hessians_of_weights_are_those_of_nn_lstm():
    sparse, dense = twins()
    x = torch.randn(2, N, INPUT, dtype=DOUBLE)
    layout = sparse.recurrent[0].layout
    names = {"input.0.weight": "weight_ih_l0", "input.0.bias": "bias_ih_l0"}

    def through(network, name):
        def f(weight):
            return torch.func.functional_call(network, {name: weight}, (x,))[0].sum()

        return f

    for mine, theirs in names.items():
        got = functional.hessian(through(sparse, mine), sparse.get_parameter(mine).detach())
        want = functional.hessian(through(dense, theirs), dense.get_parameter(theirs).detach())
        assert want.abs().max() > 1e-4
        assert error(got, want) < 1e-10
    values, weight = sparse.recurrent[0].weight.detach(), dense.weight_hh_l0.detach()
    for _ in range(4):  # of 65,536 numbers, the products with some vectors
        v = torch.randn_like(weight)
        got = functional.hvp(through(sparse, "recurrent.0.weight"), values, bst.from_dense(v, layout))[1]
        want = functional.hvp(through(dense, "weight_hh_l0"), weight, v)[1]
        assert want.abs().max() > 1e-4
        assert error(bst.to_dense(got, layout), want) < 1e-10


def tensors(layout, steps=3, n=3):
    hidden = layout.in_features
    shapes = (steps, n, 4, hidden), layout.values_shape, (n, hidden), (n, hidden)
    return [torch.randn(shape, dtype=DOUBLE).mul_(0.5).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_gradients_of_gradients_are_those_of_differences(with_lengths, with_state):
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=1).stack(4)
    leaves = tensors(layout)[: 4 if with_state else 2]
    lengths = torch.tensor([2, 0, 3]) if with_lengths else None

    def f(pre, values, *state):
        y, (h, c) = bst.lstm(pre, values, layout, state or None, lengths)
        return y, h, c

    assert gradgradcheck(f, leaves, fast_mode=True)


def test_all_orders_agree_with_the_equations():
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=1).stack(4)
    leaves, lengths = tensors(layout), torch.tensor([2, 0, 3])

    def blocks(pre, values, h, c):
        y, (h, c) = bst.lstm(pre, values, layout, (h, c), lengths)
        return y, h, c

    def equations(pre, values, h, c):
        return reference(pre, bst.to_dense(values, layout), h, c, lengths)

    results = []
    for f in (blocks, equations):
        value, made = sum(t.sin().sum() for t in f(*leaves)), []
        for i in range(4):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            made += grads
            value = sum((g * (k + i + 1)).cos().sum() for k, g in enumerate(grads))
        results.append(made)
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs) < 1e-9


def test_some_second_gradients_only():
    layout = full(16).stack(4)
    for wants in itertools.product((False, True), repeat=4):
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors(layout), wants, strict=True)]
        given = [t for t in leaves if t.requires_grad]
        if not given:
            continue
        _, (_, c) = bst.lstm(*leaves[:2], layout, tuple(leaves[2:]))
        grads = torch.autograd.grad(c.sum(), given, create_graph=True)
        exact = [t.detach().requires_grad_(want) for t, want in zip(leaves, wants, strict=True)]
        _, _, c = reference(exact[0], bst.to_dense(exact[1], layout), *exact[2:])
        want = torch.autograd.grad(c.sum(), [t for t in exact if t.requires_grad], create_graph=True)
        for mine, theirs in zip(grads, want, strict=True):
            assert error(mine, theirs) < 1e-12
        seconds = [
            torch.autograd.grad(sum(g.sin().sum() for g in gs), ts, allow_unused=True)
            for gs, ts in ((grads, given), (want, [t for t in exact if t.requires_grad]))
        ]
        for mine, theirs in zip(*seconds, strict=True):
            assert theirs is None or error(mine, theirs) < 1e-11


def test_cells_alone():
    z, c = (torch.randn(shape, dtype=DOUBLE, requires_grad=True) for shape in ((N, 4, 16), (N, 16)))
    layout = full(16).stack(4)
    values = torch.zeros(layout.values_shape, dtype=DOUBLE)

    def f(z, c):
        return apply_cell(z, values, bst.index_of(layout), c)

    assert gradgradcheck(f, (z, c), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_second_gradients_under_autocast(dtype):
    layer = bst.BlockSparseLSTM(INPUT, 32, full(32))
    x = torch.randn(4, 3, INPUT)
    seconds = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled):
            y, _ = layer(x)
        grads = torch.autograd.grad(y.float().sum(), list(layer.parameters()), create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.float().square().sum() for g in grads), list(layer.parameters())))
    for exact, rounded in zip(*seconds, strict=True):
        assert rounded.dtype == torch.float32
        assert error(rounded, exact) < 0.1


def test_a_penalty_on_gradients_trains():
    """Training on the norm of a gradient, as WGAN-GP does, follows nn.LSTM."""
    sparse, dense = twins()
    dense.bias_hh_l0.requires_grad_(False)  # the sum of both is one bias there
    x = torch.randn(3, N, INPUT, dtype=DOUBLE)
    for network in (sparse, dense):
        step = torch.optim.SGD(network.parameters(), 0.1)
        for _ in range(3):
            given = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(network(given)[0].sum(), given, create_graph=True)
            step.zero_grad()
            (grad.norm() - 1).square().backward()
            step.step()
    assert error(sparse(x)[0], dense(x)[0]) < 1e-10


def test_ordinary_training_keeps_no_more():
    """What is saved for backward, as before: no second copy of what all steps were given."""
    layout = full(16).stack(4)
    kept = []
    pre, values, h, c = tensors(layout)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bst.lstm(pre, values, layout, (h, c))
    assert not any(t.data_ptr() == pre.data_ptr() for t in kept)
    assert sum(t.numel() == pre.numel() for t in kept) == 1, "the gates"


# ---- The layer norm, and weights of many steps -----------------------------------------------------------------------


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("with_factor", "with_term"), list(itertools.product((False, True), repeat=2)))
def test_layer_norm(relu, with_factor, with_term):
    x, factor, term = (torch.randn(N, 2, 8, dtype=DOUBLE, requires_grad=True) for _ in range(3))
    gain, shift = (torch.randn(2, 8, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    given = [x, gain, shift, *([factor] if with_factor else []), *([term] if with_term else [])]

    def f(x, gain, shift, *more):
        of_factor, of_term = (more[0] if with_factor else None), (more[-1] if with_term else None)
        return layer_norm(x, gain, shift, of_factor, of_term, relu)

    assert gradgradcheck(f, given, fast_mode=True)
    hessian = functional.hessian(lambda x: f(x, *given[1:]).sum(), x.detach())
    assert hessian.abs().max() > 1e-3 or not with_factor


def test_layer_norm_is_that_of_pytorch():
    x = torch.randn(1, 1, 8, dtype=DOUBLE)
    gain, shift = torch.rand(1, 8, dtype=DOUBLE), torch.rand(1, 8, dtype=DOUBLE)
    got = functional.hessian(lambda x: layer_norm(x, gain, shift).sum(), x)
    want = functional.hessian(lambda x: nn.functional.layer_norm(x, (8,), gain[0], shift[0]).sum(), x)
    assert want.abs().max() > 1e-3
    assert error(got, want) < 1e-9


@pytest.mark.parametrize("kind", ["blocks", "dense"])
def test_shared_weights(kind):
    layer = (
        bst.BlockSparseLinear(16, 16, full(16), False, dtype=DOUBLE) if kind == "blocks" else nn.Linear(16, 16, False)
    )
    layer = layer.double()
    x = torch.randn(N, 16, dtype=DOUBLE)

    def loss(use, x):
        return use(use(use(x)).sin()).sum()

    def parts(shared):
        use = SharedWeight(layer) if shared else layer
        given = x.clone().requires_grad_()
        grads = torch.autograd.grad(loss(use, given), (given, layer.weight), create_graph=True)
        return (*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), (given, layer.weight)))

    for mine, theirs in zip(parts(True), parts(False), strict=True):
        assert theirs.abs().max() > 1e-3
        assert error(mine, theirs) < 1e-12


@pytest.mark.parametrize("which", ["multiplicative", "deep, ports", "deep, dense"])
def test_composed_steps(which, monkeypatch):
    """Where steps are not one op, derivatives of all orders are those of the equations."""
    make_it, equations = MODULES[which]
    module = shaken(make_it())
    monkeypatch.setattr(type(module), "_is_one_op", lambda *_: False)
    monkeypatch.setattr(bst.DeepUpdateLSTM, "_is_one_node", lambda *_: False)
    x = torch.randn(2, N, module.input_size, dtype=DOUBLE, requires_grad=True)
    zeros = torch.zeros(1, N, module.hidden_size, dtype=DOUBLE)
    seconds = []
    for f in (lambda x: module(x)[0], lambda x: equations(module, x, (zeros[0], zeros[0]))[0]):
        leaves = [x, *module.parameters()]
        grads = torch.autograd.grad(f(x).sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for mine, theirs in zip(*seconds, strict=True):
        assert theirs.abs().max() > 0
        assert error(mine, theirs) < 1e-8


# ---- What is refused -------------------------------------------------------------------------------------------------

ONE_CALL = {"multiplicative": "multiplicative", "deep": "deep_update", "deep, dense": "deep_update"}


@pytest.mark.parametrize("which", ONE_CALL)
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_of_one_call_refuse_second_derivatives(which, loss):
    module, (x, state) = make(which, "cpu"), inputs("cpu")
    message = rf"\[{ONE_CALL[which]}\] has no second derivative"

    def f(x):
        y, (h, c) = module(x, state)
        return LOSSES[loss](y, h, c)

    with pytest.raises(NotImplementedError, match=message):
        functional.hessian(f, x.detach())
    with pytest.raises(NotImplementedError, match=message):
        functional.hvp(f, x.detach(), torch.ones_like(x))
    leaves = [x, *state, *module.parameters()]
    grads = torch.autograd.grad(f(x), leaves, create_graph=True)
    assert len(grads) == len(leaves)
    for grad, leaf in itertools.product(grads, leaves):
        if not grad.requires_grad:  # of what the second derivative would not depend on
            continue
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(grad.sum(), leaf, retain_graph=True, allow_unused=True)
    whole = torch.autograd.grad(f(x), leaves)
    for mine, alone in zip(grads, whole, strict=True):
        assert error(mine, alone) < 1e-12


def test_one_node_of_dense_steps_refuses_them(monkeypatch):
    module, (x, _) = make("deep, dense", "cpu"), inputs("cpu")
    monkeypatch.setattr(bst.DeepUpdateLSTM, "_is_one_op", lambda *_: False)
    for f in (lambda x: module(x)[0].sum(), lambda x: module(x)[1][1].sin().sum()):
        with pytest.raises(NotImplementedError, match=r"\[deep_update\] has no second derivative"):
            functional.hessian(f, x.detach())
        grads = torch.autograd.grad(f(x), [x, *module.parameters()], create_graph=True)
        for grad in grads:
            with pytest.raises(NotImplementedError, match=r"\[deep_update\] has no second derivative"):
                torch.autograd.grad(grad.sum(), x, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_of_functions_are_refused(transform):
    for module, x in ((twins()[0], torch.randn(3, N, INPUT, dtype=DOUBLE)), (make("deep", "cpu"), inputs("cpu")[0])):
        with pytest.raises((RuntimeError, NotImplementedError)):
            transform(lambda x, module=module: module(x)[0].sum())(x.detach())
