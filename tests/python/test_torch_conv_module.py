"""Convolution modules, what normalises and corrects them, and putting them into networks."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from convolutions import close
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import blocksparse.torch as bst
from blocksparse import Layout

KINDS = {
    bst.BlockSparseConv1d: nn.Conv1d,
    bst.BlockSparseConv2d: nn.Conv2d,
    bst.BlockSparseConv3d: nn.Conv3d,
    bst.BlockSparseConvTranspose1d: nn.ConvTranspose1d,
    bst.BlockSparseConvTranspose2d: nn.ConvTranspose2d,
    bst.BlockSparseConvTranspose3d: nn.ConvTranspose3d,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_from_and_to_dense(kind):
    options = {"stride": 2, "padding": 1, "dilation": 2}
    if kind.transposed:
        options["output_padding"] = 1
    dense = KINDS[kind](30, 21, 3, **options)
    full = kind.from_dense(dense, density=1, block_size=8)
    x = torch.randn(2, 30, *(7, 6, 5)[: kind.rank])
    close(full(x), dense(x))
    half = kind.from_dense(dense, density=0.5, block_size=8, activation="relu")
    assert half.layout.blocks == 6
    back = half.to_dense()
    assert type(back) is type(dense)
    close(half(x), back(x).relu())
    weight = dense.weight.transpose(0, 1) if kind.transposed else dense.weight
    kept = bst.to_dense(torch.ones_like(half.weight), half.layout, half.kernel_size).bool()
    norms = F.pad(weight.detach().flatten(2).square().sum(2), (0, 2, 0, 3)).view(3, 8, 4, 8).sum((1, 3))
    assert set(norms.flatten().topk(6).indices.tolist()) == set(
        torch.from_numpy(half.layout.mask()).flatten().nonzero().flatten().tolist()
    )
    back_weight = back.weight.transpose(0, 1) if kind.transposed else back.weight
    assert torch.equal(back_weight, weight * kept)
    given = kind.from_dense(dense, layout=half.layout)
    assert torch.equal(given.weight, half.weight)
    with pytest.raises(ValueError, match="one of them"):
        kind.from_dense(dense)
    with pytest.raises(ValueError, match="one of them"):
        kind.from_dense(dense, density=0.5, layout=half.layout)
    with pytest.raises(TypeError, match=r"a Linear, needs a torch\.nn\.Conv"):
        kind.from_dense(nn.Linear(30, 21), density=0.5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.transposed], ids=lambda kind: kind.__name__)
def test_a_transposed_convolution_makes_the_size_that_it_is_asked_for(kind):
    """Also without n, compiled, and traced."""
    dense = KINDS[kind](30, 21, 3, stride=3, padding=1, dilation=2, output_padding=1)
    sparse = kind.from_dense(dense, density=1, block_size=8)
    x = torch.randn(2, 30, *(5, 4, 3)[: kind.rank])
    least = KINDS[kind](30, 21, 3, stride=3, padding=1, dilation=2)(x).shape
    for more in range(3):
        size = [n + more for n in least[2:]]
        for given in (size, torch.Size([*least[:2], *size])):
            close(sparse(x, given), dense(x, given))
        close(sparse(x[0], output_size=size), dense(x[0], output_size=size))
    close(torch.compile(sparse, backend="eager", fullgraph=True)(x, size), dense(x, size))
    traced = torch.fx.symbolic_trace(nn.Sequential(Sized(sparse, size)))
    close(traced(x), dense(x, size))
    for wrong in ([n + 3 for n in least[2:]], [n - 1 for n in least[2:]], [*least[1:], 7, 7]):
        for layer in (dense, sparse):
            with pytest.raises(ValueError, match=r"output.size"):
                layer(x, wrong)


class Sized(nn.Module):
    def __init__(self, layer, size):
        super().__init__()
        self.layer, self.size = layer, size

    def forward(self, x):
        return self.layer(x, output_size=self.size)


@pytest.mark.parametrize("kind", [bst.BlockSparseConv2d, bst.BlockSparseConvTranspose2d])
def test_groups_are_blocks(kind):
    dense = KINDS[kind](32, 48, 3, groups=4, padding=1)
    layer = kind.from_dense(dense, block_size=8)
    x = torch.randn(2, 32, 5, 5)
    close(layer(x), dense(x))
    assert layer.layout.blocks == 8, "12 outputs and 8 inputs a group: 8 pairs of blocks of 8 touch, of 24"
    exact = kind.from_dense(KINDS[kind](32, 32, 3, groups=4, padding=1), block_size=8)
    assert exact.layout == Layout.from_graph("diagonal(4)", 8)
    assert kind.from_dense(dense, density=1, block_size=8).layout.density == 1


def test_padding_that_differs_and_order_go_to_dense(channels):
    order = torch.randperm(30)
    layer = bst.BlockSparseConv2d(
        30, 21, (3, 2), channels, padding=((2, 0), (0, 1)), channel_order=order.tolist(), gates=True
    )
    layer.gates.data.uniform_()
    x = torch.randn(2, 30, 5, 4)
    dense = layer.to_dense()
    assert isinstance(dense[0], nn.ConstantPad2d)
    close(layer(x), dense(x))
    assert bst.BlockSparseConv2d(30, 21, 3, channels, padding="same").to_dense()(x).shape == (2, 21, 5, 4)
    with pytest.raises(ValueError, match="needs as much of each"):
        bst.BlockSparseConvTranspose1d(30, 21, 3, channels, padding=((1, 0),)).to_dense()


def test_init_has_the_variance_of_dense_over_live_inputs():
    layout = Layout.from_graph("ba(32,3)", 8, in_features=253)
    layer = bst.BlockSparseConv2d(253, 256, 3, layout)
    fan_in = bst.to_dense(torch.ones(layout.values_shape), layout).sum(1) * 9
    dense = bst.to_dense(layer.weight.detach(), layout, (3, 3))
    for o in (0, 100, 255):
        row = dense[o][dense[o] != 0]
        assert row.abs().max() <= fan_in[o].rsqrt()
        torch.testing.assert_close(row.var(), 1 / (3 * fan_in[o]), rtol=0.1, atol=0)
        assert layer.bias[o].abs() <= fan_in[o].rsqrt()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda b: bst.BlockSparseConv2d(21, 30, 3, b), r"layout is 21 x 30 \(out x in\), needs 30 x 21"),
        (lambda b: bst.BlockSparseConv2d(30, 21, (3, 3, 3), b), "kernel_size is"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 0, b), "kernel_size is 0, needs 1 or more"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, padding=(1,)), "padding is"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, padding="same", stride=2), "does not have"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, activation="tanh"), "activation is 'tanh'"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, channel_order=range(29)), r"channel_order is \[29\]"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, channel_order=[0] * 30), "is no permutation of 0 to 29"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, channel_order=[0.0] * 30), "float32, needs integers"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, channel_order=torch.arange(30) + (1 << 32)), "no permutation"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, stride=0), r"stride is \[0, 0\], needs 1"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, dilation=-1), r"dilation is \[-1, -1\], needs 1"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, padding=-1), r"padding_before is \[-1, -1\], needs 0"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, output_padding=1), "output_padding is given"),
        (lambda b: bst.BlockSparseConvTranspose2d(30, 21, 3, b, output_padding=1), "less than stride"),
        (lambda b: bst.BlockSparseConvTranspose2d(30, 21, 3, b, stride=0), r"stride is \[0, 0\], needs 1"),
        (lambda b: bst.BlockSparseConv2d(30, 21, 1.5, b), "kernel_size is 1.5, needs an integer"),
        (
            lambda b: bst.BlockSparseConv2d(30, 21, 3, b, dtype=torch.complex64),
            "dtype is torch.complex64, needs one of",
        ),
        (lambda b: bst.BlockSparseConv2d(30, 21, 3, b, dtype=torch.float8_e5m2), "dtype is torch.float8_e5m2, needs"),
        (lambda b: bst.BlockSparseConv2d.from_dense(nn.Conv2d(30, 21, 3), density=2), "density is 2"),
        (lambda b: bst.BlockSparseConv2d.from_dense(nn.Conv2d(30, 22, 3), layout=b), "needs 22 x 30"),
        (
            lambda b: bst.BlockSparseConv2d.from_dense(nn.Conv2d(30, 21, 3, padding_mode="circular"), layout=b),
            "padding_mode is 'circular', needs 'zeros'",
        ),
    ],
)
def test_says_what_is_wrong(channels, make, text):
    with pytest.raises(ValueError, match=text):
        make(channels)


def test_filters_go_to_dense_by_sizes_alone(channels):
    values = torch.randn(channels.blocks, 9, 8, 8)
    assert bst.to_dense(values, channels, kernel_size=[3, 3]).shape == (21, 30, 3, 3)
    for wrong in (9, (3.0, 3)):
        with pytest.raises(TypeError, match=r"\[to_dense\] kernel_size is .*, needs"):
            bst.to_dense(values, channels, kernel_size=wrong)


def test_state_dict_keeps_pattern_and_order(channels):
    order = torch.randperm(30)
    layer = bst.BlockSparseConv2d(30, 21, 3, channels, channel_order=order, gates=True)
    state = layer.state_dict()
    assert set(state) == {"weight", "bias", "gates", "pattern", "kernel", "order"}
    other = bst.BlockSparseConv2d(30, 21, 3, channels, channel_order=range(30), gates=True)
    other.load_state_dict(state)
    x = torch.randn(2, 30, 5, 4)
    assert torch.equal(other(x), layer(x))
    wrong = Layout.from_graph("random(3,4,0.5)", 8, seed=2, out_features=21, in_features=30)
    with pytest.raises(RuntimeError, match=r"was saved with Layout.*hash.*this layer has Layout.*hash"):
        bst.BlockSparseConv2d(30, 21, 3, wrong, channel_order=order, gates=True).load_state_dict(state)
    with pytest.raises(RuntimeError, match="saved with the kernel 3 x 3, this layer has the kernel 2 x 2"):
        bst.BlockSparseConv2d(30, 21, 2, channels, channel_order=order, gates=True).load_state_dict(state)
    with pytest.raises(RuntimeError, match="channel_order is no permutation"):
        other.load_state_dict({**state, "channel_order": torch.zeros(30, dtype=torch.int32)})
    with pytest.raises(RuntimeError, match=r"channel_order is torch\.float32, needs integers"):
        other.load_state_dict({**state, "channel_order": torch.arange(30) + 0.5})


def test_state_dict_keeps_the_kernel(channels):
    state = bst.BlockSparseConv2d(30, 21, 3, channels).state_dict()
    with pytest.raises(RuntimeError, match="saved with the kernel 3 x 3, this layer has the kernel 1 x 9"):
        bst.BlockSparseConv2d(30, 21, (1, 9), channels).load_state_dict(state)
    with pytest.raises(RuntimeError, match="saved with the kernel 3 x 3, this layer has the kernel 9"):
        bst.BlockSparseConv1d(30, 21, 9, channels).load_state_dict(state)
    transposed = bst.BlockSparseConvTranspose2d(30, 21, 3, channels)
    with pytest.raises(RuntimeError, match="this layer has the transposed kernel 3 x 3"):
        transposed.load_state_dict(state)
    meta = bst.BlockSparseConv2d(30, 21, 3, channels, device="meta").to_empty(device="cpu")
    assert meta.kernel[:, 0].tolist() == [0, 3, 3]
    bst.BlockSparseConv2d(30, 21, 3, channels).load_state_dict(state)


@pytest.mark.parametrize("order", [list(range(30)), torch.arange(30).numpy(), torch.arange(30, device="cpu")])
def test_modules_on_meta_have_an_order(channels, order):
    with torch.device("meta"):
        layer = bst.BlockSparseConv2d(30, 21, 3, channels, channel_order=order)
        assert layer.channel_order.is_meta
        on_cpu = bst.BlockSparseConv2d(30, 21, 3, channels, channel_order=order, device="cpu")
    assert on_cpu.channel_order.tolist() == list(range(30))


def test_deepcopy_pickle_and_moves(channels):
    layer = bst.BlockSparseConv2d(30, 21, 3, channels, gates=True, channel_order=torch.randperm(30))
    x = torch.randn(2, 30, 5, 4)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    half = copy.deepcopy(layer).bfloat16()
    assert half.gates.dtype == torch.float32
    assert half.channel_order.dtype == torch.int32
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    meta = bst.BlockSparseConv2d(30, 21, 3, channels, device="meta")
    assert meta(torch.empty(2, 30, 5, 4, device="meta")).shape == (2, 21, 3, 2)
    text = repr(layer)
    assert "30, 21, kernel_size=(3, 3), block_size=8, blocks=6 (50.00%), bias=True, gates=True, channel_order" in text


def test_channels_last_networks(channels):
    network = nn.Sequential(
        bst.BlockSparseConv2d(30, 21, 3, channels),
        bst.weight_norm(bst.BlockSparseConv2d(21, 30, 3, channels.t())),
    )
    x = torch.randn(2, 30, 6, 5)
    before = network(x)
    network.to(memory_format=torch.channels_last)
    assert network[0].weight.is_contiguous(), "blocks are no images"
    y = network(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(y, before)
    y.sum().backward()
    assert network[0].weight.grad.is_contiguous()


def test_training_follows_masked_dense(channels):
    sparse = bst.BlockSparseConv2d(30, 21, 3, channels, padding=1).double()
    dense = sparse.to_dense()
    mask = bst.to_dense(torch.ones_like(sparse.weight), channels, (3, 3))
    x, target = torch.randn(4, 30, 5, 5).double(), torch.randn(4, 21, 5, 5).double()
    steps = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (sparse, dense)]
    for _ in range(5):
        for model, step in zip((sparse, dense), steps, strict=True):
            step.zero_grad()
            (model(x) - target).square().mean().backward()
            if model is dense:
                dense.weight.grad *= mask
            step.step()
    close(bst.to_dense(sparse.weight, channels, (3, 3)), dense.weight, 1e-9)


# ---- Weight norm ----------------------------------------------------------------------------------------------------


def _layers(layout):
    yield bst.BlockSparseConv2d(30, 21, 3, layout, padding=1), torch.randn(2, 30, 5, 4)
    yield bst.BlockSparseConvTranspose1d(21, 30, 2, layout.t()), torch.randn(2, 21, 5)
    yield bst.BlockSparseLinear(30, 21, layout), torch.randn(4, 30)


def test_weight_norm_is_that_of_dense_over_live_blocks():
    mask = [[1, 0, 1, 1], [0, 1, 0, 0], [1, 0, 1, 1]]  # as the norms of nothing are not compared
    layout = Layout.from_mask(mask, 8, out_features=21, in_features=30)
    for layer, x in _layers(layout):
        layer = layer.double()
        x = x.double()
        dense = layer.to_dense()
        exchanged = isinstance(dense, nn.ConvTranspose1d)
        before = layer(x)
        assert bst.weight_norm(layer) is layer
        parametrizations.weight_norm(dense, dim=1 if exchanged else 0)
        close(layer(x), before, 1e-12)
        ours, theirs = layer.parametrizations.weight, dense.parametrizations.weight
        close(ours.original0, theirs.original0.flatten(), 1e-12)
        with torch.no_grad():
            g = torch.rand_like(ours.original0)
            ours.original0.copy_(g)
            theirs.original0.copy_(g.view_as(theirs.original0))
        close(layer(x), dense(x), 1e-12)
        layer(x).square().sum().backward()
        dense(x).square().sum().backward()
        close(ours.original0.grad, theirs.original0.grad.flatten(), 1e-9)
        grad = theirs.original1.grad.transpose(0, 1) if exchanged else theirs.original1.grad
        close(ours.original1.grad, bst.from_dense(grad, layer.layout), 1e-9)
        again = copy.deepcopy(layer)
        again.load_state_dict(layer.state_dict())
        close(again(x), layer(x), 0)
        kept = layer(x)
        parametrize.remove_parametrizations(layer, "weight")
        assert isinstance(layer.weight, nn.Parameter)
        close(layer(x), kept, 1e-12)


def test_weight_norm_of_outputs_without_blocks_and_of_halves():
    layout = Layout.from_mask([[1, 1], [0, 0]], 8)
    layer = bst.weight_norm(bst.BlockSparseConv2d(16, 16, 3, layout))
    layer(torch.randn(2, 16, 4, 4)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    half = bst.weight_norm(bst.BlockSparseConv2d(16, 16, 3, layout, dtype=torch.bfloat16))
    assert half.weight.dtype == torch.bfloat16
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 16, 4, 4)
    close(compiled(x), layer(x))


def test_weight_norm_of_pytorch_works_by_block(channels):
    layer = bst.BlockSparseConv2d(30, 21, 3, channels)
    x = torch.randn(2, 30, 5, 4)
    before = layer(x)
    parametrizations.weight_norm(layer)
    close(layer(x), before)
    assert layer.parametrizations.weight.original0.shape == (channels.blocks, 1, 1, 1)
    layer(x).sum().backward()


def test_weight_norm_says_what_is_wrong(channels):
    layer = bst.weight_norm(bst.BlockSparseConv2d(30, 21, 3, channels))
    with pytest.raises(ValueError, match="parametrized already"):
        bst.weight_norm(layer)
    with pytest.raises(TypeError, match="a Conv2d, needs a block-sparse layer"):
        bst.weight_norm(nn.Conv2d(30, 21, 3))


# ---- Edge bias ------------------------------------------------------------------------------------------------------
