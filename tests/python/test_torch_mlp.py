"""Gated linear units and feed-forward parts: the dense ones that they were made of, with the same blocks left."""

import copy
import io

import pytest
import torch
from test_torch import error
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import blocksparse.torch as bst
from blocksparse import Layout

DOUBLE = torch.float64
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]
# in, hidden, b; the last hidden block is whole, ends in its first half, in its second one, within eight units
SIZES = [(48, 64, 16), (40, 70, 32), (33, 61, 32), (24, 40, 8), (130, 300, 128), (64, 9, 16), (16, 1, 8)]


def layout_of(out, in_, b, density=0.5, seed=0):
    grid = -(-out // b), -(-in_ // b)
    return Layout.from_graph(f"random({grid[0]},{grid[1]},{density})", b, seed=seed, out_features=out, in_features=in_)


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


# ---- Interleaving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_", "hidden", "b"), SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_interleave_as_rows_do(in_, hidden, b, transposed):
    layout = layout_of(in_, hidden, b).t() if transposed else layout_of(hidden, in_, b)
    gate, up = (torch.randn(layout.values_shape) for _ in range(2))
    joint = bst.interleaved_layout(layout)
    assert joint.sizes == (2 * -(-hidden // 8) * 8, in_)
    values = bst.interleave(gate, up, layout)
    dense_gate, dense_up = (bst.to_dense(part, layout) for part in (gate, up))
    got = bst.separate_rows(bst.to_dense(values, joint), hidden)
    assert torch.equal(got[0], dense_gate)
    assert torch.equal(got[1], dense_up)
    if layout.blocks:
        assert dense_gate.abs().max() > 0
    rows = bst.separate_rows(bst.interleave_rows(dense_gate, dense_up), hidden)
    assert torch.equal(rows[0], dense_gate)
    assert torch.equal(rows[1], dense_up)
    back = bst.separate(values, layout)
    for mine, theirs in zip(back, (dense_gate, dense_up), strict=True):
        assert torch.equal(bst.to_dense(mine, layout), theirs)


def test_interleaving_is_differentiable():
    layout = layout_of(24, 16, 8)
    gate, up = (torch.randn(layout.values_shape, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda g, u: bst.interleave(g, u, layout), (gate, up))
    assert gradcheck(lambda v: bst.separate(v, layout), (bst.interleave(gate, up, layout).detach().requires_grad_(),))


# ---- The gated linear unit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("in_", "hidden", "b"), SIZES)
def test_a_gated_unit_is_the_dense_one(in_, hidden, b, activation):
    layout = layout_of(hidden, in_, b)
    layer = bst.BlockSparseGLU(in_, hidden, layout, bias=True, activation=activation, dtype=DOUBLE)
    weights = layer.weights()
    for shape in [(7, in_), (2, 3, in_), (1, in_), (0, in_), (in_,)]:
        x = torch.randn(shape, dtype=DOUBLE)
        gate = nn.functional.linear(x, weights["gate"], weights["gate_bias"])
        up = nn.functional.linear(x, weights["up"], weights["up_bias"])
        want = {
            "silu": nn.functional.silu(gate),
            "gelu": nn.functional.gelu(gate),
            "gelu_tanh": nn.functional.gelu(gate, approximate="tanh"),
            "relu": gate.relu(),
        }[activation] * up
        with torch.no_grad():
            torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_any_order(activation):
    layout = layout_of(20, 16, 8, 0.7)
    joint = bst.interleaved_layout(layout)
    leaves = [
        torch.randn(shape, dtype=DOUBLE, requires_grad=True)
        for shape in [(3, 16), joint.values_shape, (joint.out_features,), (joint.blocks,)]
    ]

    def f(x, values, bias, gates):
        return bst.linear_glu(x, values, joint, 20, bias, gates=gates, activation=activation)

    assert gradcheck(f, leaves)
    assert gradgradcheck(f, leaves, fast_mode=True)


def test_wrong_arguments_of_a_gated_unit():
    layout = layout_of(64, 48, 16)
    joint = bst.interleaved_layout(layout)
    x, values = torch.randn(3, 48), torch.randn(joint.values_shape)
    with pytest.raises(ValueError, match=r"layout has 64 outputs, gate and up of 64 hidden features need 128"):
        bst.linear_glu(x, torch.randn(layout.values_shape), layout, 64)
    with pytest.raises(ValueError, match="activation is 'tanh', needs one of silu, gelu, gelu_tanh, relu"):
        bst.linear_glu(x, values, joint, 64, activation="tanh")
    with pytest.raises(ValueError, match=r"x is \[3, 47\]"):
        bst.linear_glu(x[:, 1:], values, joint, 64)
    with pytest.raises(TypeError, match="x is a list"):
        bst.linear_glu([1.0], values, joint, 64)
    with pytest.raises(ValueError, match=r"z is \[3, 48\], needs \[..., 128\]"):
        bst.glu(x, 64)
    with pytest.raises(ValueError, match=r"gate is \[1, 16, 16\], needs"):
        bst.interleave(torch.zeros(1, 16, 16), torch.zeros(1, 16, 16), layout)
    with pytest.raises(ValueError, match="values are"):
        bst.separate(torch.zeros(1, 16, 16), layout)
    with pytest.raises(ValueError, match="layout is 64 x 48"):
        bst.BlockSparseGLU(48, 62, layout)
    with pytest.raises(ValueError, match="one shape"):
        bst.interleave_rows(torch.zeros(3, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"dtype is torch\.int32"):
        bst.BlockSparseGLU(48, 64, layout, dtype=torch.int32)


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


def test_gated_layouts_may_be_anything_with_both_in_it():
    joint = layout_of(128, 48, 16)
    layer = bst.BlockSparseGLU(48, 64, joint)
    x = torch.randn(3, 48)
    weights = layer.weights()
    want = nn.functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)
    torch.testing.assert_close(layer(x), want)
