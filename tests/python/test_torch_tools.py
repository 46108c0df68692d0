"""PyTorch's tools on block-sparse layers: torch.fx, torch.jit.trace, FlopCounterMode; and peft."""

import copy
import io
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_channels, make_layout
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import blocksparse.torch as bst
from blocksparse import Layout

SQUARE = Layout.from_graph("random(2,2,0.8)", 8, seed=1)
ORDER = torch.randperm(30, generator=torch.Generator().manual_seed(1))


class Edged(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = bst.BlockSparseConv2d(30, 21, 3, make_channels(), padding=1)
        self.edge = bst.EdgeBias.of(self.conv)

    def forward(self, x):
        return self.edge(self.conv(x), x)


class Steps(nn.Module):
    """A recurrent network, of which y is read."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        y, _ = self.network(x)
        return y


def linear(**options):
    return nn.Sequential(bst.BlockSparseLinear(90, 60, make_layout(), **options), nn.Tanh(), nn.Linear(60, 3))


def conv():
    layer = bst.BlockSparseConv2d(30, 21, 3, make_channels(), channel_order=ORDER, gates=True, activation="relu")
    return nn.Sequential(layer, nn.Tanh())


NETWORKS = {
    "linear": (linear, (4, 90)),
    "linear with gates": (lambda: linear(gates=True, activation="gelu"), (4, 90)),
    "transposed": (lambda: nn.Sequential(bst.BlockSparseLinear(60, 90, make_layout().t())), (4, 60)),
    "weight norm": (lambda: nn.Sequential(bst.weight_norm(bst.BlockSparseLinear(90, 60, make_layout()))), (4, 90)),
    "conv": (conv, (2, 30, 5, 4)),
    "conv, unbatched": (conv, (30, 5, 4)),
    "edge bias": (Edged, (2, 30, 5, 4)),
    "lstm": (lambda: Steps(bst.BlockSparseLSTM(6, 16, SQUARE, 2)), (3, 2, 6)),
    "multiplicative": (lambda: Steps(bst.MultiplicativeLSTM(6, 16, SQUARE)), (3, 2, 6)),
    "deep": (lambda: Steps(bst.DeepUpdateLSTM(6, 16, SQUARE, 2)), (3, 2, 6)),
    "deep, dense": (lambda: Steps(bst.DeepUpdateLSTM(6, 16, None, 2, 2)), (3, 2, 6)),
}


def gradients(module, x):
    given = x.clone().requires_grad_()
    y = module(given)
    return y, torch.autograd.grad(y.sin().sum(), [given, *module.parameters()])


def same(a, b):
    for mine, theirs in zip((a[0], *a[1]), (b[0], *b[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", NETWORKS)
def test_symbolic_traces_hold_modules_as_leaves(which):
    make, shape = NETWORKS[which]
    model, x = make(), torch.randn(shape)
    traced = torch.fx.symbolic_trace(model)
    called = {type(traced.get_submodule(node.target)) for node in traced.graph.nodes if node.op == "call_module"}
    assert any(kind.__module__.startswith("blocksparse") or "Parametrized" in kind.__name__ for kind in called)
    same(gradients(traced, x), gradients(model, x))
    assert traced.state_dict().keys() == model.state_dict().keys()


def test_a_layer_alone_is_not_traced():
    for layer in (linear()[0], conv()[0], bst.BlockSparseLSTM(6, 16, SQUARE)):
        with pytest.raises(TypeError, match=rf"\[{type(layer).__name__}\] torch.fx has this as a leaf"):
            torch.fx.symbolic_trace(layer)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("which", NETWORKS)
def test_jit_traces_train_and_can_be_saved(which):
    make, shape = NETWORKS[which]
    model, x = make(), torch.randn(shape)
    traced = torch.jit.trace(model, x)
    same(gradients(traced, x), gradients(model, x))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    other = torch.randn(shape)
    same(gradients(loaded, other), gradients(model, other))
    with torch.no_grad():
        torch.testing.assert_close(loaded(other), model(other), rtol=1e-4, atol=1e-5)


# ---- Operations ------------------------------------------------------------------------------------------------------


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_of_linear_layers():
    layout = make_layout()
    one = 2 * 12 * layout.blocks * layout.block_size**2
    layer, x = bst.BlockSparseLinear(90, 60, layout), torch.randn(3, 4, 90)
    assert flops(lambda: layer(x)) == one
    assert flops(lambda: layer(x).sum().backward()) == 2 * one
    assert flops(lambda: layer(x.clone().requires_grad_()).sum().backward()) == 3 * one
    with torch.no_grad():
        assert flops(lambda: layer(x)) == one
        assert flops(lambda: bst.linear(x, layer.weight, layout, activation="relu")) == one
        assert flops(lambda: bst.linear_wgrad([x, x[0]], [torch.randn(3, 4, 60), torch.randn(4, 60)], layout)) == (
            one + one // 3
        )


CONVOLUTIONS = {
    "plain": (nn.Conv2d(32, 16, 3), (2, 32, 7, 6)),
    "strided": (nn.Conv2d(32, 16, (3, 2), 2, padding=1, dilation=(1, 2)), (2, 32, 7, 6)),
    "1-d": (nn.Conv1d(32, 16, 5), (3, 32, 9)),
    "transposed": (nn.ConvTranspose2d(32, 16, 3, 2, output_padding=1), (2, 32, 4, 3)),
}


@pytest.mark.parametrize("which", CONVOLUTIONS)
def test_flops_of_convolutions_with_all_blocks_are_those_of_dense_ones(which):
    dense, shape = CONVOLUTIONS[which]
    sparse = bst.from_dense(dense, density=1, block_size=8)
    half = bst.from_dense(dense, density=0.5, block_size=8)
    for leaf in (False, True):
        x = torch.randn(shape, requires_grad=leaf)
        want, got, less = (flops(lambda m=m, x=x: m(x).sum().backward()) for m in (dense, sparse, half))
        assert got == want == 2 * less


def test_flops_of_networks_are_those_of_their_products():
    steps, n, layout = 5, 2, SQUARE.stack(4)
    values = torch.randn(layout.values_shape, requires_grad=True)
    step, pre = 2 * n * values.numel(), torch.randn(steps, n, 64, requires_grad=True)
    h, c = (torch.randn(n, 16, requires_grad=True) for _ in "hc")
    # Of the first step, where there is no state before it, no product is needed.
    for state, count in ((None, steps - 1), ((h, c), steps)):
        assert flops(lambda s=state: bst.lstm(pre, values, layout, s)) == count * step
        assert flops(lambda s=state: bst.lstm(pre, values, layout, s)[0].sum().backward()) == 3 * count * step
    frozen = values.detach()
    assert flops(lambda: bst.lstm(pre, frozen, layout, (h, c))[0].sum().backward()) == 2 * steps * step
    assert flops(lambda: bst.lstm(pre[:0], values, layout)) == 0


@pytest.mark.parametrize("which", ["multiplicative", "deep", "deep, dense"])
def test_flops_of_networks_of_one_call(which):
    make, shape = NETWORKS[which]
    model, x = make(), torch.randn(shape)
    steps = x.size(0) * x.size(1)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 3 or name.endswith("weight"))
    counted = flops(lambda: model(x).sum().backward())
    assert counted >= 2 * steps * weights * 2, "forward and of the weights"
    expected = model(x)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


# ---- What other layers allow -----------------------------------------------------------------------------------------


def test_no_activation_is_none():
    layout, x = make_layout(), torch.randn(4, 90)
    layer = bst.BlockSparseLinear(90, 60, layout, activation=None)
    assert layer.activation == "none"
    assert torch.equal(bst.linear(x, layer.weight, layout, layer.bias, activation=None), layer(x))
    assert bst.BlockSparseConv2d(30, 21, 3, make_channels(), activation=None).activation == "none"
    images = torch.randn(1, 30, 4, 4)
    values = torch.randn(make_channels().blocks, 9, *make_channels().values_shape[1:])
    for wants in (False, True):
        values.requires_grad_(wants)
        y = bst.conv2d(images, values, make_channels(), kernel_size=3, activation=None)
        assert torch.equal(y, bst.conv2d(images, values, make_channels(), kernel_size=3))
    assert bst.from_dense(nn.Linear(32, 32), density=1, activation=None).activation == "none"
    with pytest.raises(ValueError, match=r"activation is '', needs one of none, relu, gelu, silu"):
        bst.linear(x, layer.weight, layout, activation="")


def test_what_lstms_do_not_have():
    with pytest.raises(NotImplementedError, match=r"\[BlockSparseLSTM\] has no bidirectional: take two"):
        bst.BlockSparseLSTM(6, 16, SQUARE, bidirectional=True)
    with pytest.raises(NotImplementedError, match=r"\[BlockSparseLSTM\] has no proj_size: put a linear layer behind"):
        bst.BlockSparseLSTM(6, 16, SQUARE, proj_size=8)
    bst.BlockSparseLSTM(6, 16, SQUARE, bidirectional=False, proj_size=0)


def test_lora_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    lora = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples/lora_torch.py")))
    lora.main()

    def network():
        torch.manual_seed(3)
        layers = {"up": bst.BlockSparseLinear(90, 60, make_layout()), "act": nn.ReLU(), "down": nn.Linear(60, 4)}
        return nn.Sequential(*[layers[name] for name in layers])

    def config(**options):
        return lora.register(peft.LoraConfig(target_modules=["0", "2"], r=2, lora_alpha=6, **options))

    base, x = network(), torch.randn(5, 90)
    before, blocks = base(x), base[0].weight.detach().clone()
    model = peft.get_peft_model(base, config())
    torch.testing.assert_close(model(x), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    layer = model.base_model.model[0]
    assert torch.equal(layer.base_layer.weight, blocks)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert b.abs().max() > 0
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3 * (x @ a.t()) @ b.t())
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(network(), tmp_path, config=config())
    torch.testing.assert_close(again(x), model(x))
    with pytest.raises(NotImplementedError, match="cannot be merged into blocks"):
        copy.deepcopy(model).merge_and_unload()
    for wrong in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(ValueError, match="read a dense weight"):
            config(**wrong)
    active = nn.Sequential(bst.BlockSparseLinear(90, 60, make_layout(), activation="relu"))
    with pytest.raises(ValueError, match="the layer has activation 'relu'"):
        peft.get_peft_model(active, lora.register(peft.LoraConfig(target_modules=["0"])))
