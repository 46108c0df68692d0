"""Feed-forward parts that are shared, and that drop features in training."""

import pytest
import torch
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss


class Shared(nn.Module):
    """A feed-forward part, and perhaps a layer of it somewhere else."""

    def __init__(self, dropped=None, functional=False):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        self.dropped, self.functional = dropped, functional
        self.drop = nn.Identity() if functional or dropped is None else nn.Dropout(0.25)

    def forward(self, x):
        def drop(y, where):
            if self.dropped != where:
                return y
            return nn.functional.dropout(y, 0.25, self.training) if self.functional else self.drop(y)

        return drop(self.fc2(drop(self.act(self.fc1(drop(x, "in"))), "hidden")), "out")


def test_a_part_at_several_places_stays_one():
    part = Shared()
    model = nn.Sequential(part, nn.Sequential(part), part)
    (made,) = bst.replace_mlps(model, density=0.5, block_size=16).values()
    assert model[0] is model[1][0] is model[2] is made
    model = nn.Sequential(part, nn.Sequential(part))
    masks = bss.sparsify_(model, "magnitude", sparsity=0.5, block_size=16)
    x = torch.randn(4, 64)
    want = model(x)
    model = bss.convert(model, masks, block_size=16, min_speedup=1e-9)
    assert model[0] is model[1][0]
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


def test_a_part_whose_layer_is_used_elsewhere_is_left_out():
    model = nn.Sequential(Shared(), Shared())
    model[1].add_module("again", model[0].fc1)
    assert list(bst.find_mlps(model)) == ["1"]


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("where", [None, "hidden", "out", "in"])
def test_features_are_dropped_where_they_were(where, functional):
    torch.manual_seed(0)
    dense = Shared(where, functional).train()
    state = torch.get_rng_state()
    parts = bst.mlp_parts(dense)
    assert torch.equal(torch.get_rng_state(), state)
    assert dense.training
    if where == "in":
        assert parts is None
        return
    assert (parts.hidden_dropout, parts.dropout) == {None: (0, 0), "hidden": (0.25, 0), "out": (0, 0.25)}[where]
    sparse = bst.BlockSparseMLP.from_dense(parts, density=1.0, block_size=16)
    y, hidden = [], []
    sparse.down.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    for _ in range(20):
        y.append(sparse(torch.randn(8, 64)))
    for values, place in ((torch.stack(hidden), "hidden"), (torch.stack(y), "out")):
        zeros = float((values == 0).float().mean())
        assert abs(zeros - 0.25) < 0.02 if place == where else zeros == 0


def test_dropouts_are_saved(tmp_path):
    part = bst.BlockSparseMLP.from_dense(Shared("hidden"), density=0.5, block_size=16)
    bst.save_pretrained(nn.Sequential(part), tmp_path / "part.safetensors")
    again = bst.load_pretrained(lambda: nn.Sequential(Shared("hidden")), tmp_path / "part.safetensors")
    assert again[0].hidden_dropout.p == 0.25


def test_dropout_between_layers_in_a_sequence():
    torch.manual_seed(0)
    parts = bst.mlp_parts(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 64), nn.Dropout(0.1))
    )
    assert (parts.hidden_dropout, parts.dropout) == (0.5, 0.1)
    assert bst.mlp_parts(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))) is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"masks": [1, 2]}, TypeError, "masks is .*, needs a dict of tensors"),
        ({"layouts": 1}, TypeError, "layouts is 1, needs two layouts"),
    ],
)
def test_what_from_dense_takes(given, error, message):
    with pytest.raises(error, match=message):
        bst.BlockSparseMLP.from_dense(Shared(), **given)


def test_weights_that_are_missing():
    with pytest.raises(ValueError, match="weights has no up, down"):
        bst.BlockSparseMLP.from_dense(Shared(), density=0.5).set_weights({})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.9, 1.0])
def test_dropouts_of_any_kind_are_seen(dtype, p):
    """Also where nothing comes out of W_down, in place, and behind what has run compiled."""
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48), nn.Dropout(p, inplace=True)).to(dtype)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    model.compile(backend="eager")
    model(torch.randn(1, 3, 48, dtype=dtype))
    assert (bst.mlp_parts(model).hidden_dropout, bst.mlp_parts(model).dropout) == (0, p)


@pytest.mark.parametrize("place", [0, 1])
def test_what_else_is_dropped_makes_a_part_unknown(place):
    layers = [nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)]
    assert bst.mlp_parts(nn.Sequential(*layers)) is not None
    layers.insert(place, nn.Dropout(0.1))
    assert bst.mlp_parts(nn.Sequential(*layers)) is None
    assert bst.mlp_parts(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.Dropout1d(0.1))) is None


def test_looking_at_a_part_changes_nothing():
    class Counting(Shared):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.calls += 1
            return super().forward(x)

    model = nn.Sequential(Counting(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not bst.find_mlps(model)  # another part would not count
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_parts_on_meta():
    with torch.device("meta"):
        part = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 48))
        more = Shared()
        more.add_module("attention", nn.Linear(64, 64))
    assert (bst.mlp_parts(part).hidden_dropout, bst.mlp_parts(part).dropout) == (0.3, 0)
    assert bst.mlp_parts(more) is None


def test_a_compiled_part_is_replaced_whole():
    model = nn.Sequential(torch.compile(Shared(), backend="eager"))
    assert list(bst.replace_mlps(model, density=1.0, block_size=16)) == ["0"]
    assert isinstance(model[0], bst.BlockSparseMLP)


def test_a_half_that_two_layers_share_leaves_both_out():
    class Half(nn.Module):
        def __init__(self, inputs, outputs, act):
            super().__init__()
            self.dense = nn.Linear(inputs, outputs)
            if act:
                self.intermediate_act_fn = nn.GELU()

        def forward(self, x):
            y = self.dense(x)
            return self.intermediate_act_fn(y) if hasattr(self, "intermediate_act_fn") else y

    class Whole(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.intermediate, self.output = Half(64, 128, True), output

        def forward(self, x):
            return self.output(self.intermediate(x)) + x

    output = Half(128, 64, False)
    assert bst.find_mlps(nn.Sequential(Whole(output), Whole(output))) == {}
    assert list(bst.find_mlps(nn.Sequential(Whole(output), Whole(Half(128, 64, False))))) == ["0", "1"]


class Clamped(nn.Module):
    """As gpt-oss has it: no gate and no value beyond 7."""

    def __init__(self, most):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.act_fn, self.most = nn.SiLU(), most

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate.clamp(max=self.most)) * up.clamp(-self.most, self.most))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_that_clamps_large_values_is_unknown(dtype):
    assert bst.mlp_parts(Clamped(1e9).to(dtype)) is not None
    assert bst.mlp_parts(Clamped(7.0).to(dtype)) is None


class InTraining(Shared):
    """Does something else in training, by itself or by a child."""

    def __init__(self, deep):
        super().__init__()
        self.path = DropPath() if deep else nn.Identity()
        self.deep = deep

    def forward(self, x):
        hidden = self.act(self.fc1(x))
        if not self.deep and self.training:
            hidden = nn.functional.dropout(hidden, 0.5, True)
        return self.path(self.fc2(hidden))


class DropPath(nn.Module):
    def forward(self, x):
        return x * (torch.rand(x.shape[0], 1) < 0.5) * 2 if self.training else x


def test_what_is_done_in_training_alone():
    assert bst.mlp_parts(InTraining(False)).hidden_dropout == 0.5
    assert bst.mlp_parts(InTraining(True)) is None


class Beside(Shared):
    """Has a dropout, and does something else in training."""

    def __init__(self, does):
        super().__init__("hidden")
        self.does = does
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        y = super().forward(x)
        return self.does(y) if self.training else y


BESIDE = {
    "rand": lambda y: y * (torch.rand(()) < 0.999),
    "bernoulli_": lambda y: y * torch.empty(1, 1, 1).bernoulli_(0.999),
    "bernoulli": lambda y: y * torch.bernoulli(torch.full((1,), 0.999)),
    "noise": lambda y: y + 0 * torch.randn_like(y),
    "C++": lambda y: torch.dropout(y, 0.001, True),
    "Dropout1d": lambda y: nn.functional.dropout1d(y, 0.001, True),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("does", BESIDE)
def test_random_numbers_beside_a_dropout_make_a_part_unknown(does, device):
    """Whatever they are: here nearly nothing is dropped."""
    with torch.device(device):
        part = Beside(BESIDE[does])
        assert bst.mlp_parts(part) is None
        part.does = lambda y: y
        assert bst.mlp_parts(part).hidden_dropout == 0.25
    if device == "cpu":
        assert part.calls == 0
        part.does = lambda y: 0.5 * y
        assert bst.mlp_parts(part) is None


def test_dropout_that_training_does_not_end_makes_a_part_unknown():
    class Always(Shared):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    assert bst.mlp_parts(Always()) is None


HOOKS = {
    "forward": lambda layer: layer.register_forward_hook(lambda *_: None),
    "before": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "before backward": lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
    "saving": lambda layer: layer.register_state_dict_post_hook(lambda *_: None),
    "before saving": lambda layer: layer.register_state_dict_pre_hook(lambda *_: None),
    "loading": lambda layer: layer.register_load_state_dict_post_hook(lambda *_: None),
    "before loading": lambda layer: layer.register_load_state_dict_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", ["", "act", "fc2"])
def test_a_part_with_hooks_is_unknown(hook, place):
    part = Shared()
    handle = HOOKS[hook](part.get_submodule(place))
    assert bst.mlp_parts(part) is None
    handle.remove()
    assert bst.mlp_parts(part) is not None
