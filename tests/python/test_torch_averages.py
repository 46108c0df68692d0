"""State dicts whose entries are averaged, one by one, as all kinds of programs do: layouts and orders are as before."""

import copy
import itertools

import pytest
import torch
from conftest import make_channels, make_layout
from torch import nn
from torch.optim import swa_utils

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.modules.digits import digits_of, to_integers

ORDER = torch.randperm(30, generator=torch.Generator().manual_seed(1))


def ordered_conv():
    return bst.BlockSparseConv2d(30, 21, 3, make_channels(), channel_order=ORDER, gates=True)


def wide_conv():
    layout = Layout.from_graph("random(3,40,0.1)", 8, seed=1, in_features=317)
    order = torch.randperm(317, generator=torch.Generator().manual_seed(2))
    return bst.BlockSparseConvTranspose1d(317, 24, 300, layout, channel_order=order)


def deep_update():
    return bst.DeepUpdateLSTM.from_graph(6, 320, "ba(40,3)", 8, 2, ports=PORTS)


PORTS = torch.tensor([1, 5, 257, 300, 319], device="cpu")
MODULES = {
    "linear": (lambda: bst.BlockSparseLinear(90, 60, make_layout(), gates=True), (4, 90)),
    "view": (lambda: bst.BlockSparseLinear(60, 90, make_layout().t()), (4, 60)),
    "conv": (ordered_conv, (2, 30, 5, 4)),
    "wide conv": (wide_conv, (2, 317, 4)),
    "weight norm": (lambda: bst.weight_norm(bst.BlockSparseConv1d(30, 21, 3, make_channels())), (2, 30, 5)),
    "lstm": (lambda: bst.BlockSparseLSTM(6, 32, Layout.from_graph("dense(2)", 16), 2), (3, 2, 6)),
    "deep_update": (deep_update, (3, 2, 6)),
}


def shaken(module):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def run(module, shape):
    torch.manual_seed(7)
    x = torch.randn(shape)
    with torch.no_grad():
        y = module(x)
    return y[0] if isinstance(y, tuple) else y


# ---- What programs do ------------------------------------------------------------------------------------------------


def by_averaged_model(models, **options):
    averaged = swa_utils.AveragedModel(models[0], use_buffers=True, **options)
    for model in models:
        averaged.update_parameters(model)
    return averaged.module.state_dict(), averaged.module


def ema_multi(models):
    return by_averaged_model(models, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))


def ema_one_by_one(models):
    return by_averaged_model(models, avg_fn=swa_utils.get_ema_avg_fn(0.9))


def hand_written(update):
    """Over state_dict().values() of a copy."""

    def average(models):
        averaged = copy.deepcopy(models[0])
        with torch.no_grad():
            for model in models * 5:
                for mine, new in zip(averaged.state_dict().values(), model.state_dict().values(), strict=True):
                    update(mine, new)
        return averaged.state_dict(), averaged

    return average


def dictionary(models):
    state = {k: v.clone() for k, v in models[0].state_dict().items()}
    for model in models * 100:
        state = {k: 0.99 * state[k] + (1 - 0.99) * v for k, v in model.state_dict().items()}
    return state, None


def soup(models):
    states = [model.state_dict() for model in models]
    return {k: torch.stack([s[k] for s in states]).float().mean(0) for k in states[0]}, None


def buffers(models):
    averaged = copy.deepcopy(models[0])
    with torch.no_grad():
        for model in models:
            pairs = itertools.chain(
                *(zip(getattr(averaged, n)(), getattr(model, n)(), strict=True) for n in ("parameters", "buffers"))
            )
            for mine, new in pairs:
                mine.copy_(0.9 * mine + 0.1 * new)
    return averaged.state_dict(), averaged


WAYS = {
    "swa": by_averaged_model,
    "ema, many at once": ema_multi,
    "ema, one by one": ema_one_by_one,
    "copy_": hand_written(lambda mine, new: mine.copy_(0.9 * mine + (1 - 0.9) * new)),
    "mul_, add_": hand_written(lambda mine, new: mine.mul_(0.9).add_(new, alpha=1 - 0.9)),
    "lerp_": hand_written(lambda mine, new: mine.lerp_(new.to(mine.dtype), 1 - 0.9)),
    "a dictionary": dictionary,
    "a mean": soup,
    "parameters and buffers": buffers,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", MODULES)
def test_layouts_survive_averages(which, way, tmp_path):
    make, shape = MODULES[which]
    models = [shaken(make()) for _ in range(3)]
    state, averaged = WAYS[way](models)
    torch.save(state, tmp_path / "state.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    means = {k: v.detach() for k, v in again.named_parameters()}
    expected = run(again, shape)
    assert torch.equal(run(again, shape), expected)
    if averaged is not None:
        assert torch.equal(run(averaged, shape), expected)
    # What is not a parameter is as in a module that was never averaged.
    fresh = make()
    with torch.no_grad():
        for name, p in fresh.named_parameters():
            p.copy_(means[name])
    assert torch.equal(run(fresh, shape), expected)
    for k, v in fresh.state_dict().items():
        assert torch.equal(v, again.state_dict()[k]), k


def test_many_averages_of_equal_state_dicts():
    layout = make_layout()
    model = bst.BlockSparseLinear(90, 60, layout)
    pattern = model.state_dict()["pattern"]
    for decay in (0.5, 0.99, 0.9999):
        mine = pattern.clone()
        for _ in range(20_000):
            mine = decay * mine + (1 - decay) * pattern
        assert Layout.from_pattern(mine.numpy()) == layout
        model.load_state_dict({**model.state_dict(), "pattern": mine})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", MODULES)
def test_state_dicts_cast_as_a_whole(which, dtype):
    """Files for inference often hold all floating point in a narrower type."""
    make, shape = MODULES[which]
    model = shaken(make())
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    again = make()
    again.load_state_dict(state)
    rounded = {k: v.to(dtype).float() for k, v in model.named_parameters()}
    assert torch.equal(run(again, shape), run_with(make(), rounded, shape))


def run_with(module, parameters, shape):
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(parameters[name])
    return run(module, shape)


def test_averages_in_few_bits_drift_by_half_a_digit(layout):
    layer = bst.BlockSparseLinear(90, 60, layout)
    saved = layer.state_dict()
    for shift, loads in ((0.6, True), (-0.6, True), (1.0, False)):
        digits = saved["pattern"].clone()
        digits[3::7] += shift
        averaged = {**saved, "pattern": digits}
        if loads:
            layer.load_state_dict(averaged)
            assert torch.equal(layer.state_dict()["pattern"], saved["pattern"])
        else:
            with pytest.raises(RuntimeError, match="pattern"):
                layer.load_state_dict(averaged)


def test_averages_of_different_layouts_are_refused(layout):
    other = Layout.from_graph("random(4,6,0.4)", 16, seed=4, out_features=60, in_features=90)
    assert other.blocks == layout.blocks
    a, b = (bst.BlockSparseLinear(90, 60, one).state_dict() for one in (layout, other))
    model = bst.BlockSparseLinear(90, 60, layout)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"pattern: .*damaged"):
        model.load_state_dict({k: 0.5 * a[k] + 0.5 * b[k] for k in a})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# ---- Files of before -------------------------------------------------------------------------------------------------


def as_of_version_01(module):
    """Its state dict as version 0.1 wrote it: integers."""
    state = dict(module.state_dict())
    for prefix, part in module.named_modules():
        prefix = prefix + "." if prefix else ""
        if isinstance(part, bst.BlockSparseLinear | bst.modules.conv.BlockSparseConv):
            state[prefix + "pattern"] = torch.from_numpy(part.layout.pattern())
        if isinstance(part, bst.modules.conv.BlockSparseConv):
            state[prefix + "kernel"] = torch.tensor([int(part.transposed), *part.kernel_size], dtype=torch.int32)
            if part.channel_order is not None:
                del state[prefix + "order"]
                state[prefix + "channel_order"] = part.channel_order.to(torch.int32)
        if isinstance(part, bst.DeepUpdateLSTM):
            state[prefix + "ports"] = part.port_units.long()
    return state


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("which", MODULES)
def test_files_of_before(which, assign):
    make, shape = MODULES[which]
    model = shaken(make())
    state = as_of_version_01(model)
    keys = sorted(state)
    again = make()
    assert again.load_state_dict(state, assign=assign) == ([], [])
    assert sorted(state) == keys, "what is given is not changed"
    assert torch.equal(run(again, shape), run(model, shape))
    for k, v in model.state_dict().items():
        assert torch.equal(v, again.state_dict()[k]), k
        assert v.dtype == again.state_dict()[k].dtype, k


@pytest.mark.parametrize("which", MODULES)
@pytest.mark.parametrize("old", [False, True])
def test_strict_loading(which, old):
    make, _ = MODULES[which]
    model = make()
    state = as_of_version_01(model) if old else dict(model.state_dict())
    for key in state:
        rest = {k: v for k, v in state.items() if k != key}
        now = "order" if key == "channel_order" else key
        with pytest.raises(RuntimeError, match=rf"Missing key\(s\) in state_dict: \"{now}\""):
            make().load_state_dict(rest)
        assert make().load_state_dict(rest, strict=False) == ([now], [])
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"more\""):
        make().load_state_dict({**state, "more": torch.zeros(1)})
    plain = bst.BlockSparseConv2d(30, 21, 3, make_channels(), gates=True)
    ordered = ordered_conv()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"(channel_)?order\""):
        plain.load_state_dict(as_of_version_01(ordered) if old else ordered.state_dict())


def test_the_order_of_the_state_dict_counts():
    x = torch.randn(2, 30, 5, 4)
    for state in (ordered_conv().state_dict(), as_of_version_01(ordered_conv())):
        other = bst.BlockSparseConv2d(30, 21, 3, make_channels(), channel_order=range(30), gates=True)
        assert other.channel_order.tolist() == list(range(30))
        other(x)
        other.load_state_dict(state)
        assert other.channel_order.tolist() == ORDER.tolist()
        twin = ordered_conv()
        twin.load_state_dict(state)
        assert torch.equal(other(x), twin(x))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_other_ports_are_refused(tmp_path, old, inside):
    """Whose weights would be read at other units; also where a file holds nothing but tensors."""
    from safetensors.torch import load_file, save_file

    def wrapped(module):
        return torch.nn.ModuleDict({"lstm": module}) if inside else module

    def make(ports):
        return wrapped(bst.DeepUpdateLSTM.from_graph(6, 320, "ba(40,3)", 8, 2, ports=ports))

    path, saved = tmp_path / "file", wrapped(shaken(deep_update()))
    save_file(as_of_version_01(saved) if old else saved.state_dict(), path)
    for ports, message in (
        ([0, 1, 2, 3, 4], r"ports\[0\] is unit 1, this module has 0 there"),
        ([1, 5, 257, 300, 318], r"ports\[4\] is unit 319, this module has 318 there"),
    ):
        other = make(torch.tensor(ports))
        before = copy.deepcopy(other.state_dict())
        prefix = "lstm." if inside else ""
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=rf"{prefix}input was saved with other ports: {message}"):
                other.load_state_dict(load_file(path), strict=strict)
        parts = {k: v for k, v in other.state_dict().items() if k.startswith(prefix) and "." not in k[len(prefix) :]}
        assert len(parts) == 5
        assert all(torch.equal(v, before[k]) for k, v in parts.items())
    with pytest.raises(RuntimeError, match=r"ports: \[5\], needs 160, rising"):
        make(2).load_state_dict(load_file(path))
    same = make(PORTS)
    assert same.load_state_dict(load_file(path)) == ([], [])
    with torch.device("meta"):
        empty = make(PORTS)
    assert empty.load_state_dict(load_file(path), assign=True) == ([], [])
    one, other = (module["lstm"] if inside else module for module in (saved, same))
    assert torch.equal(run(one, (3, 2, 6)), run(other, (3, 2, 6)))
    assert torch.equal((empty["lstm"] if inside else empty).port_units, PORTS)


def test_integers_at_the_edges_of_bytes():
    for most in (1, 255, 256, 65535, 65536, 1 << 31):
        integers = torch.tensor([0, most // 2, most - 1, most])
        assert torch.equal(to_integers(digits_of(integers, most)), integers)


def test_wrong_ports_are_refused():
    module = deep_update()
    before = copy.deepcopy(module.state_dict())
    for ports in ([1, 5, 5, 300, 319], [1, 5, 257, 300, 320], [-1, 5, 257, 300, 319]):
        with pytest.raises(RuntimeError, match=r"ports: .*rising, and within 0 to 319"):
            module.load_state_dict({**before, "ports": torch.tensor(ports)})
    with pytest.raises(RuntimeError, match="ports"):
        module.load_state_dict({**before, "ports": torch.tensor([1, 2])})
    with pytest.raises(RuntimeError, match=r"ports: .*no whole numbers"):
        module.load_state_dict({**before, "ports": before["ports"] + 0.5})
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


# ---- A buffer that changes under the module --------------------------------------------------------------------------


def test_orders_follow_what_is_written_into_their_buffer():
    """As DistributedDataParallel does, whose first process tells the others."""
    one, other = ordered_conv(), bst.BlockSparseConv2d(30, 21, 3, make_channels(), channel_order=range(30), gates=True)
    x = torch.randn(2, 30, 5, 4)
    other(x)
    with torch.no_grad():
        for mine, theirs in zip(other.state_dict().values(), one.state_dict().values(), strict=True):
            mine.copy_(theirs)
    assert torch.equal(other(x), one(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_orders_and_ports_stay_when_modules_are_cast(dtype):
    for make in (ordered_conv, wide_conv, deep_update):
        module = make()
        before = {k: v for k, v in module.state_dict().items() if k in ("order", "ports", "pattern", "kernel")}
        module.to(dtype)
        assert all(torch.equal(module.state_dict()[k].float(), v) for k, v in before.items())
        make().load_state_dict(module.state_dict())


def test_a_compiled_layer_follows_its_order():
    layer, x = ordered_conv(), torch.randn(2, 30, 5, 4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    state = ordered_conv().state_dict()
    state["order"] = bst.BlockSparseConv2d(30, 21, 3, make_channels(), channel_order=range(30)).state_dict()["order"]
    layer.load_state_dict(state)
    assert torch.equal(compiled(x), layer(x))


def test_batches_of_networks_share_a_call():
    models = [ordered_conv() for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 30, 5, 4)

    def call(parameters, buffers, x):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    y = torch.func.vmap(call, in_dims=(0, None, None))(parameters, {k: v[0] for k, v in buffers.items()}, x)
    for got, model in zip(y, models, strict=True):
        torch.testing.assert_close(got, model(x))
    assert torch.equal(nn.Sequential(models[0])(x), models[0](x))
