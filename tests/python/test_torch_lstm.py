import itertools

import pytest
import torch
from conftest import assert_same, refusals
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.ops import lstm as lstm_ops

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
HIDDEN, INPUT = 48, 20


def error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)).item()


@pytest.fixture
def gate():
    return Layout.from_graph("random(3,3,0.7)", 16, seed=2)


def make_small():
    return Layout.from_graph("random(2,2,0.8)", 8, seed=1).stack(4)


@pytest.fixture
def small():
    return make_small()


def reference(pre, w, h, c, lengths=None):
    """The equations, with W dense: autograd differentiates them."""
    ys = []
    for t in range(pre.size(0)):
        i, f, g, o = (pre[t] + (h @ w.t()).view(pre.shape[1:])).unbind(1)
        c_t = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h_t = o.sigmoid() * c_t.tanh()
        runs = torch.ones(pre.size(1), 1, dtype=torch.bool) if lengths is None else (t < lengths).unsqueeze(1)
        h, c = torch.where(runs, h_t, h), torch.where(runs, c_t, c)
        ys.append(torch.where(runs, h_t, 0))
    return torch.stack(ys), h, c


def inputs(layout, steps=5, n=6, dtype=torch.float64):
    hidden = layout.in_features
    shapes = (steps, n, 4, hidden), layout.values_shape, (n, hidden), (n, hidden)
    pre, w, h, c = (torch.randn(shape, dtype=dtype) for shape in shapes)
    w = w * 0.3
    c = c.float() if dtype.itemsize < 4 else c
    return [x.requires_grad_() for x in (pre, w, h, c)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_op_agrees_with_the_equations(isa, gate, dtype, with_lengths):
    layout = gate.stack(4)
    leaves = inputs(layout, dtype=dtype)
    lengths = torch.tensor([5, 0, 3, 1, 5, 2]) if with_lengths else None
    y, (h, c) = bst.lstm(*leaves[:2], layout, tuple(leaves[2:]), lengths)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference(wide[0], bst.to_dense(wide[1], layout), *wide[2:], lengths)
    assert y.dtype == h.dtype == dtype
    assert c.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in expected]
    for got, want in zip((y, h, c), expected, strict=True):
        assert error(got, want) < TOLERANCE[dtype]
    sum((x * k.to(x.dtype)).sum() for x, k in zip((y, h, c), weights, strict=True)).backward()
    sum((x * k.to(dtype).double()).sum() for x, k in zip(expected, weights, strict=True)).backward()
    for got, want in zip(leaves, wide, strict=True):
        assert got.grad.dtype == got.dtype
        assert error(got.grad, want.grad) < 4 * TOLERANCE[dtype]


def test_gradcheck(small):
    pre, w, h, c = inputs(small, 3, 2)
    lengths = torch.tensor([3, 2])

    def f(pre, w, h, c):
        y, (h, c) = bst.lstm(pre, w, small, (h, c), lengths)
        return y, h, c

    assert torch.autograd.gradcheck(f, (pre, w, h, c))


def test_some_gradients_only(small):
    for wants in itertools.product((False, True), repeat=4):
        leaves = [x.detach().requires_grad_(want) for x, want in zip(inputs(small, 2, 3), wants, strict=True)]
        _, (h, c) = bst.lstm(*leaves[:2], small, tuple(leaves[2:]))
        assert h.requires_grad == any(wants)
        if any(wants):
            (h.sum() + c.sum()).backward()
        assert [x.grad is not None for x in leaves] == list(wants)


def _op_calls(layout):
    pre, w, h, c = (x.detach() for x in inputs(layout, 3, 4, torch.float32))
    index, lengths = bst.index_of(layout), torch.tensor([3, 1, 2, 3])
    yield lstm_ops.forward, (pre, w, index, h, c, lengths, True), {}
    yield lstm_ops.forward, (pre, w, index, None, None, None, False), {}
    y, _, _, gates, cells = lstm_ops.forward(pre, w, index, h, c, None, True)
    yield lstm_ops.backward, (w, index, y, gates, cells, h, c, None, y, None, None), {}
    yield lstm_ops.backward, (w, index, y, gates, cells, None, c, lengths, None, h, c), {"weight_gradient": False}
    pre, w = pre.bfloat16(), w.bfloat16()
    y, _, _, gates, cells = lstm_ops.forward(pre, w, index, None, c, None, True)
    yield lstm_ops.backward, (w, index, y, gates, cells, None, c, None, y, None, None), {"wide": True}


def test_opcheck(small):
    for op, arguments, options in _op_calls(small):
        opcheck(op, arguments, options, test_utils=("test_schema", "test_faketensor"))


def _wrong_calls(layout):
    """(op, arguments, part of the message)."""
    (_, (pre, w, index, h, c, lengths, _), _), _, (_, (_, _, y, gates, cells, *_), _), *_ = _op_calls(layout)
    forward, backward = lstm_ops.forward, lstm_ops.backward
    yield forward, (pre[0], w, index, None, None, None, True), r"pre is \[4, 4, 16\], needs \[steps, n, 4, hidden\]"
    yield forward, (pre, w[0], index, None, None, None, True), r"values are \[8, 8\], needs \[blocks, b, b\]"
    yield (
        forward,
        (pre, w, index.long(), None, None, None, True),
        r"\[lstm\] index is torch.int64 \[.*\], needs the int32",
    )
    yield forward, (pre.half(), w, index, None, None, None, True), "w is f32, needs f16"
    yield forward, (pre.int(), w, index, None, None, None, True), r"\[lstm\] a tensor of torch.int32, needs one of"
    yield forward, (pre, w, index, h[:3], c, None, True), r"h0 is \[3, 16\], needs \[4, 16\]"
    yield forward, (pre, w, index, h, c, lengths[:2], True), r"lengths are torch.int64 \[2\], needs int64 \[4\]"
    yield forward, (pre, w, index, h, c, lengths.int(), True), r"lengths are torch.int32 \[4\], needs int64 \[4\]"
    yield forward, (pre[..., :8], w, index, None, None, None, True), "needs"
    yield (
        backward,
        (w, index, y[0], gates, cells, h, c, None, y, None, None),
        r"y is \[4, 16\], needs \[steps, n, hidden",
    )
    yield backward, (w[0], index, y, gates, cells, h, c, None, y, None, None), r"values are \[8, 8\]"
    yield backward, (w, index, y, gates[1:], cells, h, c, None, y, None, None), "gates"
    yield backward, (w, index, y, gates, cells, h, c, None, y[1:], None, None), "dy"


def results_of_calls():
    """Whether the kernels are C++, what they answer, and how they refuse."""
    layout = make_small()
    results = (op(*arguments, **options) for op, arguments, options in _op_calls(layout))
    return [lstm_ops.KERNELS == "C++", *results, *refusals(_wrong_calls(layout))]


def test_python_kernels_give_the_same_bits(with_python_kernels):
    """The kernels over ctypes, which older PyTorch gets, against the C++ ones."""
    is_cpp, *theirs = with_python_kernels("test_torch_lstm.results_of_calls")
    assert not is_cpp
    is_cpp, *mine = results_of_calls()
    assert is_cpp
    assert_same(mine, theirs)


def test_compile(gate):
    layer = bst.BlockSparseLSTM(INPUT, HIDDEN, gate, num_layers=2)
    x = torch.randn(4, 3, INPUT)
    expected, _ = layer(x)
    expected.sum().backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    y, _ = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    for p, want in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, want)


def test_compiled_backward_is_one_op(gate):
    """And not the composition of gradients that are to have gradients."""
    seen = []

    def keep(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if "blocksparse" in str(node.target))
        return graph.forward

    layer = bst.BlockSparseLSTM(INPUT, HIDDEN, gate)
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    compiled(torch.randn(4, 3, INPUT))[0].sum().backward()
    assert seen == ["blocksparse.lstm_forward.default", "blocksparse.lstm_backward.default"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(gate, dtype):
    layer = bst.BlockSparseLSTM(INPUT, HIDDEN, gate)
    x = torch.randn(6, 3, INPUT)
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype):
        y, (h, c) = layer(x)
    assert y.dtype == h.dtype == dtype
    assert c.dtype == torch.float32
    assert error(y, expected) < 2e-2
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_bad_arguments(small, gate):
    pre, w, h, c = (x.detach() for x in inputs(small, 3, 4))
    with pytest.raises(TypeError, match="pre is a list"):
        bst.lstm([1.0], w, small)
    with pytest.raises(ValueError, match=r"pre is \[3, 4, 3, 16\].*needs \[steps, n, 4, hidden\]"):
        bst.lstm(pre[:, :, :3], w, small)
    with pytest.raises(ValueError, match="4 hidden x hidden"):
        bst.lstm(pre, w, Layout.from_graph("random(2,2,0.8)", 8, seed=1))
    with pytest.raises(ValueError, match=r"float32.*needs torch\.float64"):
        bst.lstm(pre, w.float(), small)
    with pytest.raises(ValueError, match=r"h0 is \[3, 16\], needs \[4, 16\]"):
        bst.lstm(pre, w, small, (h[:3], c))
    with pytest.raises(ValueError, match=r"lengths\[1\] is 9, needs 0 to 3"):
        bst.lstm(pre, w, small, None, torch.tensor([1, 9, 2, 3]))
    with pytest.raises(ValueError, match=r"lengths are torch.int64 \[2\], needs int64 \[4\]"):
        bst.lstm(pre, w, small, None, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"w is \[1, 8, 8\]"):
        bst.lstm(pre, w[:1], small)
    with pytest.raises(ValueError, match="layout is 48 x 48"):
        bst.BlockSparseLSTM(INPUT, 64, gate)
    with pytest.raises(ValueError, match="hidden_size is 50, needs a multiple"):
        bst.BlockSparseLSTM(INPUT, 50, gate)
    with pytest.raises(ValueError, match="2 layouts, needs one, or 3"):
        bst.BlockSparseLSTM(INPUT, HIDDEN, [gate, gate], 3)
    layer = bst.BlockSparseLSTM(INPUT, HIDDEN, gate)
    with pytest.raises(ValueError, match=r"h is \[2, 4, 48\], needs \[1, 4, 48\]"):
        layer(torch.randn(3, 4, INPUT), (torch.zeros(2, 4, HIDDEN), torch.zeros(2, 4, HIDDEN)))
    with pytest.raises(ValueError, match="2 or 3 dimensions"):
        layer(torch.randn(3, 4, 5, INPUT))


# ---- Modules against torch.nn.LSTM ----------------------------------------------------------------------------------


def twins(gate, layers=2, dtype=torch.float64, **options):
    sparse = bst.BlockSparseLSTM(INPUT, HIDDEN, gate, layers, dtype=dtype, **options)
    return sparse, sparse.to_dense()


def same_gradients(sparse, dense, tolerance=1e-11):
    for i, (of_input, recurrent) in enumerate(zip(sparse.input, sparse.recurrent, strict=True)):
        expected = bst.from_dense(getattr(dense, f"weight_hh_l{i}").grad, recurrent.layout)
        assert error(recurrent.weight.grad, expected) < tolerance
        assert error(of_input.weight.grad, getattr(dense, f"weight_ih_l{i}").grad) < tolerance
        assert error(of_input.bias.grad, getattr(dense, f"bias_ih_l{i}").grad) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch_first", [False, True])
def test_is_nn_lstm_with_masked_weights(gate, batch_first, dtype):
    sparse, dense = twins(gate, dtype=dtype, batch_first=batch_first)
    x = torch.randn(5, 6, INPUT, dtype=dtype)
    n = 5 if batch_first else 6
    state = torch.randn(2, n, HIDDEN, dtype=dtype), torch.randn(2, n, HIDDEN, dtype=dtype)
    for given in (None, state):
        sparse.zero_grad()
        dense.zero_grad()
        got, want = sparse(x, given), dense(x, given)
        for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
            assert a.shape == b.shape
            assert error(a, b) < TOLERANCE[dtype]
        for y, (h, c) in (got, want):
            (y.sin().sum() + h.sum() + (c * c).sum()).backward()
        same_gradients(sparse, dense, 10 * TOLERANCE[dtype])


def test_unbatched(gate):
    sparse, dense = twins(gate)
    x = torch.randn(7, INPUT, dtype=torch.float64)
    (y, (h, c)), (expected, (h2, c2)) = sparse(x), dense(x)
    for a, b in ((y, expected), (h, h2), (c, c2)):
        assert a.shape == b.shape
        assert error(a, b) < 1e-12
    again, _ = sparse(x, (h, c))
    assert error(again, dense(x, (h2, c2))[0]) < 1e-12


@pytest.mark.parametrize("sort", [True, False])
def test_packed_sequences(gate, sort):
    sparse, dense = twins(gate)
    lengths = [7, 5, 5, 2, 1] if sort else [2, 7, 1, 5, 5]
    packed = pack_sequence([torch.randn(t, INPUT, dtype=torch.float64) for t in lengths], enforce_sorted=sort)
    state = torch.randn(2, 5, HIDDEN, dtype=torch.float64), torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    for given in (None, state):
        sparse.zero_grad()
        dense.zero_grad()
        (y, (h, c)), (y2, (h2, c2)) = sparse(packed, given), dense(packed, given)
        assert error(y.data, y2.data) < 1e-12
        assert torch.equal(y.batch_sizes, y2.batch_sizes)
        assert error(h, h2) < 1e-12
        assert error(c, c2) < 1e-12
        padded, padded2 = pad_packed_sequence(y)[0], pad_packed_sequence(y2)[0]
        assert error(padded, padded2) < 1e-12
        for a in (y.data.sum() + h.sum() + c.sum(), y2.data.sum() + h2.sum() + c2.sum()):
            a.backward()
        same_gradients(sparse, dense)


def test_lengths_do_what_packing_does(gate):
    layer = bst.BlockSparseLSTM(INPUT, HIDDEN, gate, dtype=torch.float64)
    xs = [torch.randn(t, INPUT, dtype=torch.float64) for t in (2, 4, 1)]
    y, (h, c) = layer(pack_sequence(xs, enforce_sorted=False))
    y2, (h2, c2) = layer(nn.utils.rnn.pad_sequence(xs), None, torch.tensor([2, 4, 1]))
    assert torch.equal(pad_packed_sequence(y)[0], y2)
    assert torch.equal(h, h2)
    assert torch.equal(c, c2)


def test_chunks_with_carried_state_are_the_whole(gate):
    layer = bst.BlockSparseLSTM(INPUT, HIDDEN, gate, 2)
    x = torch.randn(9, 4, INPUT)
    whole, end = layer(x)
    state, parts = None, []
    for chunk in x.split(4):
        y, state = layer(chunk, state)
        parts.append(y)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state[0], end[0])
    assert torch.equal(state[1], end[1])


def test_from_dense(gate):
    dense = nn.LSTM(INPUT, HIDDEN, 2, batch_first=True).double()
    full = bst.BlockSparseLSTM.from_dense(dense, density=1, block_size=16)
    x = torch.randn(3, 4, INPUT, dtype=torch.float64)
    assert error(full(x)[0], dense(x)[0]) < 1e-12
    half = bst.BlockSparseLSTM.from_dense(dense, density=0.5, block_size=16)
    assert half.recurrent[0].layout.blocks == 18
    kept = bst.BlockSparseLSTM.from_dense(dense, layout=gate)
    assert kept.recurrent[1].layout == gate.stack(4)
    with pytest.raises(ValueError, match="density or layout"):
        bst.BlockSparseLSTM.from_dense(dense)
    with pytest.raises(ValueError, match="bidirectional"):
        bst.BlockSparseLSTM.from_dense(nn.LSTM(INPUT, HIDDEN, bidirectional=True), density=1)


def test_sparse_input_and_state_dict(gate):
    of_input = Layout.from_graph("random(12,2,0.5)", 16, seed=3, in_features=INPUT)
    layer = bst.BlockSparseLSTM(INPUT, HIDDEN, gate, input_layout=of_input, forget_bias=1.0)
    assert layer.input[0].bias[HIDDEN : 2 * HIDDEN].mean() > 0.7
    x = torch.randn(3, 4, INPUT)
    assert error(layer(x)[0], layer.to_dense()(x)[0]) < 1e-5
    other = bst.BlockSparseLSTM(INPUT, HIDDEN, gate, input_layout=of_input)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], layer(x)[0])
    third = bst.BlockSparseLSTM(INPUT, HIDDEN, Layout.from_graph("random(3,3,0.7)", 16, seed=9), input_layout=of_input)
    with pytest.raises(RuntimeError, match="was saved with"):
        third.load_state_dict(layer.state_dict())


def test_dropout_is_between_layers_alone(gate):
    torch.manual_seed(0)
    x = torch.randn(4, 3, INPUT)
    for layers in (1, 2):
        network = bst.BlockSparseLSTM(INPUT, HIDDEN, gate, layers, dropout=1.0)
        trained, evaluated = network(x), network.eval()(x)
        for mine, theirs in zip(trained[1], evaluated[1], strict=True):
            assert torch.equal(mine[0], theirs[0]), "the first layer reads all of x"
        assert torch.equal(trained[0], evaluated[0]) == (layers == 1)


@pytest.mark.parametrize("network", [bst.BlockSparseLSTM, bst.MultiplicativeLSTM, bst.DeepUpdateLSTM])
def test_a_negative_input_size_is_refused(network):
    layout = Layout.from_graph("ws(4,2,0.3)", 8)
    layouts = [layout] * 3 if network is bst.DeepUpdateLSTM else layout
    with pytest.raises(ValueError, match=rf"\[{network.__name__}\] input_size is -4, needs 0 or more"):
        network(-4, 32, layouts)
