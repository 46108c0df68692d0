"""What goes around convolutions: a bias for edges, gradients of biases, and replacing those of a network."""

import copy
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from convolutions import close
from torch import nn
from torch.library import opcheck
from torch.nn.utils import parametrizations, prune

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.autograd import bias
from blocksparse.torch.autograd import linear as autograd_linear


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_edge_bias_is_what_a_channel_of_the_outside_adds(rank, transposed):
    """A dense convolution of an image that is 0 inside and 1 outside, far enough around."""
    kernel, dilation = (3, 2, 3)[:rank], (1, 2, 1)[:rank]
    for stride, padding in itertools.product(((1,) * 3, (2, 1, 3)), (0, ((1, 2), (0, 1), (2, 0)))):
        stride = stride[:rank]
        padding = padding if padding == 0 else padding[:rank]
        size = (5, 6, 4)[:rank]
        edge = bst.EdgeBias(4, kernel, stride=stride, padding=padding, dilation=dilation, transposed=transposed)
        nn.init.normal_(edge.weight)
        filters = edge.weight.detach().t().reshape(4, 1, *kernel)
        pairs = [(0, 0)] * rank if padding == 0 else padding
        x = torch.zeros(2, 1, *size)
        far = 12
        outside = F.pad(x, (far,) * (2 * rank), value=1.0)
        op = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
        full = op[rank - 1 + 3 * transposed](
            outside,
            filters.transpose(0, 1) if transposed else filters,
            stride=1 if not transposed else stride,
            dilation=dilation,
        )
        for i in range(rank):
            before, after = pairs[i]
            extent = dilation[i] * (kernel[i] - 1)
            if transposed:
                first = far * stride[i] + before
                count = (size[i] - 1) * stride[i] + extent + 1 - before - after
                full = full.narrow(2 + i, first, count)
            else:
                first = far - before
                count = (size[i] + before + after - extent - 1) // stride[i] + 1
                full = full.narrow(2 + i, first, (count - 1) * stride[i] + 1)
                full = full[(slice(None),) * (2 + i) + (slice(None, None, stride[i]),)]
        if transposed and any(s > 1 for s in stride) and rank > 1:
            continue  # a tap in a hole of one axis and beyond the edge of another counts here, as in 2017
        y = torch.randn_like(full)
        close(edge(y, x), y + full)


def test_edge_bias_behind_layers(channels):
    conv = bst.BlockSparseConv2d(30, 21, 3, channels, padding="same")
    edge = bst.EdgeBias.of(conv)
    x = torch.randn(2, 30, 6, 5).to(memory_format=torch.channels_last)
    y = conv(x)
    assert torch.equal(edge(y, x), y)
    nn.init.ones_(edge.weight)
    added = edge(y, x) - y
    close(added[0, 0, 1:-1, 1:-1], torch.zeros(4, 3))
    close(added[0, 0, 0], torch.tensor([5.0, 3, 3, 3, 5]), 1e-3)
    assert edge(y, x).is_contiguous(memory_format=torch.channels_last)
    edge(y, x).sum().backward()
    assert edge.weight.grad[4].abs().max() == 0
    assert edge.weight.grad[0, 0] == 2 * 10, "2 images, the first row and column"
    assert bst.EdgeBias.of(nn.ConvTranspose2d(30, 21, 3, stride=2)).weight.shape == (9, 21)
    with pytest.raises(ValueError, match=r"\[EdgeBias\] y is \[2, 20, 6, 5\]"):
        edge(y[:, :20], x)
    with pytest.raises(ValueError, match=r"y has sizes \[5, 5\], needs \[6, 5\]"):
        edge(y[:, :, 1:], x)
    close(edge(y[0], x[0]), edge(y, x)[0])
    deconv = nn.ConvTranspose2d(30, 21, 3, stride=2, output_padding=1)
    assert bst.EdgeBias.of(deconv)(deconv(x), x).shape == (2, 21, 14, 12)


def test_edge_bias_refuses_what_it_does_not_fit(channels):
    with pytest.raises(ValueError, match="activation 'relu', needs 'none'"):
        bst.EdgeBias.of(bst.BlockSparseConv2d(30, 21, 3, channels, activation="relu"))
    with pytest.raises(ValueError, match="padding_mode is 'reflect'"):
        bst.EdgeBias.of(nn.Conv2d(30, 21, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(TypeError, match="a Linear, needs a convolution"):
        bst.EdgeBias.of(nn.Linear(30, 21))
    with pytest.raises(ValueError, match="kernel_size is 3, needs a number for each"):
        bst.EdgeBias(21, 3)
    with pytest.raises(ValueError, match=r"stride is \[0, 0\]"):
        bst.EdgeBias(21, (3, 3), stride=0)
    with pytest.raises(ValueError, match="channels is -1, needs 0 or more"):
        bst.EdgeBias(-1, (3, 3))


# ---- Surgery --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.downsample(x)).relu()


class ResNet(nn.Module):
    """Named as torchvision's."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1))
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))


def test_replacing_convolutions():
    model, x = ResNet().eval(), torch.randn(2, 3, 8, 8)
    before = model(x)
    same = copy.deepcopy(model)
    replaced = bst.replace_convolutions(same, density=1, block_size=16)
    assert len(replaced) == 12, "all but the first, which has 3 inputs"
    assert isinstance(same.conv1, nn.Conv2d)
    assert replaced["layer1.0.conv2"] is same.layer1[0].conv2
    assert not replaced["layer1.0.conv2"].training
    close(same(x), before)
    some = copy.deepcopy(model)
    replaced = bst.replace_convolutions(some, r"layer2\.\d\.conv", density=0.5, block_size=8)
    assert set(replaced) == {"layer2.0.conv1", "layer2.0.conv2", "layer2.1.conv1", "layer2.1.conv2"}
    assert all(layer.layout.density == 0.5 for layer in replaced.values())
    some.train()
    some(x).sum().backward()
    assert all(p.grad is not None for p in some.parameters())
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    by_function = bst.replace_convolutions(last, lambda name, m: m.kernel_size == (1, 1), density=1, block_size=8)
    assert set(by_function) == {f"layer{i}.{j}.downsample.0" for i in (1, 2) for j in (0, 1)}
    y = last.layer1(last.conv1(x.to(memory_format=torch.channels_last)))
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(last(x), before)


def test_replacing_shared_and_wrong_ones():
    shared = nn.Conv2d(16, 16, 3)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.ConvTranspose1d(16, 16, 2)})
    replaced = bst.replace_convolutions(model, density=0.25, block_size=8)
    assert model["a"] is model["b"] is replaced["a"] is replaced["b"]
    assert isinstance(model["c"], bst.BlockSparseConvTranspose1d)
    with pytest.raises(ValueError, match="no convolution was chosen by 'nothing'"):
        bst.replace_convolutions(ResNet(), "nothing", density=0.5)
    with pytest.raises(ValueError, match="no convolution was chosen by None and blocks of 64"):
        bst.replace_convolutions(ResNet(), density=0.5, block_size=64)
    with pytest.raises(ValueError, match="the model is a convolution itself"):
        bst.replace_convolutions(nn.Conv2d(32, 32, 3), density=0.5)
    circular = nn.Sequential(nn.Conv2d(32, 32, 3, padding_mode="circular"))
    with pytest.raises(ValueError, match=r"\[replace_convolutions\] 0: .*circular"):
        bst.replace_convolutions(circular, density=0.5)


def test_replacing_keeps_what_is_frozen_and_names_what_is_parametrized():
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3))
    model[0].weight.requires_grad_(False)
    bst.replace_convolutions(model, density=0.5, block_size=8)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    model = nn.Sequential(nn.Conv2d(16, 16, 3), parametrizations.weight_norm(nn.Conv2d(16, 16, 3)))
    with pytest.raises(ValueError, match=r"\[replace_convolutions\] 1 is parametrized"):
        bst.replace_convolutions(model, density=0.5, block_size=8)
    assert isinstance(model[0], nn.Conv2d)
    assert set(bst.replace_convolutions(model, "0", density=0.5, block_size=8)) == {"0"}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda conv: nn.utils.weight_norm(conv), "bias, weight_g, weight_v"),
        (lambda conv: prune.l1_unstructured(conv, "weight", 0.5), "bias, weight_orig"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_replacing_names_what_hooks_compute(change, names):
    model = nn.Sequential(nn.Conv2d(16, 16, 3), change(nn.Conv2d(16, 16, 3)))
    with pytest.raises(ValueError, match=rf"\[replace_convolutions\] 1 has the parameters {names}, needs weight"):
        bst.replace_convolutions(model, density=0.5, block_size=8)
    assert isinstance(model[0], nn.Conv2d)


@pytest.mark.parametrize("kind", [{"device": "meta"}, {"dtype": torch.complex64}])
def test_replacing_needs_real_values(kind):
    model = nn.Sequential(nn.Conv2d(16, 16, 3, **kind))
    with pytest.raises(ValueError, match=r"\[replace_convolutions\] 0: \[select_blocks\] weight is .*, needs real"):
        bst.replace_convolutions(model, density=0.5, block_size=8)


def test_order_of_concatenations_puts_both_signs_of_a_channel_into_neighbouring_blocks():
    text = (Path(__file__).parents[2] / "docs/guide/convolution.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"`channel_order=(torch\.arange\(2 \* F\).*?)`", text)
    features, b = 32, 8
    order = eval(written, {"torch": torch, "F": features, "b": b})
    pairs = order.view(-1, 2, b)
    assert torch.equal(pairs[:, 0].flatten(), torch.arange(features))
    assert torch.equal(pairs[:, 1], pairs[:, 0] + features)
    # Group g of the outputs sees block g of x and block g of -x, and nothing else.
    layout = Layout.from_mask(np.repeat(np.eye(features // b), 2, axis=1), b)
    conv = bst.BlockSparseConv2d(2 * features, features, 3, layout, padding=1, channel_order=order).double()
    x = torch.randn(2, features, 5, 4, dtype=torch.float64)
    both = F.elu(torch.cat([x, -x], 1))
    close(conv(both), conv.to_dense()(both))
    changed = x.clone()
    changed[:, 2 * b] += 1
    differs = (conv(F.elu(torch.cat([changed, -changed], 1))) - conv(both)).abs().amax((0, 2, 3)) > 0
    assert differs.view(-1, b).any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_same_padding_puts_the_odd_pixel_where_pytorch_does(kernel, dilation):
    dense = nn.Conv1d(16, 16, kernel, padding="same", dilation=dilation).double()
    x = torch.randn(2, 16, 11, dtype=torch.float64)
    close(bst.BlockSparseConv1d.from_dense(dense, density=1, block_size=8)(x), dense(x))


def test_norms_leave_out_what_sticks_out_of_a_ragged_edge():
    layout = Layout.from_graph("dense(2,3)", 8, out_features=13, in_features=21)
    layer = bst.BlockSparseLinear(21, 13, layout)
    nn.init.normal_(layer.weight)
    wanted = layer.to_dense().weight.norm(dim=1)
    close(bst.weight_norm(layer).parametrizations.weight.original0.flatten(), wanted)


def test_orders_out_of_range_are_refused_where_nothing_is_checked_beforehand():
    layout, x = Layout.from_graph("dense(2)", 8), torch.randn(1, 16, 2, 2)
    values = torch.randn(layout.blocks, 1, 8, 8)

    @torch.compile(backend="eager")
    def call(order):
        return bst.conv2d(x, values, layout, kernel_size=1, channel_order=order)

    for at, wrong in ((15, 16), (0, -1), (15, 1 << 32)):  # beside the channel that is left out
        order = torch.arange(16)
        order[at] = wrong
        with pytest.raises(ValueError, match="channel_order"):
            call(order)


# ---- Gradients of biases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-23), (torch.float64, 2**-52)],
)
def test_gradients_of_a_bias_are_rounded_once(dtype, rtol):
    for shape in ((4, 8, 10, 24), (3, 7), (5,), (0, 6), (1000, 100)):
        dy = (torch.randn(shape, dtype=torch.float64) + 0.1).to(dtype)
        found = bias.ops.bias_gradient(dy)
        assert found.dtype == dtype
        expected = dy.double().reshape(-1, shape[-1]).sum(0)
        of_sums = 2**-52 if dtype == torch.float64 else 2**-23
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=of_sums * dy.numel() / shape[-1])
    opcheck(bias.ops.bias_gradient, (torch.randn(6, 5),), test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(ValueError, match="side by side"):
        bias.ops.bias_gradient(torch.randn(5, 6).t())


def test_gradients_of_a_bias_as_on_a_card_are_differentiable(monkeypatch):
    """Of any order, in both modes and under vmap, as PyTorch's sum is."""
    monkeypatch.setattr(autograd_linear, "sum_of_tokens", lambda dy: bias.run(bias.Sum, dy))
    layout = Layout.from_graph("random(3,4,0.6)", 8, seed=1)
    x, values = torch.randn(5, 32, dtype=torch.float64), torch.randn(layout.blocks, 8, 8, dtype=torch.float64)
    b = torch.randn(24, dtype=torch.float64, requires_grad=True)

    def loss(b):
        return bst.linear(x, values, layout, b).pow(3).sum()

    assert torch.autograd.gradcheck(loss, b)
    assert torch.autograd.gradgradcheck(loss, b)
    torch.testing.assert_close(
        torch.func.jacrev(torch.func.grad(loss))(b.detach()), torch.func.hessian(loss)(b.detach())
    )
    dy = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda dy: bias.run(bias.Sum, dy), dy, check_forward_ad=True)
    each = torch.func.vmap(lambda dy: bias.run(bias.Sum, dy))(dy)
    torch.testing.assert_close(each, dy.sum(1))
