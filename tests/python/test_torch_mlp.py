"""Feed-forward parts: the dense ones that they were made of, with the same blocks left."""

import copy
import io

import pytest
import torch
from test_torch import error
from test_torch_glu import ACTIVATIONS, DOUBLE, SIZES, layout_of
from torch import nn

import blocksparse.torch as bst


def make(in_=48, hidden=64, b=16, density=0.6, **options):
    layouts = layout_of(hidden, in_, b, density), layout_of(in_, hidden, b, density, seed=1)
    return bst.BlockSparseMLP(in_, hidden, *layouts, **options)


class Gated(nn.Module):
    """As in Llama."""

    def __init__(self, in_=48, hidden=64, bias=False, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(in_, hidden, bias), nn.Linear(in_, hidden, bias)
        self.down_proj = nn.Linear(hidden, in_, bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


# ---- The module ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("in_", "hidden", "b"), SIZES[:5])
def test_the_module_is_the_dense_one(in_, hidden, b, activation, gated):
    mlp = make(in_, hidden, b, gated=gated, activation=activation, bias=True, dtype=DOUBLE)
    weights = {name: w.requires_grad_() for name, w in mlp.weights().items()}
    assert set(weights) == {name + end for name in ["gate", "up", "down"][not gated :] for end in ("", "_bias")}
    x, dy = torch.randn(2, 5, in_, dtype=DOUBLE), torch.randn(2, 5, in_, dtype=DOUBLE)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, want = mlp(mine), bst.dense_mlp(theirs, weights, activation)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), want, rtol=1e-11, atol=1e-11)
    y.backward(dy)
    want.backward(dy)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-11)
    assert mine.grad.abs().max() > 0
    down = bst.from_dense(weights["down"].grad, mlp.down.layout)
    torch.testing.assert_close(mlp.down.weight.grad, down, rtol=1e-11, atol=1e-11)
    up = weights["up"].grad
    if gated:
        up = bst.interleave_rows(weights["gate"].grad, up)
        bias = bst.interleave_rows(weights["gate_bias"].grad, weights["up_bias"].grad)
        torch.testing.assert_close(mlp.up.bias.grad, bias, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(mlp.up.weight.grad, bst.from_dense(up, mlp.up.layout), rtol=1e-11, atol=1e-11)
    assert up.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
def test_narrow_types(dtype, gated):
    mlp = make(64, 128, 32, gated=gated, dtype=dtype)
    x = torch.randn(33, 64).to(dtype)
    exact = bst.dense_mlp(x.double(), {k: w.double() for k, w in mlp.weights().items()}, "silu")
    rounded = bst.dense_mlp(x, mlp.weights(), "silu")
    bound = max(2 * error(rounded, exact), 1e-6)
    with torch.no_grad():
        assert error(mlp(x), exact) <= bound
    y = mlp(x)
    assert y.dtype == dtype
    assert error(y, exact) <= bound
    y.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in mlp.parameters())


def test_autocast_keeps_wide_gradients():
    mlp = make(bias=True)
    x = torch.randn(9, 48)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x)
        with torch.no_grad():
            assert mlp(x).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert {p.grad.dtype for p in mlp.parameters()} == {torch.float32}
    assert error(y, mlp(x)) < 2e-2


@pytest.mark.parametrize("gated", [True, False])
def test_state_dicts_keep_values_and_patterns(gated):
    mlp = make(gated=gated, bias=True, gates=True)
    file = io.BytesIO()
    torch.save(mlp.state_dict(), file)
    file.seek(0)
    twin = make(gated=gated, bias=True, gates=True)
    twin.load_state_dict(torch.load(file))
    x = torch.randn(4, 48)
    assert torch.equal(twin(x), mlp(x))
    assert set(mlp.state_dict()) == {
        f"{part}.{name}" for part in ("up", "down") for name in ("weight", "bias", "gates", "pattern")
    }
    other = make(density=0.3, gated=gated, bias=True, gates=True)
    with pytest.raises(RuntimeError, match="was saved with Layout"):
        other.load_state_dict(mlp.state_dict())
    copied = copy.deepcopy(mlp).double().float()
    assert torch.equal(copied(x), mlp(x))


def test_what_it_says():
    text = repr(make(density=1.0, gates=True))
    assert "in_features=48, hidden_features=64, activation=silu, gated=True" in text
    assert "(up): BlockSparseGLU(in_features=48, hidden_features=64, block_size=16, blocks=24 (100.00%)" in text
    assert "activation=silu)" in text
    assert "out_features=48" in text


@pytest.mark.parametrize("gated", [True, False])
def test_compiles_whole(gated):
    mlp = make(gated=gated, activation="gelu_tanh", bias=True)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    x, twin = torch.randn(5, 48, requires_grad=True), torch.randn(5, 48)
    with torch.no_grad():
        torch.testing.assert_close(compiled(twin), mlp(twin))
    compiled(x).square().sum().backward()
    got = [p.grad.clone() for p in (x, *mlp.parameters())]
    for p in (x, *mlp.parameters()):
        p.grad = None
    mlp(x).square().sum().backward()
    for mine, p in zip(got, (x, *mlp.parameters()), strict=True):
        torch.testing.assert_close(mine, p.grad)


def test_transforms_and_tracing():
    mlp = make(dtype=DOUBLE)
    parameters = dict(mlp.named_parameters())
    x = torch.randn(3, 48, dtype=DOUBLE)

    def loss(parameters, row):
        return torch.func.functional_call(mlp, parameters, (row[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        alone = torch.func.grad(loss)(parameters, x[i])
        for name, mine in each.items():
            torch.testing.assert_close(mine[i], alone[name])
    _, tangent = torch.func.jvp(mlp, (x,), (torch.ones_like(x),))
    step = 1e-6
    torch.testing.assert_close(tangent, (mlp(x + step) - mlp(x - step)) / (2 * step), rtol=1e-6, atol=1e-8)
    traced = torch.jit.trace(mlp, (x,))
    torch.testing.assert_close(traced(2 * x), mlp(2 * x))
    graph = torch.fx.symbolic_trace(nn.Sequential(mlp, nn.ReLU()))
    assert torch.equal(graph(x), mlp(x).relu())


def test_exports():
    mlp = make(bias=True)
    x = torch.randn(3, 48)
    with torch.no_grad():
        program = torch.export.export(mlp, (x,))
        torch.testing.assert_close(program.module()(x), mlp(x))
    ops = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"blocksparse.linear_glu.default", "blocksparse.linear.default"} <= ops


def test_fake_and_meta_tensors():
    with torch.device("meta"):
        mlp = make()
    assert mlp(torch.empty(2, 3, 48, device="meta")).shape == (2, 3, 48)
    real = make()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert real(torch.empty(2, 3, 48)).shape == (2, 3, 48)


def test_training_goes_down():
    torch.manual_seed(3)
    teacher, mlp = Gated(), make(density=0.9)
    x = torch.randn(256, 48)
    with torch.no_grad():
        want = teacher(x)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (mlp(x) - want).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


# ---- From dense ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_gate_and_up_keep_the_same_blocks(bias):
    dense = Gated(bias=bias)
    with torch.no_grad():
        dense.gate_proj.weight[:16, :16] *= 100  # in gate alone, and still both keep it
    mlp = bst.BlockSparseMLP.from_dense(dense, density=0.25, block_size=16)
    weights = mlp.weights()
    assert torch.equal(weights["up"][:16, :16], dense.up_proj.weight[:16, :16])
    kept = {
        name: weights[name].view(-1, 16, weights[name].size(1) // 16, 16).ne(0).any(3).any(1)
        for name in weights
        if "bias" not in name
    }
    assert torch.equal(kept["gate"], kept["up"])
    assert kept["gate"].sum() == 3
    assert kept["down"].sum() == 3
    x = torch.randn(2, 5, 48)
    torch.testing.assert_close(mlp(x), bst.dense_mlp(x, weights, "silu"))
    full = bst.BlockSparseMLP.from_dense(dense, density=1.0, block_size=16)
    torch.testing.assert_close(full(x), dense(x))


def test_masks_and_pruned_layers():
    dense = Gated()
    masks = {"gate": torch.rand(4, 3) < 0.4, "up": torch.rand(4, 3) < 0.4, "down": torch.rand(3, 4) < 0.5}
    masks["gate"][0, 0] = True
    masks["up"][0, 0] = False
    with torch.no_grad():
        for name, mask in masks.items():
            weight = getattr(dense, f"{name}_proj").weight
            weight *= mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
    for options in ({"masks": masks}, {"pruned": True}):
        mlp = bst.BlockSparseMLP.from_dense(dense, block_size=16, **options)
        x = torch.randn(5, 48)
        torch.testing.assert_close(mlp(x), dense(x))
        assert mlp.up.layout.blocks == 2 * int((masks["gate"] | masks["up"]).sum())
        assert mlp.down.layout.blocks == int(masks["down"].sum())
    again = bst.BlockSparseMLP.from_dense(dense, layouts=(layout_of(64, 48, 16), mlp.down.layout))
    assert again.down.layout == mlp.down.layout


def test_what_cannot_be_made_is_said():
    dense, from_dense = Gated(), bst.BlockSparseMLP.from_dense
    with pytest.raises(ValueError, match="one of them"):
        from_dense(dense)
    with pytest.raises(ValueError, match="one of them"):
        from_dense(dense, density=0.5, pruned=True)
    with pytest.raises(ValueError, match=r"is no feed-forward part that is known.*it has weight|it has none"):
        from_dense(nn.Linear(3, 3), density=0.5)
    with pytest.raises(TypeError, match="mlp is a Tensor"):
        from_dense(torch.zeros(3), density=0.5)
    with pytest.raises(ValueError, match=r"masks are of down, needs down, gate, up"):
        from_dense(dense, masks={"down": torch.ones(3, 4)}, block_size=16)
    with pytest.raises(ValueError, match=r"masks\['up'\] is \[1, 1\], needs \[4, 3\]"):
        from_dense(
            dense, masks={"gate": torch.ones(4, 3), "up": torch.ones(1, 1), "down": torch.ones(3, 4)}, block_size=16
        )
    with pytest.raises(ValueError, match="layout is 48 x 64"):
        from_dense(dense, layouts=(layout_of(48, 64, 16), layout_of(48, 64, 16)))
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        make(activation="tanh")


# ---- Recognition ---------------------------------------------------------------------------------------------------


class Odd(Gated):
    """Has the parts of an MLP, and computes something else with them."""

    def forward(self, x):
        return super().forward(x) + x


class Quantised(nn.Linear):
    pass


def test_parts_are_known_by_what_they_compute():
    assert bst.mlp_parts(Gated()).activation == "silu"
    assert bst.mlp_parts(Gated(act=nn.GELU(approximate="tanh"))).activation == "gelu_tanh"
    assert bst.mlp_parts(Gated(act=nn.Tanh())) is None
    assert bst.mlp_parts(Gated(act=lambda x: x * torch.sigmoid(1.702 * x))) is None
    assert bst.mlp_parts(Odd()) is None
    quantised = Gated()
    quantised.up_proj = Quantised(48, 64, bias=False)
    assert bst.mlp_parts(quantised) is None
    uneven = Gated()
    uneven.up_proj = nn.Linear(48, 56, bias=False)
    assert bst.mlp_parts(uneven) is None
    parametrized = Gated()
    nn.utils.parametrizations.weight_norm(parametrized.up_proj)
    assert bst.mlp_parts(parametrized) is None
    dense = Gated().train()
    dense.act_fn.eval()
    before = [m.training for m in dense.modules()]
    assert bst.mlp_parts(dense) is not None
    assert [m.training for m in dense.modules()] == before


def test_sequences_are_known():
    dense = nn.Sequential(nn.Linear(16, 32), nn.Identity(), nn.GELU(), nn.Linear(32, 24), nn.Dropout(0.25))
    parts = bst.mlp_parts(dense)
    assert (parts.activation, parts.dropout, parts.names) == ("gelu", 0.25, {"up": "0", "down": "3"})
    mlp = bst.BlockSparseMLP.from_dense(dense.eval(), density=1.0, block_size=8)
    x = torch.randn(3, 16)
    torch.testing.assert_close(mlp(x), dense(x))
    assert mlp.out_features == 24
    assert not torch.equal(mlp.train()(x), mlp(x))  # dropped
    assert bst.mlp_parts(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))) is None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.head = Gated(), nn.Linear(48, 48)

    def forward(self, x):
        return self.head(self.mlp(x) + x)


def test_replacing_those_of_a_network():
    model = nn.Sequential(Block(), Block()).eval()
    x = torch.randn(3, 48)
    before = model(x)
    with pytest.raises(ValueError, match=r"no MLP was chosen by 'attention'.*the model has: 0.mlp, 1.mlp"):
        bst.replace_mlps(model, "attention", density=0.5)
    with pytest.raises(ValueError, match=r"0.mlp: .*density is 2"):
        bst.replace_mlps(model, density=2)
    with pytest.raises(ValueError, match="needs a regular expression"):
        bst.replace_mlps(model, "(", density=1)
    assert torch.equal(model(x), before)  # nothing was lost
    replaced = bst.replace_mlps(model, r"^1\.", density=1.0, block_size=16)
    assert list(replaced) == ["1.mlp"]
    assert model[1].mlp is replaced["1.mlp"]
    assert isinstance(model[0].mlp, Gated)
    torch.testing.assert_close(model(x), before)
    model[0].mlp.up_proj.weight = model[0].mlp.gate_proj.weight
    assert bst.find_mlps(model) == {}  # its weight is used twice
    with pytest.raises(ValueError, match="is an MLP itself"):
        bst.replace_mlps(Gated(), density=0.5)


def test_a_sequence_is_replaced_where_another_calls_it_or_where_it_is_chosen():
    """Others may go through its layers one by one."""

    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    model = nn.Sequential(Owner(), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    both = nn.Sequential(Owner(), model[1])
    both[0].again = both[1]
    with pytest.raises(ValueError, match=r"no MLP was chosen by None; of those that are known the model has: 0.mlp, "):
        bst.replace_mlps(both, density=0.5, block_size=16)
    assert list(bst.replace_mlps(model, density=0.5, block_size=16)) == ["1"]
    assert list(bst.replace_mlps(model, "mlp", density=0.5, block_size=16)) == ["0.mlp"]


def test_a_dropout_behind_the_activation_is_not_lost():
    inner = nn.Sequential(nn.ReLU(), nn.Dropout())
    assert not bst.find_mlps(nn.Sequential(nn.Sequential(nn.Linear(32, 64), inner, nn.Linear(64, 32))).train())


def test_a_module_with_a_state_is_not_asked_whether_it_is_an_activation():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += self.training
            return x.relu()

    model = nn.Sequential(nn.Sequential(nn.Linear(32, 64), Counting(), nn.Linear(64, 32))).train()
    assert not bst.find_mlps(model)
    assert model[0][1].calls == 0
