"""From masked weights to block-sparse storage: of a model that is done, and of one in mid-training."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse.torch.sparsify.conversion import timing
from blocksparse.torch.sparsify.conversion.timing import Seen

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.up = nn.ConvTranspose1d(32, 32, 2, stride=2, bias=False)
        self.rnn = nn.LSTM(32, 32, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 72), nn.GELU(), nn.Linear(72, 32, bias=False))
        self.shared = nn.Linear(32, 32)
        self.again = self.shared
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        y = self.rnn(self.up(self.conv(x)).transpose(1, 2))[0]
        return self.head(self.again(self.mlp(y) + self.shared(y)))


X = torch.randn(3, 16, 10, generator=torch.Generator().manual_seed(0))


def pruned(method="magnitude", sparsity=0.5, model=None, **options):
    model = Net().eval() if model is None else model
    masks = bss.sparsify_(model, method, sparsity=sparsity, block_size=16, ignore="head", **options)
    return model, masks


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ---- convert -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_converted_model_computes_the_same(dtype):
    model, masks = pruned()
    model, x = model.to(dtype), X.to(dtype)
    expected = model(x)
    converted = bss.convert(model, masks, block_size=16, min_speedup=0)
    assert converted is model
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if hasattr(module, "layout")}
    assert kinds == {
        "conv": "BlockSparseConv1d",
        "up": "BlockSparseConvTranspose1d",
        "rnn.recurrent.0": "BlockSparseLinear",
        "rnn.recurrent.1": "BlockSparseLinear",
        "mlp.0": "BlockSparseLinear",
        "mlp.2": "BlockSparseLinear",
        "shared": "BlockSparseLinear",
    }
    assert model.shared is model.again
    assert_close(model(x), expected)
    for name, mask in masks.items():
        path = name.replace("weight_hh_l", "recurrent.")
        assert model.get_submodule(path).layout.mask().tolist() == mask.tolist()
    assert not any(module.training for module in model.modules())


def test_saved_converted_and_loaded_is_the_same_to_the_bit(tmp_path):
    model, masks = pruned("obs", calibration=[X])
    model = bss.convert(model, masks, block_size=16, min_speedup=0)
    bst.save_pretrained(model, tmp_path / "small.safetensors")
    assert torch.equal(bst.load_pretrained(Net, tmp_path / "small.safetensors")(X), model(X))


def fake_times(monkeypatch, faster):
    """Layers for which `faster(after)` says so become twice as fast, others half as fast."""
    seen = {}

    def time_layers(before, after, fed):
        seen[type(after).__name__, fed.shape] = fed
        return (2e-3, 1e-3) if faster(after) else (1e-3, 2e-3)

    module = importlib.import_module(
        "blocksparse.torch.sparsify.conversion.convert"
    )  # whose name the function has, too
    monkeypatch.setattr(module, "time_layers", time_layers)
    return seen


def test_only_what_is_faster_is_replaced(monkeypatch):
    seen = fake_times(monkeypatch, lambda layer: isinstance(layer, bst.BlockSparseLinear))
    model, masks = pruned()
    expected, timings = model(X), {}
    bss.convert(model, masks, block_size=16, example=X, timings=timings)
    assert torch.equal(model(X), expected) or (model(X) - expected).abs().max() < 1e-5
    assert {name for name, time in timings.items() if time.converted} == {"mlp.0", "mlp.2", "shared"}
    assert timings.keys() == {"conv", "up", "rnn", "mlp.0", "mlp.2", "shared"}
    assert isinstance(model.conv, nn.Conv1d)
    assert isinstance(model.rnn, nn.LSTM)
    assert {shape for _, shape in seen} == {(3, 16, 10), (3, 32, 10), (3, 20, 32), (3, 20, 72)}
    time = timings["mlp.0"]
    assert (time.shape, time.speedup, time.density) == ((3, 20, 32), 2.0, 0.5)
    model, masks = pruned()
    with torch.no_grad():
        model.mlp[0].weight.fill_(1.0)  # also where the mask says that there is nothing
    bss.convert(model, masks, block_size=16, min_speedup=2.5)
    dead = masks["mlp.0"].logical_not().repeat_interleave(16, 0)[:72].repeat_interleave(16, 1)
    assert torch.equal(model.mlp[0].weight == 0, dead)
    assert not any(hasattr(module, "layout") for module in model.modules())
    assert {shape for kind, shape in seen if kind == "BlockSparseLinear"} >= {(512, 32), (512, 72)}
    bss.convert(model, masks, block_size=16, tokens=64, seen={"mlp.0": Seen((7, 32), torch.float32)})
    assert {(7, 32), (64, 72), (1, 16, 64), (4, 16, 32)} <= {shape for _, shape in seen}
    assert isinstance(model.mlp[0], bst.BlockSparseLinear)


def test_times_are_those_of_this_machine():
    """A layer of which nearly nothing is left is faster, and gains more than one that keeps all of its blocks."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    empty, full = torch.zeros(16, 16, dtype=torch.bool), torch.ones(16, 16, dtype=torch.bool)
    empty[0, 0] = True
    bss.apply_masks(bss.find_targets(model), {"0": empty, "1": full})
    timings = {}
    bss.convert(model, {"0": empty, "1": full}, example=torch.randn(256, 512), timings=timings)
    assert isinstance(model[0], bst.BlockSparseLinear)
    assert timings["0"].speedup > max(1.0, timings["1"].speedup)
    assert (timings["0"].shape, timings["1"].shape) == ((256, 512), (256, 512))
    assert all(0 < time.after_s < 1 for time in timings.values())


def test_autocast_around_the_model_is_around_the_timing():
    model, seen = nn.Sequential(nn.Linear(32, 32)), {}

    def forward(net, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return net(batch)

    seen = timing.watch({"0": model[0]}, model, torch.randn(4, 32), forward)
    assert seen == {"0": Seen((4, 32), torch.float32, torch.bfloat16)}
    mask = torch.eye(2, dtype=torch.bool)
    bss.convert(model, {"0": mask}, block_size=16, example=torch.randn(4, 32), forward=forward)


def test_sparse_layers_keep_the_blocks_of_the_mask():
    layout = bst.select_blocks(torch.randn(40, 56), 0.6, 8)
    linear = bst.BlockSparseLinear(56, 40, layout, gates=True, activation="silu")
    turned = bst.BlockSparseLinear(40, 56, layout.t())
    conv = bst.BlockSparseConv2d(56, 40, 3, layout, padding=1, channel_order=torch.randperm(56))
    for layer, x in (
        (linear, torch.randn(5, 56)),
        (turned, torch.randn(5, 40)),
        (conv, torch.randn(2, 56, 4, 4)),
    ):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
        masks = bss.sparsify_(layer, "magnitude", sparsity=0.75)
        expected, had = layer(x), layer.weight.numel()
        made = bss.convert(layer, masks, min_speedup=0)
        assert made is not layer
        assert type(made) is type(layer)
        assert made.weight.numel() < had
        assert made.layout.mask().tolist() == masks["weight"].tolist()
        assert_close(made(x), expected)
        assert_close(copy.deepcopy(made).double()(x.double()).float(), expected)


def test_what_has_no_block_sparse_form_is_left_and_named():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "own": Own(32, 32),
            "attention": nn.MultiheadAttention(32, 2),
            "reflect": nn.Conv1d(32, 32, 3, padding=1, padding_mode="reflect"),
            "rnn": nn.LSTM(32, 32, bidirectional=True),
            "plain": nn.Linear(32, 32),
        }
    )
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    with pytest.warns(
        UserWarning, match=r"left as they are, with zeros: own .*, attention.out_proj .*, reflect .*, rnn "
    ):
        bss.convert(model, masks, block_size=16, min_speedup=0)
    assert [name for name, module in model.named_modules() if hasattr(module, "layout")] == ["plain"]


def test_a_transformer_layer_takes_no_shortcut_past_its_sparse_layers():
    model = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True).eval()
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16, targets="linear")
    x = torch.randn(2, 5, 32)
    expected = model(x)
    bss.convert(model, masks, block_size=16, min_speedup=0)
    with torch.inference_mode():
        assert_close(model(x), expected)


def test_a_transformer_makes_no_nested_tensors_of_padded_inputs():
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2)}).eval()
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16, targets="linear")
    x, padded = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = model["encoder"](x, src_key_padding_mask=padded)
    bss.convert(model, masks, block_size=16, min_speedup=0)
    with torch.inference_mode():
        got = model["encoder"](x, src_key_padding_mask=padded)
    assert_close(got[~padded], expected[~padded])


def test_a_forward_of_its_own_is_not_lost():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(3, 32)
    plain = model[0].forward
    model[0].forward = lambda x: 3 * plain(x)
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"left as they are, with zeros: 0 \(it has a forward of its own"):
        bss.convert(model, masks, block_size=16, min_speedup=0)
    assert_close(model(x), expected)
    with pytest.raises(ValueError, match="0 has a forward of its own"):
        bst.replace_linears(model, density=0.5, block_size=16)


def test_the_forward_of_its_class_written_back_is_none_of_its_own():
    model, x = (
        nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))}),
        torch.randn(3, 32),
    )
    for module in model.modules():  # as accelerate's remove_hook_from_module leaves it
        module.forward = module.forward
    assert list(bst.find_mlps(model)) == ["mlp"]
    model = copy.deepcopy(model)
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    expected = model["mlp"](x)
    bss.convert(model, masks, block_size=16, min_speedup=0)
    assert {type(layer) for layer in model["mlp"]} == {bst.BlockSparseLinear, nn.GELU}
    assert_close(model["mlp"](x), expected)


@pytest.mark.parametrize("verb", [bss.convert, bss.compact_])
def test_hooks_are_not_lost(verb):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(3, 32)
    model[0].register_forward_hook(lambda layer, inputs, y: 3 * y)
    model[1].register_state_dict_post_hook(lambda *_: None)
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    expected = model(x)
    options = {"min_speedup": 0} if verb is bss.convert else {}
    with pytest.warns(UserWarning, match=r"with zeros: 0 \(it has hooks, which would be lost\), 1 \(it has hooks"):
        verb(model, masks, block_size=16, **options)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, bst.BlockSparseLinear]
    assert_close(model(x), expected)


def test_wrong_calls_change_nothing():
    model, masks = pruned()
    before = copy.deepcopy(model.state_dict())
    other = {**masks, "mlp.0": masks["mlp.0"][:, :1]}
    for call, text in (
        (lambda: bss.convert(model, {**masks, "nothing": masks["conv"]}, block_size=16), "no weight for nothing"),
        (lambda: bss.convert(model, other, block_size=16), r"mlp.0 is \[5, 1\] \(hash \w+\), needs \[5, 2\] \(hash"),
        (lambda: bss.convert(model, masks, block_size=8), r"that of conv is \[2, 1\] .*needs \[4, 2\]"),
        (lambda: bss.convert(model, masks, block_size=16, min_speedup=-1), "min_speedup is -1"),
        (lambda: bss.convert(model, masks, block_size=16, min_speedup=float("nan")), "min_speedup is nan"),
        (lambda: bss.convert(model, masks, block_size=16, tokens=0), "tokens is 0, needs 1 or more"),
        (lambda: bss.convert(model, {"nothing": masks["conv"]}), "of another model: there is no weight for nothing"),
        (lambda: bss.convert(torch.compile(model), masks), "a OptimizedModule: give what it wraps, its ._orig_mod"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert bss.convert(model, {}) is model


def test_a_device_without_kernels(monkeypatch):
    def forward(self, x):
        raise NotImplementedError("no kernel")

    model, masks = pruned()
    monkeypatch.setattr(bst.BlockSparseConv1d, "forward", forward)
    for least in (0, 1.0):
        with pytest.raises(ValueError, match="conv is on cpu, where its block-sparse form does not run: no kernel"):
            bss.convert(model, masks, block_size=16, min_speedup=least)
        assert not any(hasattr(module, "layout") for module in model.modules())


def test_a_model_without_values():
    model, masks = pruned()
    model = model.to("meta")
    with (
        pytest.warns(UserWarning, match="conv .on meta, has no values"),
        pytest.raises(ValueError, match="no weight is left to make sparse"),
    ):
        bss.convert(model, masks, block_size=16)
    assert not any(hasattr(module, "layout") for module in model.modules())


def test_a_report_says_which_layers_do_not_run(monkeypatch):
    def forward(self, x):
        raise NotImplementedError("no kernel")

    model = nn.Sequential(nn.Linear(32, 32), nn.Conv1d(32, 32, 3))
    pruner = bss.MagnitudePruner(bss.Constant(0.5), block_size=16)
    pruner.prepare(model)
    monkeypatch.setattr(bst.BlockSparseConv1d, "forward", forward)
    with pytest.warns(UserWarning, match=r"\[report\] not timed: 1 \(NotImplementedError: no kernel\)"):
        rows = pruner.report().rows
    assert rows[0].expected_s > 0
    assert rows[1].expected_s is None


class Llama(nn.Module):
    """A feed-forward part as Llama has it, in a layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down_proj, self.act_fn = nn.Linear(64, 32, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Halves(nn.Module):
    """As BERT has it: two modules, of which the second does the rest of the layer, too."""

    def __init__(self):
        super().__init__()
        self.intermediate, self.output = First(), Second()

    def forward(self, x):
        return self.output(self.intermediate(x), x)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(32, 64), nn.GELU()

    def forward(self, x):
        return self.intermediate_act_fn(self.dense(x))


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, y, x):
        return self.norm(self.dense(y) + x)


@pytest.mark.parametrize("kind", [Llama, Halves])
def test_an_mlp_becomes_one_module_where_that_is_faster(monkeypatch, tmp_path, kind):
    def build():
        return nn.Sequential(kind(), kind())

    x = torch.randn(3, 5, 32)
    for faster in (True, False):
        fake_times(monkeypatch, lambda layer, faster=faster: faster or not isinstance(layer, bst.BlockSparseMLP))
        model = build().train()
        masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
        expected, timings = model(x), {}
        bss.convert(model, masks, block_size=16, example=x, timings=timings)
        assert_close(model(x), expected)
        assert sum(isinstance(m, bst.BlockSparseMLP) for m in model.modules()) == (2 if faster else 0)
        assert not any(type(m) is nn.Linear for m in model.modules())
        whole = {"0.mlp", "1.mlp"} if kind is Llama else {"0", "1"}
        assert (timings.keys() & whole == whole) == faster
        assert all(time.converted for time in timings.values())  # by themselves, or as a part of the whole
        assert len(timings) == len(masks) + (2 if faster else 0)
        assert all(module.training for module in model.modules())
        bst.save_pretrained(model, tmp_path / "x.safetensors")
        loaded = bst.load_pretrained(build, tmp_path / "x.safetensors")
        assert torch.equal(loaded(x), model.eval()(x))
        with pytest.raises(ValueError, match="of another network"):
            bst.load_pretrained(lambda: nn.Sequential(kind()), tmp_path / "x.safetensors")
        if faster and kind is Llama:
            narrow = build()
            narrow[0].mlp.up_proj = nn.Linear(32, 48)
            with pytest.raises(ValueError, match=r"up_proj.weight is \[48, 32\], needs 32 x "):
                bst.load_pretrained(lambda narrow=narrow: narrow, tmp_path / "x.safetensors")


def test_parametrized_layers_are_no_targets():
    model = nn.Sequential(parametrizations.weight_norm(bst.from_dense(nn.Linear(32, 32), density=0.5, block_size=8)))
    with pytest.warns(UserWarning, match="left alone"), pytest.raises(ValueError, match="no weight is left"):
        bss.find_targets(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_converted_on_a_card():
    model, masks = pruned(model=Net().cuda().eval())
    expected, timings = model(X.cuda()), {}
    bss.convert(model, masks, block_size=16, example=X, timings=timings, min_speedup=1e-9)
    assert all(time.converted and time.after_s > 0 for time in timings.values())
    torch.testing.assert_close(model(X.cuda()), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "frozen", [{"weight_ih_l0", "bias_ih_l0", "bias_hh_l0"}, {"weight_hh_l0"}, {"bias_ih_l0"}, {"weight_hh_l1"}]
)
def test_of_an_lstm_what_was_frozen_stays_so(frozen):
    model = nn.Sequential(nn.LSTM(32, 32, num_layers=2))
    for name in frozen:
        getattr(model[0], name).requires_grad_(False)
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    lstm = bss.convert(model, masks, block_size=16, min_speedup=0)[0]
    for i in range(2):
        assert lstm.input[i].weight.requires_grad == (f"weight_ih_l{i}" not in frozen)
        assert lstm.recurrent[i].weight.requires_grad == (f"weight_hh_l{i}" not in frozen)
        assert lstm.input[i].bias.requires_grad != ({f"bias_ih_l{i}", f"bias_hh_l{i}"} <= frozen)


def test_what_layers_were_fed_is_of_layers_that_are_there():
    model = nn.Sequential(nn.Linear(32, 32))
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    seen = {"1": Seen((4, 32), torch.float32)}
    with pytest.raises(ValueError, match="seen names 1, which the model has not"):
        bss.convert(model, masks, block_size=16, seen=seen)
