"""Gated linear units: gate and up in one weight, and what they compute."""

import pytest
import torch
from conftest import assert_same, refusals
from test_torch import error
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.ops import glu as glu_ops

DOUBLE = torch.float64
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]
# in, hidden, b; the last hidden block is whole, ends in its first half, in its second one, within eight units
SIZES = [(48, 64, 16), (40, 70, 32), (33, 61, 32), (24, 40, 8), (130, 300, 128), (64, 9, 16), (16, 1, 8)]


def layout_of(out, in_, b, density=0.5, seed=0):
    grid = -(-out // b), -(-in_ // b)
    return Layout.from_graph(f"random({grid[0]},{grid[1]},{density})", b, seed=seed, out_features=out, in_features=in_)


# ---- Interleaving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_", "hidden", "b"), SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_interleave_as_rows_do(in_, hidden, b, transposed):
    layout = layout_of(in_, hidden, b).t() if transposed else layout_of(hidden, in_, b)
    gate, up = (torch.randn(layout.values_shape) for _ in range(2))
    joint = bst.interleaved_layout(layout)
    assert joint.sizes == (2 * -(-hidden // 8) * 8, in_)
    values = bst.interleave(gate, up, layout)
    dense_gate, dense_up = (bst.to_dense(part, layout) for part in (gate, up))
    got = bst.separate_rows(bst.to_dense(values, joint), hidden)
    assert torch.equal(got[0], dense_gate)
    assert torch.equal(got[1], dense_up)
    if layout.blocks:
        assert dense_gate.abs().max() > 0
    rows = bst.separate_rows(bst.interleave_rows(dense_gate, dense_up), hidden)
    assert torch.equal(rows[0], dense_gate)
    assert torch.equal(rows[1], dense_up)
    back = bst.separate(values, layout)
    for mine, theirs in zip(back, (dense_gate, dense_up), strict=True):
        assert torch.equal(bst.to_dense(mine, layout), theirs)


def test_interleaving_is_differentiable():
    layout = layout_of(24, 16, 8)
    gate, up = (torch.randn(layout.values_shape, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda g, u: bst.interleave(g, u, layout), (gate, up))
    assert gradcheck(lambda v: bst.separate(v, layout), (bst.interleave(gate, up, layout).detach().requires_grad_(),))


# ---- The gated linear unit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("in_", "hidden", "b"), SIZES)
def test_a_gated_unit_is_the_dense_one(in_, hidden, b, activation):
    layout = layout_of(hidden, in_, b)
    layer = bst.BlockSparseGLU(in_, hidden, layout, bias=True, activation=activation, dtype=DOUBLE)
    weights = layer.weights()
    for shape in [(7, in_), (2, 3, in_), (1, in_), (0, in_), (in_,)]:
        x = torch.randn(shape, dtype=DOUBLE)
        gate = nn.functional.linear(x, weights["gate"], weights["gate_bias"])
        up = nn.functional.linear(x, weights["up"], weights["up_bias"])
        want = {
            "silu": nn.functional.silu(gate),
            "gelu": nn.functional.gelu(gate),
            "gelu_tanh": nn.functional.gelu(gate, approximate="tanh"),
            "relu": gate.relu(),
        }[activation] * up
        with torch.no_grad():
            torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_any_order(activation):
    layout = layout_of(20, 16, 8, 0.7)
    joint = bst.interleaved_layout(layout)
    leaves = [
        torch.randn(shape, dtype=DOUBLE, requires_grad=True)
        for shape in [(3, 16), joint.values_shape, (joint.out_features,), (joint.blocks,)]
    ]

    def f(x, values, bias, gates):
        return bst.linear_glu(x, values, joint, 20, bias, gates=gates, activation=activation)

    assert gradcheck(f, leaves)
    assert gradgradcheck(f, leaves, fast_mode=True)


def test_wrong_arguments_of_a_gated_unit():
    layout = layout_of(64, 48, 16)
    joint = bst.interleaved_layout(layout)
    x, values = torch.randn(3, 48), torch.randn(joint.values_shape)
    with pytest.raises(ValueError, match=r"layout has 64 outputs, gate and up of 64 hidden features need 128"):
        bst.linear_glu(x, torch.randn(layout.values_shape), layout, 64)
    with pytest.raises(ValueError, match="activation is 'tanh', needs one of silu, gelu, gelu_tanh, relu"):
        bst.linear_glu(x, values, joint, 64, activation="tanh")
    with pytest.raises(ValueError, match=r"x is \[3, 47\]"):
        bst.linear_glu(x[:, 1:], values, joint, 64)
    with pytest.raises(TypeError, match="x is a list"):
        bst.linear_glu([1.0], values, joint, 64)
    with pytest.raises(ValueError, match=r"z is \[3, 48\], needs \[..., 128\]"):
        bst.glu(x, 64)
    with pytest.raises(ValueError, match=r"gate is \[1, 16, 16\], needs"):
        bst.interleave(torch.zeros(1, 16, 16), torch.zeros(1, 16, 16), layout)
    with pytest.raises(ValueError, match="values are"):
        bst.separate(torch.zeros(1, 16, 16), layout)
    with pytest.raises(ValueError, match="layout is 64 x 48"):
        bst.BlockSparseGLU(48, 62, layout)
    with pytest.raises(ValueError, match="one shape"):
        bst.interleave_rows(torch.zeros(3, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"dtype is torch\.int32"):
        bst.BlockSparseGLU(48, 64, layout, dtype=torch.int32)


def op_arguments(dtype=torch.float32, activation=3):
    layout = layout_of(40, 33, 16, 0.7)
    joint = bst.interleaved_layout(layout)
    given = [torch.randn(shape, dtype=dtype) for shape in [(2, 3, 33), joint.values_shape]]
    bias, gates = torch.randn(joint.out_features, dtype=dtype), torch.rand(joint.blocks)
    options = {"bias": bias, "gates": gates, "activation": activation}
    return (*given, bst.index_of(joint), joint.out_features, 40), options


@pytest.mark.parametrize("activation", [1, 2, 3, 4])
def test_ops_pass_opcheck(activation):
    arguments, options = op_arguments(activation=activation)
    z = torch.randn(4, 80)
    for op, given, more in [
        (glu_ops.linear, arguments, options),
        (glu_ops.forward, (z, 37, activation), {}),
        (glu_ops.backward, (z, torch.randn(4, 37), activation), {}),
    ]:
        torch.library.opcheck(op, given, more)


def op_results():
    """What kernels in C++ and in Python give, and how they refuse."""
    arguments, options = op_arguments()
    z = torch.randn(4, 80, dtype=torch.bfloat16)
    results = [
        glu_ops.linear(*arguments, **options),
        glu_ops.linear(*arguments),
        glu_ops.forward(z, 40, 2),
        glu_ops.backward(z, torch.randn(4, 40).bfloat16(), 4),
    ]
    x, values, index, outputs, _ = arguments
    calls = [
        (glu_ops.linear, (x, values, index, outputs, 39 + 64), "no gate and up"),
        (glu_ops.linear, (x, values[:, :8], index, outputs, 40), "w is"),
        (glu_ops.linear, (x.double(), values, index, outputs, 40), "f64|float64"),
        (glu_ops.forward, (z, 41, 3), "needs 96 features, gate and up of 41"),
        (glu_ops.forward, (z, 40, 5), "activation is 5"),
        (glu_ops.backward, (z, torch.randn(3, 40).bfloat16(), 3), "same number of tokens"),
        (glu_ops.backward, (z, torch.randn(4, 40), 3), "dy is f32"),
    ]
    return results + refusals(calls)


def test_kernels_in_python_do_the_same(with_python_kernels):
    theirs = with_python_kernels("test_torch_glu.op_results")
    assert_same(op_results(), theirs)


def test_one_launch_is_two(isa):
    """Without gradients y comes of one call, with them z is kept: the same but for the rounding of z."""
    for b, dtype in [(8, torch.float32), (16, torch.float32), (64, torch.float64), (32, torch.bfloat16)]:
        layer = bst.BlockSparseGLU(96, 100, layout_of(100, 96, b), bias=True, dtype=dtype)
        x = torch.randn(3, 17, 96).to(dtype)
        with torch.no_grad():
            one = layer(x)
        two = layer(x)
        assert two.requires_grad
        assert one.shape == two.shape == (3, 17, 100)
        bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert error(one, two) < bound


def test_shapes_and_orders_of_z():
    z = torch.randn(2, 3, 1, 2, 2, 3, 32, requires_grad=True)  # more dimensions than the core has
    y = bst.glu(z, 16)
    gate, up = (part.detach() for part in bst.separate_rows(z.movedim(-1, 0), 16))
    torch.testing.assert_close(y, (nn.functional.silu(gate) * up).movedim(0, -1))
    y.sum().backward()
    assert z.grad.shape == z.shape
    first = torch.randn(32, 5).t()
    torch.testing.assert_close(bst.glu(first, 16), bst.glu(first.contiguous(), 16))
    layer = bst.BlockSparseGLU(48, 64, layout_of(64, 48, 16))
    x = torch.randn(48, 5).t()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer(x.contiguous()))
        assert layer(x).is_contiguous()
        torch.testing.assert_close(layer(x.view(5, 1, 1, 1, 1, 1, 48)).flatten(0, -2), layer(x))


def test_what_ops_cost():
    layer = bst.BlockSparseGLU(48, 64, layout_of(64, 48, 16))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(5, 48))
    assert counter.get_total_flops() == 2 * 5 * layer.weight.numel()


def test_gated_layouts_may_be_anything_with_both_in_it():
    joint = layout_of(128, 48, 16)
    layer = bst.BlockSparseGLU(48, 64, joint)
    x = torch.randn(3, 48)
    weights = layer.weights()
    want = nn.functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)
    torch.testing.assert_close(layer(x), want)
