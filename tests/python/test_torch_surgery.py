"""Dense layers made block-sparse, one by one and throughout a network."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import blocksparse.torch as bst
from blocksparse import Layout


class Language(nn.Module):
    """A small transformer with a head, as language models have it."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 2)
        self.small = nn.Linear(32, 4)
        self.head = nn.Linear(32, 40)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        y = self.layers(self.embedding(x))
        return self.head(y), self.small(y)


INNER = {f"layers.layers.{i}.linear{k}" for i in (0, 1) for k in (1, 2)}
TEXT = torch.arange(12).view(2, 6)


# ---- from_dense ------------------------------------------------------------------------------------------------------


def test_the_guide_makes_layers_sparse_as_it_says():
    guide = (Path(__file__).parents[2] / "docs/guide/linear.md").read_text(encoding="utf-8")
    linear = nn.Linear(320, 640)
    for written in re.findall(r"`(bst\.(?:from_dense|replace_linears)\(.*?\))`", guide):
        names = {"bst": bst, "linear": linear, "model": nn.Sequential(nn.Linear(64, 64))}
        made = eval(written, names)
        assert isinstance(made, bst.BlockSparseLinear | dict)


def test_both_forms_of_from_dense():
    linear = nn.Linear(96, 64)
    layer = bst.from_dense(linear, density=0.5)
    assert (type(layer), layer.layout.blocks) == (bst.BlockSparseLinear, 3)
    layout = bst.select_blocks(linear.weight, 0.5, 32)
    assert layer.layout == layout
    again = bst.from_dense(linear, layout, activation="relu")
    values = bst.from_dense(linear.weight, layout)
    x = torch.randn(5, 96)
    for made in (layer.weight, again.weight, values):
        assert torch.equal(made, values)
    assert torch.equal(again(x), layer(x).relu())
    assert bst.from_dense(linear, density=0.25, block_size=8).layout.block_size == 8
    assert torch.equal(bst.from_dense(weight=linear.weight, layout=layout), values)


def test_from_dense_of_all_kinds():
    assert isinstance(bst.from_dense(nn.Conv2d(16, 16, 3), density=0.5, block_size=8), bst.BlockSparseConv2d)
    made = bst.from_dense(nn.ConvTranspose1d(16, 16, 3), density=0.5, block_size=8)
    assert isinstance(made, bst.BlockSparseConvTranspose1d)
    assert isinstance(bst.from_dense(nn.Conv1d(16, 16, 3, groups=2), block_size=8), bst.BlockSparseConv1d)
    lstm = bst.from_dense(nn.LSTM(4, 16), Layout.from_graph("dense(2)", 8))
    assert isinstance(lstm, bst.BlockSparseLSTM)


def test_wrong_calls_of_from_dense():
    linear = nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"\[from_dense\] needs density or layout, one of them"):
        bst.from_dense(linear)
    for call in (
        lambda: bst.from_dense(linear.weight, density=0.5),
        lambda: bst.from_dense(linear.weight),
        lambda: bst.from_dense(linear.weight, Layout.from_graph("dense(2)", 8), block_size=8),
    ):
        with pytest.raises(TypeError, match=r"\[from_dense\] a weight needs a layout and nothing else: select_blocks"):
            call()
    with pytest.raises(TypeError, match=r"\[from_dense\] a Embedding, needs a torch.nn Linear, convolution or LSTM"):
        bst.from_dense(nn.Embedding(16, 16), density=0.5)


# ---- replace_linears -------------------------------------------------------------------------------------------------


def test_replacing_the_linears_of_a_transformer():
    model = Language().eval()
    before = model(TEXT)
    same = copy.deepcopy(model)
    replaced = bst.replace_linears(same, density=1, block_size=8)
    assert set(replaced) == INNER | {"head"}, "small has 4 features, less than a block, and out_proj is a subclass"
    assert same.head is replaced["head"]
    assert not replaced["head"].training
    with torch.no_grad():  # where PyTorch would take a shortcut that reads the weights as dense ones
        for mine, theirs in zip(same(TEXT), before, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    sparse = bst.replace_linears(copy.deepcopy(model), density=0.25, block_size=8)
    assert all(layer.layout.density == 0.25 for layer in sparse.values())
    same.train()
    sum(t.sum() for t in same(TEXT)).backward()
    assert all(p.grad is not None for p in same.parameters())


CHOICES = {
    "a pattern": ({"filter": r"1\.linear"}, {"layers.layers.1.linear1", "layers.layers.1.linear2"}),
    "a function": ({"filter": lambda name, m: m.out_features == 4}, {"small"}),
    "ignore": ({"ignore": "head"}, INNER),
    "ignore, two": ({"ignore": ["linear1", "layers.layers.1"]}, {"layers.layers.0.linear2", "head"}),
    "targets": ({"targets": "linear1"}, {"layers.layers.0.linear1", "layers.layers.1.linear1"}),
    "targets, small ones too": ({"targets": {"small", "head"}}, {"small", "head"}),
    "targets, a middle": ({"targets": ("layers.0",)}, {"layers.layers.0.linear1", "layers.layers.0.linear2"}),
    "targets and ignore": ({"targets": "layers", "ignore": "layers.1.linear2"}, INNER - {"layers.layers.1.linear2"}),
    "pattern and targets": ({"filter": "2$", "targets": "layers"}, {n for n in INNER if n.endswith("2")}),
    "an empty pattern": ({"filter": ""}, INNER | {"head", "small"}),
}


@pytest.mark.parametrize("how", CHOICES)
def test_what_is_chosen(how):
    options, chosen = CHOICES[how]
    model = Language()
    assert set(bst.replace_linears(model, density=0.5, block_size=8, **options)) == chosen
    kinds = {name for name, module in model.named_modules() if isinstance(module, bst.BlockSparseLinear)}
    assert kinds == chosen


def test_convolutions_are_chosen_by_name_too():
    def network():
        return nn.ModuleDict({"a": nn.Conv2d(16, 16, 3), "b": nn.Conv2d(16, 16, 3), "ab": nn.Conv2d(4, 16, 3)})

    for options, chosen in (
        ({"targets": "a"}, {"a"}),
        ({"ignore": "a"}, {"b"}),
        ({"targets": ["b", "ab"]}, {"b", "ab"}),
    ):
        assert set(bst.replace_convolutions(network(), density=0.5, block_size=8, **options)) == chosen


def test_wrong_names_of_modules():
    for call in (bst.replace_linears, bst.replace_convolutions):
        model = Language()
        with pytest.raises(ValueError, match=rf"\[{call.__name__}\] ignore has 'hed', but no module has that name"):
            call(model, density=0.5, ignore=["head", "hed"])
        with pytest.raises(ValueError, match=rf"\[{call.__name__}\] targets has 'ead', but no module has that name"):
            call(model, density=0.5, targets="ead")
        with pytest.raises(TypeError, match=r"targets is 3, needs a name or a list of names"):
            call(model, density=0.5, targets=3)
        with pytest.raises(TypeError, match=r"ignore is \[3\], needs a name or a list of names"):
            call(model, density=0.5, ignore=[3])
        with pytest.raises(ValueError, match=rf"\[{call.__name__}\] filter is '\(\[', needs a regular expression: "):
            call(model, filter="([", density=0.5)
    with pytest.raises(
        ValueError, match=r"no linear layer was chosen by None, targets='embedding', ignore=\['head'\] and blocks of 8"
    ):
        bst.replace_linears(model, density=0.5, block_size=8, targets="embedding", ignore=["head"])
    with pytest.raises(ValueError, match=r"\[replace_linears\] no linear layer was chosen by None and blocks of 128"):
        bst.replace_linears(model, density=0.5, block_size=128)


def test_linears_that_cannot_be_replaced():
    model = Language(tied=True)
    with pytest.raises(ValueError, match=r"\[replace_linears\] head shares its weight with another module"):
        bst.replace_linears(model, density=0.5, block_size=8)
    assert type(model.layers.layers[0].linear1) is nn.Linear, "nothing was replaced"
    bst.replace_linears(model, density=0.5, block_size=8, ignore="head")
    with pytest.raises(ValueError, match="the model is a linear layer itself: use from_dense"):
        bst.replace_linears(nn.Linear(32, 32), density=0.5)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)))
    with pytest.raises(ValueError, match=r"\[replace_linears\] 0 is parametrized"):
        bst.replace_linears(model, density=0.5, block_size=8)


def test_layers_with_hooks_are_not_replaced():
    model = nn.Sequential(nn.Linear(16, 16), nn.Conv1d(16, 16, 3))
    handles = [layer.register_forward_hook(lambda layer, x, y: 2 * y) for layer in model]
    for call, name in ((bst.replace_linears, "0"), (bst.replace_convolutions, "1")):
        with pytest.raises(ValueError, match=rf"{name} has hooks, which would be lost: leave it out by ignore"):
            call(model, density=0.5, block_size=8)
    for handle in handles:
        handle.remove()
    assert list(bst.replace_linears(model, density=0.5, block_size=8)) == ["0"]


def test_one_layer_of_several_names_stays_one():
    shared = nn.Linear(16, 16)
    shared.bias.requires_grad_(False)
    model = nn.ModuleDict({"a": shared, "b": shared})
    replaced = bst.replace_linears(model, density=0.25, block_size=8)
    assert model["a"] is model["b"] is replaced["a"] is replaced["b"]
    assert (model["a"].weight.requires_grad, model["a"].bias.requires_grad) == (True, False)
