"""Tensors that are not contiguous: answered like those that are, whichever argument it is."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.norm import layer_norm

WHY_NO_CARD = blocksparse.cuda_status() if torch.cuda.is_available() else "PyTorch sees no CUDA device"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(WHY_NO_CARD != "", reason=WHY_NO_CARD))]
LAYOUT = Layout.from_graph("random(4,3,0.6)", 8, seed=1)
SQUARE = Layout.from_graph("ba(6,2)", 8, seed=1)
GATES = SQUARE.stack(4)
BLOCKS = LAYOUT.blocks


def forms(t):
    """Views with t's values, or with those of its first column, whose elements lie elsewhere."""
    if t.dim() > 2:
        yield t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if t.dim() > 1:
        yield torch.cat([t, t], -1)[..., : t.size(-1)]
    yield torch.stack([t, t.flip(0)], 1).flatten(0, 1)[::2]
    if t.is_floating_point():
        yield t[..., :1].expand(t.shape)


def linear(x, values, bias, gates, residual):
    return bst.linear(x, values, LAYOUT, bias, gates=gates, residual=residual)


def linear_turned(x, values, bias):
    return bst.linear(x, values, LAYOUT.t(), bias, activation="gelu")


def conv(x, values, bias, gates, residual):
    return bst.conv2d(x, values, LAYOUT, bias, kernel_size=3, padding=1, gates=gates, residual=residual)


def conv_order(x, values, channel_order):
    return bst.conv_transpose2d(x, values, LAYOUT, kernel_size=3, channel_order=channel_order)


def lstm(pre, values, h, c, lengths):
    y, (h, c) = bst.lstm(pre, values, GATES, (h, c), lengths)
    return torch.cat([y.flatten(), h.flatten(), c.flatten()])


def of_op(op):
    """Its arguments, all contiguous."""
    torch.manual_seed(3)
    sizes = {
        linear: {"x": (5, 24), "values": (BLOCKS, 8, 8), "bias": (32,), "gates": (BLOCKS,), "residual": (5, 32)},
        linear_turned: {"x": (5, 32), "values": (BLOCKS, 8, 8), "bias": (24,)},
        conv: {
            "x": (2, 24, 5, 6),
            "values": (BLOCKS, 9, 8, 8),
            "bias": (32,),
            "gates": (BLOCKS,),
            "residual": (2, 32, 5, 6),
        },
        conv_order: {"x": (2, 24, 5, 6), "values": (BLOCKS, 9, 8, 8)},
        lstm: {"pre": (4, 5, 192), "values": (GATES.blocks, 8, 8), "h": (5, 48), "c": (5, 48)},
        layer_norm: {name: (5, 2, 24) for name in ("x", "factor", "term")} | {"gain": (2, 24), "shift": (2, 24)},
    }
    arguments = {name: torch.randn(size) for name, size in sizes[op].items()}
    if op is conv_order:
        arguments["channel_order"] = torch.randperm(24).int()
    if op is lstm:
        arguments["lengths"] = torch.tensor([4, 2, 3, 1, 0])
    return arguments


CASES = [(op, name) for op in (linear, linear_turned, conv, conv_order, lstm, layer_norm) for name in of_op(op)]


def results(op, arguments, dtype=None):
    """What an op gives where gradients are wanted and where not, and the gradients."""
    leaves = {k: t.detach().requires_grad_() if t.is_floating_point() else t for k, t in arguments.items()}
    device = next(iter(arguments.values())).device.type
    with torch.autocast(device, dtype or torch.bfloat16, dtype is not None):
        with torch.no_grad():
            plain = op(**arguments)
        y = op(**leaves)
    wanted = [t for t in leaves.values() if t.requires_grad]
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return plain, y, *torch.autograd.grad(y.float(), wanted, weights, allow_unused=False)


@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_strided_arguments(op, name, dtype, device):
    if op is layer_norm and dtype is not None:
        pytest.skip("knows no autocast")
    arguments = {k: t.to(device) for k, t in of_op(op).items()}
    tried = 0
    for strided in forms(arguments[name]):
        assert not strided.is_contiguous()
        got = results(op, arguments | {name: strided}, dtype)
        expected = results(op, arguments | {name: strided.contiguous()}, dtype)
        # Images that are not contiguous are copied to channels-last, whose sums have another order.
        wide = dtype is None and device == "cpu"  # else in bf16 or tf32
        near = 0 if op not in (conv, conv_order) or name != "x" else 1e-5 if wide else 2e-2
        torch.testing.assert_close(got, expected, rtol=near, atol=near)
        tried += 1
    assert tried > 0


@pytest.mark.parametrize(
    ("op", "name"), [(linear, "values"), (linear, "bias"), (linear, "gates"), (conv, "values"), (lstm, "values")]
)
def test_strided_arguments_of_a_compiled_function(op, name):
    arguments = of_op(op)
    strided = next(iter(forms(arguments[name])))
    got = results(torch.compile(op, backend="aot_eager", fullgraph=True), arguments | {name: strided})
    assert all(torch.equal(a, b) for a, b in zip(got, results(op, arguments | {name: strided}), strict=True))


def test_a_second_derivative_and_transforms_with_strided_values():
    arguments = of_op(linear)
    x, values = arguments["x"].double(), arguments["values"].double().transpose(1, 2)
    assert not values.is_contiguous()
    assert torch.autograd.gradgradcheck(
        lambda x, w: bst.linear(x, w, LAYOUT, activation="silu"), (x.requires_grad_(), values.detach().requires_grad_())
    )
    stack = torch.stack([values.detach(), 2 * values.detach()], 1)  # batched along a size in the middle
    got = torch.func.vmap(lambda w: bst.linear(x.detach(), w, LAYOUT), in_dims=1)(stack)
    assert torch.allclose(got[1], 2 * got[0])
    assert torch.allclose(got[0], bst.linear(x.detach(), values.detach().contiguous(), LAYOUT))


# ---- Layers whose weight is made anew at each call -------------------------------------------------------------------


class Turned(nn.Module):
    """Each block transposed: a view, or a copy of it."""

    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def forward(self, weight):
        turned = weight.transpose(-1, -2)
        return turned.contiguous() if self.copies else turned


LAYERS = {
    "linear": (lambda: bst.BlockSparseLinear(48, 48, SQUARE), (5, 48)),
    "conv": (lambda: bst.BlockSparseConv2d(48, 48, 3, SQUARE, padding=1), (2, 48, 5, 6)),
    "lstm": (lambda: bst.BlockSparseLSTM(7, 48, SQUARE), (4, 5, 7)),
    "multiplicative": (lambda: bst.MultiplicativeLSTM(7, 48, SQUARE), (4, 5, 7)),
    "deep update": (lambda: bst.DeepUpdateLSTM(7, 48, SQUARE, inner=3), (4, 5, 7)),
    # Not worth blocks: steps of their own, or, with lengths, of ops.
    "deep update, some dense": (lambda: bst.DeepUpdateLSTM(7, 48, [SQUARE, None, SQUARE, None]), (4, 5, 7)),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in LAYERS for how in ("all at once", "in steps", "compiled")][:-1],
)
def test_a_parametrization_may_give_a_view(name, how):
    make, size = LAYERS[name]
    torch.manual_seed(5)
    x = torch.randn(size)
    if how == "compiled":  # which takes as long as there are steps
        x = x[:1]
        torch._dynamo.reset()  # else other tests' programs count to the most that it keeps of a function
    done = []
    for copies in (True, False):
        torch.manual_seed(6)
        module = make()
        for layer in list(module.modules()):
            weight = getattr(layer, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() > 2:
                parametrize.register_parametrization(layer, "weight", Turned(copies))
        assert any(parametrize.is_parametrized(layer) for layer in module.modules())
        parameters = list(module.parameters())
        call = torch.compile(module, backend="aot_eager") if how == "compiled" else module
        lengths = {"lengths": torch.tensor([4, 2, 3, 1, 0])} if how == "in steps" and x.dim() == 3 else {}
        y = call(x, **lengths)
        y = y if isinstance(y, torch.Tensor) else y[0]
        with torch.no_grad():
            plain = module(x)
        plain = plain if isinstance(plain, torch.Tensor) else plain[0]
        gradients = torch.autograd.grad(y, parameters, torch.linspace(-1, 1, y.numel()).view_as(y), allow_unused=True)
        done.append([y, plain, *(g for g in gradients if g is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*done, strict=True))
