"""The cells that are composed of linear ops, against their equations with dense weights."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import opcheck

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.norm import layer_norm
from blocksparse.torch.recurrent import SharedWeight

HIDDEN, INPUT, STEPS, N = 48, 12, 5, 3
DOUBLE = torch.float64


def error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)).item()


def gate(seed=2, block=16):
    return Layout.from_graph("ws(3,2,0)" if block == 16 else "ba(6,2)", block, seed=seed)


def shaken(module):
    """Away from the start, where identities hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return module


def dense_of(layer):
    return layer.weight if isinstance(layer, nn.Linear) else bst.to_dense(layer.weight, layer.layout)


def gates_of(z, c):
    i, f, g, o = z.unbind(1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def multiplicative(m, x, state):
    h, c = state
    w_m, w_h = dense_of(m.recurrent_m), dense_of(m.recurrent)
    ys = []
    for x_t in x:
        between = (x_t @ m.input_m.weight.t()) * (h @ w_m.t())
        z = F.linear(x_t, m.input.weight, m.input.bias) + between @ w_h.t()
        h, c = gates_of(z.view(-1, 4, HIDDEN), c)
        ys.append(h)
    return torch.stack(ys), (h, c)


def norm(x, gain, shift):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain + shift


def deep_update(m, x, state):
    h, c = state
    weights, w_gates = [dense_of(layer) for layer in m.matrices], dense_of(m.gates).view(4, HIDDEN, HIDDEN)
    ys = []
    for x_t in x:
        factor, term = (norm(x_t @ m.input[k].t(), *m.input_norm[k]) for k in (0, 1))
        h = norm(h @ weights[0].t(), *m.matrix_norm[0])
        columns = list(h.unbind(1))
        for k, port in enumerate(m.port_units.tolist()):
            columns[port] = columns[port] * factor[:, k]
        h = norm(torch.stack(columns, 1) @ weights[1].t(), *m.matrix_norm[1])
        columns = list(h.unbind(1))
        for k, port in enumerate(m.port_units.tolist()):
            columns[port] = columns[port] + term[:, k]
        h = torch.stack(columns, 1).relu()
        for j in range(2, m.inner):
            h = norm(h @ weights[j].t(), *m.matrix_norm[j]).relu()
        z = torch.stack([norm(h @ w_gates[k].t(), m.gate_norm[0, k], m.gate_norm[1, k]) for k in range(4)], 1)
        h, c = gates_of(z, c)
        ys.append(h)
    return torch.stack(ys), (h, c)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
def test_layer_norm(dtype):
    wide = DOUBLE if dtype == DOUBLE else torch.float32
    x, factor, term, dy = (torch.randn(N, 2, HIDDEN, dtype=dtype) for _ in range(4))
    gain, shift = (torch.randn(2, HIDDEN, dtype=wide) for _ in range(2))
    leaves = [t.requires_grad_() for t in (x, gain, shift, factor, term)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = layer_norm(*leaves, relu=True, epsilon=1e-6)
    z = norm(*exact[:3]) * exact[3] + exact[4]
    tolerance = {DOUBLE: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert error(y, z.relu()) < tolerance
    got = torch.autograd.grad(y, leaves, dy)
    want = torch.autograd.grad(torch.where(y.detach() > 0, z, 0), exact, dy.double())
    for leaf, a, b in zip(leaves, got, want, strict=True):
        assert a.dtype == leaf.dtype
        assert error(a, b) < 2 * tolerance
    opcheck(torch.ops.blocksparse.layer_norm.default, (*(t.detach() for t in leaves), True, 1e-6))
    with pytest.raises(ValueError, match=r"gain is .*needs \[2, 48\]"):
        layer_norm(x, gain[:1], shift)


def layouts(count):
    return [gate(seed, 8) for seed in range(count)]


MODULES = {
    "multiplicative": (lambda: bst.MultiplicativeLSTM(INPUT, HIDDEN, gate(), dtype=DOUBLE), multiplicative),
    "two layouts": (
        lambda: bst.MultiplicativeLSTM(INPUT, HIDDEN, (gate(), gate(3).stack(4)), dtype=DOUBLE),
        multiplicative,
    ),
    "deep": (lambda: bst.DeepUpdateLSTM(INPUT, HIDDEN, layouts(5), dtype=DOUBLE), deep_update),
    "deep, ports": (lambda: bst.DeepUpdateLSTM(INPUT, HIDDEN, layouts(3), ports=2, dtype=DOUBLE), deep_update),
    "deep, list": (
        lambda: bst.DeepUpdateLSTM(INPUT, HIDDEN, gate(), 2, torch.tensor([1, 5, 40]), dtype=DOUBLE),
        deep_update,
    ),
    "deep, dense": (lambda: bst.DeepUpdateLSTM(INPUT, HIDDEN, None, 3, dtype=DOUBLE), deep_update),
}


@pytest.mark.parametrize("which", MODULES)
def test_forward_and_gradients(which):
    make, reference = MODULES[which]
    module = shaken(make())
    x = torch.randn(STEPS, N, INPUT, dtype=DOUBLE, requires_grad=True)
    state = [torch.randn(1, N, HIDDEN, dtype=DOUBLE, requires_grad=True) for _ in "hc"]
    y, (h, c) = module(x, tuple(state))
    expected, (h2, c2) = reference(module, x, (state[0][0], state[1][0]))
    for a, b in ((y, expected), (h[0], h2), (c[0], c2)):
        assert error(a, b) < 1e-12
    leaves = [x, *state, *module.parameters()]
    got = torch.autograd.grad(y.sin().sum() + (h * c).sum(), leaves)
    want = torch.autograd.grad(expected.sin().sum() + (h2 * c2).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 0
        assert error(a, b) < 1e-10


@pytest.mark.parametrize("which", ["multiplicative", "deep, ports"])
def test_lengths_and_chunks(which):
    module = shaken(MODULES[which][0]())
    x = torch.randn(STEPS, N, INPUT, dtype=DOUBLE)
    lengths = torch.tensor([5, 0, 3])
    y, (h, c) = module(x, None, lengths)
    for k, t in enumerate(lengths.tolist()):
        alone, (h1, c1) = module(x[:t, k : k + 1])
        assert torch.allclose(y[:t, k : k + 1], alone, atol=1e-13)
        assert not y[t:, k].any()
        assert torch.allclose(h[:, k : k + 1], h1, atol=1e-13)
        assert torch.allclose(c[:, k : k + 1], c1, atol=1e-13)
    whole, end = module(x)
    first, state = module(x[:2])
    second, state = module(x[2:], state)
    assert torch.allclose(torch.cat([first, second]), whole, atol=1e-13)
    assert torch.allclose(state[1], end[1], atol=1e-13)


def test_packed_and_batch_first():
    packed = nn.utils.rnn.pack_sequence([torch.randn(t, INPUT) for t in (2, 5, 3)], enforce_sorted=False)
    module = bst.DeepUpdateLSTM.from_graph(INPUT, HIDDEN, "ba(6,2)", 8, 3, seed=4)
    y, (h, _) = module(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed)
    expected, (h2, _) = module(padded, None, lengths)
    assert error(nn.utils.rnn.pad_packed_sequence(y)[0], expected) < 1e-6
    assert error(h, h2) < 1e-6
    module.batch_first = True
    assert error(module(padded.transpose(0, 1), None, lengths)[0], expected.transpose(0, 1)) < 1e-6


def test_starts_as_identity():
    module = bst.DeepUpdateLSTM.from_graph(64, HIDDEN, "ba(6,2)", 8, 4, seed=1)
    h = torch.randn(N, HIDDEN)
    for layer in module.matrices:
        assert torch.equal(layer(h), h)
    assert torch.equal(module.gates(h), h.repeat(1, 4))
    seen = [layer.layout for layer in module.matrices]
    assert len({hash(layout) for layout in seen}) > 1
    assert seen[0] == Layout.from_graph("ba(6,2)", 8, seed=1)
    assert module.layouts[-1] == Layout.from_graph("ba(6,2)", 8, seed=5).stack(4)
    shared = bst.DeepUpdateLSTM.from_graph(64, HIDDEN, "ba(6,2)", 8, 4, seed=1, share=True)
    assert len({hash(layout) for layout in shared.layouts}) == 2
    assert module.gate_norm[1].sum() == HIDDEN


def test_parameters_are_those_of_the_formula():
    n, p, e, inner, nnz = HIDDEN, 24, INPUT, 3, gate(0, 8).blocks * 64
    module = bst.DeepUpdateLSTM(e, n, gate(0, 8), inner, 2)
    assert sum(x.numel() for x in module.parameters()) == (4 + inner) * nnz + 2 * e * p + 2 * (inner + 4) * n + 4 * p


def test_dropout_is_of_training_alone():
    module = bst.DeepUpdateLSTM(INPUT, HIDDEN, gate(), 2, dropout=0.5)
    x = torch.randn(STEPS, N, INPUT)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize("which", ["multiplicative", "deep"])
def test_autocast(which):
    module = shaken(MODULES[which][0]()).float()
    x = torch.randn(STEPS, N, INPUT)
    expected, _ = module(x)
    expected.sum().backward()
    wide = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y, (_, c) = module(x)
    assert y.dtype == torch.bfloat16
    assert c.dtype == torch.float32
    assert error(y, expected) < 0.05
    y.float().sum().backward()
    for p, want in zip(module.parameters(), wide, strict=True):
        assert p.grad.dtype == torch.float32
        assert error(p.grad, want) < 0.5  # relu and norms at every step, in 8 bits


@pytest.mark.parametrize("which", ["multiplicative", "deep, ports", "deep, dense"])
def test_compile(which):
    module = shaken(MODULES[which][0]())
    x = torch.randn(2, N, INPUT, dtype=DOUBLE)
    expected, _ = module(x)
    expected.sin().sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    y, _ = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    y.sin().sum().backward()
    assert error(y, expected) < 1e-12
    for p, want in zip(module.parameters(), grads, strict=True):
        assert error(p.grad, want) < 1e-11


def test_shared_weight_is_one_gradient():
    layer = bst.BlockSparseLinear(HIDDEN, HIDDEN, gate(), False, dtype=DOUBLE)
    h = torch.randn(N, HIDDEN, dtype=DOUBLE, requires_grad=True)
    shared = SharedWeight(layer)
    shared(shared(shared(h)).sin()).sum().backward()
    got = layer.weight.grad, h.grad
    layer.weight.grad = h.grad = None
    layer(layer(layer(h)).sin()).sum().backward()
    assert error(got[0], layer.weight.grad) < 1e-13
    assert error(got[1], h.grad) < 1e-13
    layer.weight.requires_grad_(False)
    shared = SharedWeight(layer)
    shared(shared(h)).sum().backward()
    assert not shared.used


@pytest.mark.parametrize("kind", ["blocks", "dense"])
def test_shared_weight_through_several_backward_passes(kind):
    layer = (
        bst.BlockSparseLinear(HIDDEN, HIDDEN, gate(), False) if kind == "blocks" else nn.Linear(HIDDEN, HIDDEN, False)
    )
    layer = layer.to(DOUBLE)
    h = torch.randn(N, HIDDEN, dtype=DOUBLE, requires_grad=True)

    def loss(use):
        return use(use(use(h)).sin()).sum()

    expected = torch.autograd.grad(loss(layer), (layer.weight, h))
    shared = SharedWeight(layer)
    y = loss(shared)
    for _ in range(2):
        for got, want in zip(torch.autograd.grad(y, (layer.weight, h), retain_graph=True), expected, strict=True):
            assert error(got, want) < 1e-13
        assert not shared.used
    # One that does not come to the weight leaves nothing for those after it.
    for _ in range(2):
        assert error(torch.autograd.grad(y, h, retain_graph=True)[0], expected[1]) < 1e-13
        assert error(torch.autograd.grad(y, layer.weight, retain_graph=True)[0], expected[0]) < 1e-13
    y.backward()
    assert error(layer.weight.grad, expected[0]) < 1e-13
    assert not shared.used


def test_shared_weight_lets_go_of_a_whole_pass():
    layer = bst.BlockSparseLinear(HIDDEN, HIDDEN, gate(), False)
    h = torch.randn(N, HIDDEN, requires_grad=True)
    shared = SharedWeight(layer)
    between = shared(h)
    seen = [weakref.ref(between), weakref.ref(between.grad_fn)]
    shared(between).sum().backward()
    del between
    gc.collect()
    assert not shared.used
    assert [one() for one in seen] == [None, None]
    y = SharedWeight(layer)(h)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        y.sum().backward()


def test_bad_arguments():
    with pytest.raises(ValueError, match="inner is None, with 2 layouts; needs 2 or more"):
        bst.DeepUpdateLSTM(INPUT, HIDDEN, [gate(), gate()])
    with pytest.raises(ValueError, match="inner is 4, with 3 layouts"):
        bst.DeepUpdateLSTM(INPUT, HIDDEN, [gate()] * 3, 4)
    with pytest.raises(ValueError, match="a layout is 48 x 48, needs 64 x 64"):
        bst.DeepUpdateLSTM(INPUT, 64, gate(), 2)
    with pytest.raises(ValueError, match="ports is 0"):
        bst.DeepUpdateLSTM(INPUT, HIDDEN, gate(), 2, 0)
    for ports in (torch.tensor([3, 1]), torch.tensor([1, 99]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match="ports need to be int64, rising, and within 0 to 47"):
            bst.DeepUpdateLSTM(INPUT, HIDDEN, gate(), 2, ports)
    with pytest.raises(ValueError, match="layout is 48 x 48"):
        bst.MultiplicativeLSTM(INPUT, 64, gate())
    with pytest.raises(ValueError, match="dropout is 2"):
        bst.DeepUpdateLSTM(INPUT, HIDDEN, gate(), 2, dropout=2)
    with pytest.raises(ValueError, match="num_layers is 0"):
        bst.BlockSparseLSTM(INPUT, HIDDEN, gate(), 0)


def test_layouts_without_a_diagonal_are_warned_of():
    with pytest.warns(UserWarning, match=r"leaves out up to \d+ of 12 diagonal blocks"):
        bst.DeepUpdateLSTM.from_graph(INPUT, 96, "balanced(12,3)", 8, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bst.DeepUpdateLSTM.from_graph(INPUT, HIDDEN, "ba(6,2)", 8, 2)


@pytest.mark.parametrize("which", ["deep, ports", "deep, dense"])
@pytest.mark.parametrize("name", ["gate_norm", "gates.weight"])
def test_parameters_changed_between_forward_and_backward_are_refused(which, name, monkeypatch):
    module = shaken(MODULES[which][0]())
    if which == "deep, dense":  # whose op has a copy of its own
        monkeypatch.setattr(type(module), "_is_one_op", lambda *_: False)
    y, _ = module(torch.randn(STEPS, N, INPUT, dtype=DOUBLE))
    with torch.no_grad():
        module.get_parameter(name).mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
