"""Networks with block-sparse layers in one file: the same bits again, and files that are refused."""

import copy
import json
import os
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse.torch import layer_records, pretrained

pytestmark = pytest.mark.usefixtures("one_thread")
safetensors = pytest.importorskip("safetensors")
from safetensors.torch import save_file  # noqa: E402


class Net(nn.Module):
    """With layers of all kinds, a shared weight, and a buffer."""

    def __init__(self, width=64, classes=20, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.conv = nn.Conv1d(width, 32, 3, padding=1)
        self.up = nn.ConvTranspose1d(32, 32, 2, stride=2)
        self.rnn = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.norm = nn.BatchNorm1d(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, classes, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, text):
        y = self.up(self.conv(self.embedding(text).transpose(1, 2)))
        y = self.rnn(self.norm(y).transpose(1, 2))[0]
        return self.head(self.mlp(y)) * self.scale


TEXT = torch.arange(30).view(3, 10) % 20


def made_sparse(model, block_size=16):
    bst.replace_linears(model, density=0.4, block_size=block_size, ignore="head")
    bst.replace_convolutions(model, density=0.5, block_size=block_size)
    model.rnn = bst.from_dense(model.rnn, density=0.3, block_size=block_size)
    return model


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(3)
    model = made_sparse(Net()).eval()
    with torch.no_grad():
        model.scale.fill_(1.5)
        model.norm.running_mean.normal_()
    bst.save_pretrained(model, tmp_path / "net.safetensors")
    return model, tmp_path / "net.safetensors"


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_loaded_model_gives_the_same_bits(saved, where):
    model, path = saved

    def build():
        with torch.device(where):
            return Net().train()

    loaded = bst.load_pretrained(build, path)
    assert not loaded.training
    assert torch.equal(loaded(TEXT), model(TEXT))
    assert loaded.head.weight is loaded.embedding.weight
    for (name, own), (other, theirs) in zip(loaded.named_modules(), model.named_modules(), strict=True):
        assert (name, type(own)) == (other, type(theirs))
        if hasattr(own, "layout"):
            assert own.layout == theirs.layout
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    again = path.with_name("again.safetensors")
    bst.save_pretrained(loaded, again)
    assert again.read_bytes() == path.read_bytes()


def test_a_loaded_model_trains_and_moves(saved):
    model, path = saved
    loaded = bst.load_pretrained(Net, path)
    for net in (model, loaded):
        net(TEXT).square().mean().backward()
    for (name, own), other in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert own.requires_grad, name
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0)
    assert torch.equal(loaded.double()(TEXT), copy.deepcopy(model).double()(TEXT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_files_dtypes_count(tmp_path, dtype):
    def build():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))

    model = build().to(dtype)
    bst.replace_linears(model, density=0.5, block_size=16)
    bst.save_pretrained(model, tmp_path / "x.safetensors")
    loaded = bst.load_pretrained(build, tmp_path / "x.safetensors")
    x = torch.randn(5, 64, dtype=dtype)
    assert torch.equal(loaded(x), model.eval()(x))


def layers():
    layout = Layout.from_graph("random(3,4,0.5)", 8, seed=1, out_features=21, in_features=30)
    yield nn.Linear(30, 21), bst.BlockSparseLinear(30, 21, layout, gates=True, activation="silu")
    yield nn.Linear(30, 21, bias=False), bst.BlockSparseLinear(30, 21, layout, bias=False)
    square = Layout.from_graph("random(3,3,0.5)", 8)
    yield nn.Linear(24, 24), bst.BlockSparseLinear(24, 24, square.t())
    options = {"stride": (2, 1), "padding": ((2, 0), (2, 1)), "dilation": 1}
    order = torch.randperm(30)
    dense = nn.Conv2d(30, 21, (3, 2))
    yield dense, bst.BlockSparseConv2d(30, 21, (3, 2), layout, channel_order=order, activation="relu", **options)
    yield nn.Conv1d(30, 21, 3), bst.BlockSparseConv1d(30, 21, 3, layout, padding="same", gates=True)
    yield nn.Conv3d(30, 21, 2), bst.BlockSparseConv3d(30, 21, 2, layout, bias=False)
    up = {"stride": 2, "output_padding": 1}
    yield nn.ConvTranspose2d(30, 21, 3), bst.BlockSparseConvTranspose2d(30, 21, 3, layout, **up)
    yield nn.LSTM(6, 24), bst.BlockSparseLSTM(6, 24, square)
    both = bst.BlockSparseLSTM(8, 24, square, 2, False, True, input_layout=[Layout.from_graph("dense(12,1)", 8), None])
    yield nn.LSTM(8, 24, 2, False), both


@pytest.mark.parametrize(("dense", "layer"), list(layers()), ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("alone", [True, False])
def test_layers_of_every_kind(tmp_path, dense, layer, alone):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(2, 30, *(7, 6, 5)[: getattr(layer, "rank", 1)]) if hasattr(layer, "kernel_size") else None
    x = torch.randn(4, 3, getattr(layer, "input_size", None) or layer.in_features) if x is None else x
    model, path = (layer if alone else nn.ModuleList([nn.Linear(3, 3), layer])), tmp_path / "layer.safetensors"
    bst.save_pretrained(model, path)
    loaded = bst.load_pretrained(
        lambda: copy.deepcopy(dense if alone else nn.ModuleList([nn.Linear(3, 3), dense])), path
    )
    one = loaded if alone else loaded[1]
    assert type(one) is type(layer)
    assert repr(one) == repr(layer)
    mine, theirs = one(x), layer.eval()(x)
    for a, b in zip(mine, theirs, strict=True) if isinstance(mine, tuple) else ((mine, theirs),):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_dense_model_and_a_shared_layer(tmp_path):
    path = tmp_path / "x.safetensors"
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    bst.save_pretrained(model, path)
    assert torch.equal(
        bst.load_pretrained(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), path)[0].weight, model[0].weight
    )

    def build():
        layer = nn.Linear(32, 32)
        return nn.Sequential(layer, nn.Tanh(), layer)

    shared = build()
    bst.replace_linears(shared, density=0.5, block_size=8)
    bst.save_pretrained(shared, path)
    loaded = bst.load_pretrained(build, path)
    assert loaded[0] is loaded[2]
    assert torch.equal(loaded[0].weight, shared[0].weight)


def test_parts_that_are_sparse_in_themselves_are_taken_as_they_are(tmp_path):
    def build(density=0.3):
        layout = Layout.from_graph(f"random(4,4,{density})", 8)
        return nn.ModuleDict({"cell": bst.MultiplicativeLSTM(6, 32, layout), "out": nn.Linear(32, 32)})

    model, path = build(), tmp_path / "x.safetensors"
    bst.replace_linears(model, r"^out", density=0.5, block_size=8)
    bst.save_pretrained(model, path)
    loaded, x = bst.load_pretrained(build, path), torch.randn(3, 2, 6)
    assert torch.equal(loaded["cell"](x)[0], model["cell"](x)[0])
    with pytest.raises(
        ValueError, match=r"cell.recurrent_m is Layout\(.*hash \w{16}\) there. Here it is Layout\(.*hash"
    ):
        bst.load_pretrained(lambda: build(0.6), path)


def test_a_sparse_network_that_was_pruned_further(tmp_path):
    def build():
        torch.manual_seed(0)
        layout = Layout.from_graph("random(4,4,0.7)", 8, seed=1)
        return nn.ModuleList(
            [
                bst.BlockSparseLinear(32, 32, layout),
                bst.BlockSparseLSTM(6, 32, layout),
                bst.MultiplicativeLSTM(6, 32, layout),
            ]
        )

    model, path = build(), tmp_path / "x.safetensors"
    bss.convert(model, bss.sparsify_(model, "magnitude", sparsity=0.6), min_speedup=0)
    bst.save_pretrained(model, path)
    loaded, x = bst.load_pretrained(build, path), torch.randn(3, 2, 6)
    assert loaded[0].layout.blocks < build()[0].layout.blocks
    assert torch.equal(loaded[0](torch.eye(32)), model[0](torch.eye(32)))
    assert all(torch.equal(loaded[i](x)[0], model[i](x)[0]) for i in (1, 2))
    bst.save_pretrained(build(), path)  # blocks that the pruned one has no memory for
    with pytest.raises(ValueError, match=r"hash \w{16}\) there. Here .* is Layout\(.*hash"):
        bst.load_pretrained(lambda: loaded, path)


def test_sparse_modules_of_other_sizes(tmp_path):
    layout, path = Layout.from_graph("dense(4,4)", 8), tmp_path / "x.safetensors"
    wide = Layout.from_graph("dense(8,8)", 8)
    for saved, built, message in (
        (bst.BlockSparseLSTM(6, 32, layout), bst.BlockSparseLSTM(6, 64, wide), r"LSTM\(6, 64, 1\)"),
        (bst.BlockSparseConv2d(32, 32, 3, layout), bst.BlockSparseConv2d(32, 32, 1, layout), r"the kernel \(1, 1\)"),
        (bst.BlockSparseLinear(32, 32, layout), bst.BlockSparseConv1d(32, 32, 1, layout), "not a BlockSparseLinear"),
    ):
        bst.save_pretrained(nn.Sequential(saved), path)
        with pytest.raises(ValueError, match=message):
            bst.load_pretrained(lambda built=built: nn.Sequential(built), path)


def test_gates_beside_dense_weights_stay(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].register_buffer("weight_gates", torch.rand(4, 4).round())
    bst.save_pretrained(model, tmp_path / "x.safetensors")
    loaded = bst.load_pretrained(lambda: nn.Sequential(nn.Linear(32, 32)), tmp_path / "x.safetensors")
    assert torch.equal(loaded[0].weight_gates, model[0].weight_gates)


def test_compiled_and_parallel_models_are_saved_as_what_is_inside(saved):
    model, path = saved
    bst.save_pretrained(torch.compile(nn.DataParallel(model)), path.with_name("other"))
    assert path.with_name("other").read_bytes() == path.read_bytes()


# ---- Files that are refused ----------------------------------------------------------------------------------------


def test_files_of_other_networks(saved):
    _, path = saved
    outline = r"\d+ tensors \(hash [0-9a-f]{16}\)"
    both = rf"The file holds {outline}, build\(\) makes {outline}"
    with pytest.raises(ValueError, match=rf"embedding.weight is \[20, 64\] there and \[30, 64\] here.*{both}"):
        bst.load_pretrained(lambda: Net(classes=30), path)
    with pytest.raises(
        ValueError, match=r"conv is Layout\(32 x 64 .*\(hash \w{16}\) there. Here it is a Conv1d of 32 x 32"
    ):
        bst.load_pretrained(lambda: Net(width=32), path)
    with pytest.raises(ValueError, match=r"conv is Layout.* Here there is no such module"):
        bst.load_pretrained(lambda: nn.Linear(3, 3), path)
    net = Net()
    net.mlp[0] = nn.Conv1d(32, 64, 1)
    with pytest.raises(ValueError, match=r"mlp.0 is Layout.* Here it is a Conv1d"):
        bst.load_pretrained(lambda: net, path)
    net = Net()
    net.conv = nn.Conv1d(64, 32, 5, padding=2)
    with pytest.raises(ValueError, match=r"conv is .*Here it is a Conv1d with the kernel \(5,\), not \(3,\)"):
        bst.load_pretrained(lambda: net, path)
    net = Net()
    net.rnn = nn.LSTM(32, 32, num_layers=1, batch_first=True)
    with pytest.raises(ValueError, match=r"rnn is .*Here it is LSTM\(32, 32, 1\)"):
        bst.load_pretrained(lambda: net, path)
    net = Net()
    net.more = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"more.bias is not there and \[2\] here; more.weight is not there and \[2, 2\]"
    ):
        bst.load_pretrained(lambda: net, path)


def test_damaged_files(saved):
    _, path = saved
    content = path.read_bytes()
    copy_ = path.with_name("copy.safetensors")
    for end in (0, 3, 100, len(content) // 2, len(content) - 1):
        copy_.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"copy.safetensors is damaged or no file of a network"):
            bst.load_pretrained(Net, copy_)
    header = int.from_bytes(content[:8], "little")
    for place in (8 + header, 8 + header + (len(content) - header) // 2, len(content) - 1):
        copy_.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match="damaged: what it holds does not match its digest"):
            bst.load_pretrained(Net, copy_)
    copy_.write_bytes(content.replace(b"activation", b"activatiom", 1))
    with pytest.raises(ValueError, match="damaged: what it holds does not match its digest"):
        bst.load_pretrained(Net, copy_)


def test_files_that_are_none(saved):
    _, path = saved
    save_file({"weight": torch.ones(2, 3)}, path.with_name("other"), {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"not written by save_pretrained: its metadata is format.*1 tensors \(hash \w{16}\)"
    ):
        bst.load_pretrained(Net, path.with_name("other"))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        bst.load_pretrained(Net, path.with_name("none"))
    with pytest.raises(IsADirectoryError, match=r"\[save_pretrained\] \. is a folder, needs the name of a file"):
        bst.save_pretrained(nn.Linear(2, 2), ".")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        bst.load_pretrained(Net, path.parent)


def test_a_layer_of_a_later_version(saved, monkeypatch):
    _, path = saved
    monkeypatch.delitem(layer_records.KINDS, "BlockSparseLSTM")
    with pytest.raises(ValueError, match="the file has a BlockSparseLSTM, which this version does not know"):
        bst.load_pretrained(Net, path)


def test_a_write_that_fails_leaves_the_last_file(saved, monkeypatch):
    model, path = saved
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        OSError, match=r"\[save_pretrained\] .*net.safetensors could not be written, what was there is kept"
    ):
        bst.save_pretrained(model.double(), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_wrong_calls(saved):
    model, path = saved
    with pytest.raises(TypeError, match=r"model is a dict, needs a torch.nn.Module"):
        bst.save_pretrained({}, path)
    with pytest.raises(TypeError, match="build is a Net, needs a function that makes the network"):
        bst.load_pretrained(model, path)
    with pytest.raises(TypeError, match=r"what build\(\) makes is 3, needs a torch.nn.Module"):
        bst.load_pretrained(lambda: 3, path)
    with pytest.raises(ValueError, match="weight is on meta"):
        bst.save_pretrained(nn.Linear(2, 2, device="meta"), path)
    layer = nn.Sequential(parametrizations.weight_norm(bst.from_dense(nn.Linear(32, 32), density=0.5)))
    with pytest.raises(ValueError, match="0 is parametrized"):
        bst.save_pretrained(layer, path)
    net = Net()
    net.register_buffer("places", torch.arange(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"places is on meta, and not in .*build\(\) needs to make"):
        bst.load_pretrained(lambda: net, path)


def test_the_header_is_plain_data(saved):
    _, path = saved
    with safetensors.safe_open(path, "pt") as file:
        (value,) = file.metadata().values()
    digest, _, header = value.partition(" ")
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
    assert json.loads(header)["layers"]["mlp.0"] == {"kind": "BlockSparseLinear", "options": {"activation": "none"}}
    assert pretrained.FORMAT == "blocksparse-pretrained-1"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_from_a_card_and_to_one(saved):
    model, path = saved
    bst.save_pretrained(copy.deepcopy(model).cuda(), path.with_name("card"))
    assert path.with_name("card").read_bytes() == path.read_bytes()
    loaded = bst.load_pretrained(Net, path, device="cuda")
    assert torch.equal(loaded(TEXT.cuda()), model.cuda()(TEXT.cuda()))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.b(self.a(x))


class Tied(Pair):
    def __init__(self):
        super().__init__()
        self.b.bias = self.a.bias


@pytest.mark.parametrize("targets", [r"a|b", r"b"])
def test_block_sparse_layers_that_share_a_bias(tmp_path, targets):
    model = Tied().eval()
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16, targets=targets)
    model = bss.convert(model, masks, block_size=16, min_speedup=0)
    bst.save_pretrained(model, tmp_path / "x.safetensors")
    loaded, x = bst.load_pretrained(Tied, tmp_path / "x.safetensors"), torch.randn(3, 32)
    assert loaded.a.bias is loaded.b.bias
    assert torch.equal(loaded(x), model(x))


def test_block_sparse_layers_that_share_a_weight(tmp_path):
    model, layout = Pair().eval(), Layout.from_mask([[1, 0], [1, 1]], 16)
    model.a, model.b = (bst.BlockSparseLinear(32, 32, layout) for _ in range(2))
    model.b.weight = model.a.weight
    bst.save_pretrained(model, tmp_path / "x.safetensors")
    loaded, x = bst.load_pretrained(Pair, tmp_path / "x.safetensors"), torch.randn(3, 32)
    assert loaded.a.weight is loaded.b.weight
    assert torch.equal(loaded(x), model(x))


def test_a_buffer_that_is_only_named_like_gates(tmp_path):
    model = Pair()
    model.register_buffer("in_gates", torch.rand(4, 4))
    bst.save_pretrained(model, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"in_gates is \[4, 4\] there and not here"):
        bst.load_pretrained(Pair, tmp_path / "x.safetensors")
