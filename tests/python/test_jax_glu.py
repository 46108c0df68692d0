"""Gated linear units for JAX: what they compute, derivatives, transformations, modules."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
from jax.test_util import check_grads
from test_jax import DTYPES, close, same, x64  # noqa: F401

import blocksparse.jax as bsj
from blocksparse import Layout

ACTIVATE = {
    "silu": jax.nn.silu,
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}
IN, HIDDEN = 33, 61  # neither is a multiple of anything
EACH = Layout.from_graph("random(4,3,0.6)", 16, seed=1, out_features=HIDDEN, in_features=IN)
BOTH = bsj.interleaved_layout(EACH)


def given_for(rng, dtype="float32", n=5):
    """x, values of gate and of up, their biases, gates."""
    shapes = ((n, IN), EACH.values_shape, EACH.values_shape, (HIDDEN,), (HIDDEN,))
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return *arrays, jnp.asarray(rng.integers(0, 3, BOTH.blocks), "float64" if dtype == "float64" else "float32")


def by_hand(x, gate, up, of_gate, of_up, activation):
    """With gate and up as two dense products."""
    sides = [x @ bsj.to_dense(w, EACH).T + b for w, b in ((gate, of_gate), (up, of_up))]
    return ACTIVATE[activation](sides[0]) * sides[1]


def by_one(x, gate, up, of_gate, of_up, activation):
    bias = bsj.interleave_rows(of_gate, of_up)
    return bsj.linear_glu(x, bsj.interleave(gate, up, EACH), BOTH, HIDDEN, bias, activation=activation)


@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_lie_where_the_layout_says(rng, transposed):
    layout = EACH.t() if transposed else EACH
    gate, up = (jnp.asarray(rng.standard_normal(layout.values_shape), jnp.float32) for _ in range(2))
    out, in_ = layout.sizes  # blocks at ragged edges count what is inside
    inside = bsj.from_dense(np.ones((out, in_), np.float32), layout)
    gate, up = gate * inside, up * inside
    values = bsj.interleave(gate, up, layout)
    dense = bsj.to_dense(values, bsj.interleaved_layout(layout))
    for mine, theirs in zip(bsj.separate_rows(dense, out), (gate, up), strict=True):
        same(mine, bsj.to_dense(theirs, layout))
    same(bsj.interleave_rows(*bsj.separate_rows(dense, out)), dense)
    for mine, theirs in zip(bsj.separate(values, layout), (gate, up), strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("activation", list(ACTIVATE))
def test_is_what_it_means(rng, x64, activation):  # noqa: F811
    given = given_for(rng, "float64")[:5]
    expected = by_hand(*given, activation)
    assert by_one(*given, activation).dtype == expected.dtype
    np.testing.assert_allclose(by_one(*given, activation), expected, rtol=1e-12, atol=1e-12)
    loss = lambda f: jax.jit(jax.value_and_grad(lambda *given: jnp.sin(f(*given, activation)).sum(), range(5)))  # noqa: E731
    for mine, theirs in zip(*(jax.tree.leaves(loss(f)(*given)) for f in (by_one, by_hand)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_pytorchs(rng, x64, dtype):  # noqa: F811
    """To the bit where it is one call. Gradients are XLA's, of the same z."""
    torch = pytest.importorskip("torch")
    import blocksparse.torch as bst

    x, gate, up, of_gate, of_up, gates = given_for(rng, dtype)
    values, bias = bsj.interleave(gate, up, EACH), bsj.interleave_rows(of_gate, of_up)
    tensors = [torch.from_numpy(np.array(a, "float64")).to(getattr(torch, dtype)) for a in (x, values, bias)]
    scales = torch.from_numpy(np.array(gates))

    def f(x, values, bias):
        return bsj.linear_glu(x, values, BOTH, HIDDEN, bias, gates=gates)

    y, (tx, tw, tb) = f(x, values, bias), tensors
    same(y.astype("float64"), bst.linear_glu(tx, tw, BOTH, HIDDEN, tb, gates=scales).double())
    for tensor in tensors:
        tensor.requires_grad_()
    bst.linear_glu(tx, tw, BOTH, HIDDEN, tb, gates=scales).sum().backward()
    mine, pull = jax.vjp(f, x, values, bias)
    bound = {"float64": 1e-12, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[dtype]
    for a, b in zip((mine, *pull(jnp.ones_like(mine))), (y, *(t.grad for t in tensors)), strict=True):
        b = b.double() if isinstance(b, torch.Tensor) else np.asarray(b, "float64")
        np.testing.assert_allclose(np.asarray(a, "float64"), b, rtol=bound, atol=bound * float(abs(b).max()))


def test_derivatives_to_second_order(rng, x64):  # noqa: F811
    layout = Layout.from_graph("random(2,2,0.7)", 8, seed=3, out_features=11, in_features=13)
    both = bsj.interleaved_layout(layout)
    shapes = ((2, 13), both.values_shape, (both.out_features,), (both.blocks,))
    given = [rng.standard_normal(shape) for shape in shapes]

    def f(x, values, bias, gates):
        return bsj.linear_glu(x, values, both, 11, bias, gates=gates)

    check_grads(jax.jit(f), given, order=2, modes=["rev"])
    check_grads(lambda z: bsj.glu(z, 11, "gelu"), (rng.standard_normal((2, 32)),), order=2)


def test_transformations(rng):
    x, gate, up, of_gate, of_up, _ = given_for(rng, n=6)
    values, bias = bsj.interleave(gate, up, EACH), bsj.interleave_rows(of_gate, of_up)

    def f(x, values, bias):
        return bsj.linear_glu(x, values, BOTH, HIDDEN, bias)

    y = f(x, values, bias)
    program = str(jax.make_jaxpr(f)(x, values, bias))
    assert program.count("blocksparse_linear_glu") == 1
    assert "blocksparse_fprop" not in program
    gradient = str(jax.make_jaxpr(jax.grad(lambda values: f(x, values, bias).sum()))(values))
    assert [gradient.count(f"blocksparse_{name}[") for name in ("linear_glu", "fprop", "dgrad", "wgrad")] == [
        0,
        1,
        0,
        1,
    ]
    batched = jax.vmap(f, (1, None, None), 1)
    stacked = x.reshape(3, 2, IN)
    assert "scan" not in str(jax.make_jaxpr(batched)(stacked, values, bias))
    close(batched(stacked, values, bias), y.reshape(3, 2, HIDDEN))
    several = jax.vmap(f, (None, 0, 0))(x, jnp.stack([values, 2 * values]), jnp.stack([bias, 0 * bias]))
    close(several, jnp.stack([y, f(x, 2 * values, 0 * bias)]))
    close(jax.jit(jax.checkpoint(f))(x.reshape(2, 3, IN), values, bias).reshape(y.shape), y)
    same(f(x, values, bias), jax.jit(f)(x, values, bias))
    tables = bsj.tables_of(BOTH)
    same(jax.jit(lambda *given: bsj.linear_glu(*given, HIDDEN, bias))(x, values, tables), y)
    assert f(x[:0], values, bias).shape == (0, HIDDEN)
    assert f(x[0], values, bias).shape == (HIDDEN,)
    dx, dw = jax.grad(lambda x, values: f(x, values, bias).sum(), (0, 1))(x[:0], values)
    assert dx.shape == (0, IN)
    assert not dw.any()


def test_what_is_wrong_is_refused(rng):
    x, gate, up, of_gate, of_up, gates = given_for(rng)
    values, bias = bsj.interleave(gate, up, EACH), bsj.interleave_rows(of_gate, of_up)
    for call, kind, text in [
        (
            lambda: bsj.linear_glu(x, values, EACH, HIDDEN),
            ValueError,
            r"layout has 61 outputs, .* 61 .* need 128 \(int",
        ),
        (lambda: bsj.linear_glu(x, values, BOTH, 0), ValueError, "gate and up of 0 hidden features need 16"),
        (lambda: bsj.linear_glu(x, values, BOTH, 61.0), TypeError, r"hidden_features is 61\.0, needs an integer"),
        (lambda: bsj.linear_glu(x[:, 1:], values, BOTH, HIDDEN), ValueError, r"\[linear_glu\] x is \[5, 32\]"),
        (lambda: bsj.linear_glu(x, gate, BOTH, HIDDEN), ValueError, r"\[linear_glu\] values is float32"),
        (
            lambda: bsj.linear_glu(x, values, BOTH, HIDDEN, of_up),
            ValueError,
            r"bias is float32 \[61\], needs .*\[128\]",
        ),
        (lambda: bsj.linear_glu(x, values, BOTH, HIDDEN, gates=gates[1:]), ValueError, "gates is float32"),
        (lambda: bsj.linear_glu(x, values, BOTH, HIDDEN, activation=None), ValueError, "activation is None, needs one"),
        (lambda: bsj.linear_glu(x, values, BOTH, HIDDEN, activation="tanh"), ValueError, "activation is 'tanh'"),
        (lambda: bsj.linear_glu(x, values, "ba(8,2)", HIDDEN), TypeError, r"\[linear_glu\] layout is a str"),
        (lambda: bsj.glu(x, 16), ValueError, r"\[glu\] z is \[5, 33\], 16 hidden features need \[\.\.\., 32\]"),
        (lambda: bsj.interleave(gate, up[1:], EACH), ValueError, r"\[interleave\] up is float32"),
        (lambda: bsj.interleave_rows(gate, up[1:]), ValueError, r"\[interleave_rows\] up is float32"),
        (lambda: bsj.separate(values[1:], EACH), ValueError, r"\[separate\] values is float32"),
        (lambda: bsj.separate_rows(bias, 3), ValueError, r"\[separate_rows\] both is \[128\], needs \[16, "),
    ]:
        with pytest.raises(kind, match=text):
            jax.eval_shape(call)
    broken = bsj.Tables(jnp.zeros_like(bsj.tables_of(BOTH).words), bsj.tables_of(BOTH).sizes)
    with pytest.raises(Exception, match=r"\[layout\] this is no layout index"):
        jax.block_until_ready(bsj.linear_glu(x, values, broken, HIDDEN))


# ---- Modules -------------------------------------------------------------------------------------------------------

DOWN = Layout.from_graph("random(3,4,0.6)", 16, seed=2, out_features=IN, in_features=HIDDEN)


def dense_mlp(x, up, down, gated, values="kernel"):
    """What an MLP computes, of its layers."""
    weight, bias = (np.asarray(getattr(up, name)[...]) for name in (values, "bias"))
    if gated:
        gate, up_weight = bsj.separate_rows(bsj.to_dense(weight, BOTH), HIDDEN)
        of_gate, of_up = bsj.separate_rows(bias, HIDDEN)
        hidden = jax.nn.silu(x @ gate.T + of_gate) * (x @ up_weight.T + of_up)
    else:
        hidden = jax.nn.silu(x @ bsj.to_dense(weight, EACH).T + bias)
    weight, bias = (np.asarray(getattr(down, name)[...]) for name in (values, "bias"))
    return hidden @ bsj.to_dense(weight, DOWN).T + bias


@pytest.mark.parametrize("gated", [True, False])
def test_mlps_of_flax(rng, gated):
    pytest.importorskip("flax")
    from flax import nnx

    from blocksparse.jax import linen as bs_linen
    from blocksparse.jax import nnx as bs_nnx

    x = jnp.asarray(rng.standard_normal((5, IN)), jnp.float32)
    ones = jax.nn.initializers.ones
    options = {"gated": gated, "use_bias": True, "bias_init": ones}
    mlp = bs_nnx.BlockSparseMLP(IN, HIDDEN, EACH, DOWN, rngs=nnx.Rngs(0), **options)
    close(mlp(x), dense_mlp(x, mlp.up, mlp.down, gated))
    module = bs_linen.BlockSparseMLP(EACH, DOWN, gated=gated, use_bias=True)
    given = {
        name: {"kernel": getattr(mlp, name).kernel[...], "bias": getattr(mlp, name).bias[...]}
        for name in ("up", "down")
    }
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, given)
    same(module.apply({"params": given}, x), mlp(x))
    narrow = bs_nnx.BlockSparseMLP(IN, HIDDEN, EACH, DOWN, rngs=nnx.Rngs(0), gated=gated, dtype=jnp.bfloat16)
    gradients = nnx.grad(lambda mlp: mlp(x).astype("float32").sum())(narrow)
    assert narrow(x).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    with pytest.raises(ValueError, match=r"\[BlockSparseGLU\] layout is \[33, 61\], needs \[61, 33\]"):
        bs_nnx.BlockSparseGLU(IN, HIDDEN, DOWN, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_gate_and_up_of_dense_layers(rng, library):
    x = jnp.asarray(rng.standard_normal((5, IN)), jnp.float32)
    if library == "nnx":
        nnx = pytest.importorskip("flax").nnx
        from blocksparse.jax.nnx import BlockSparseGLU

        gate, up, lone = (nnx.Linear(IN, HIDDEN, use_bias=i < 2, rngs=nnx.Rngs(i)) for i in range(3))
        weights = [layer.kernel[...].T for layer in (gate, up)]
        apply, theirs = (lambda layer: layer(x)), lambda layer: layer(x)
    else:
        eqx = pytest.importorskip("equinox")
        from blocksparse.jax.equinox import BlockSparseGLU

        gate, up, lone = (eqx.nn.Linear(IN, HIDDEN, use_bias=i < 2, key=jax.random.key(i)) for i in range(3))
        weights = [layer.weight for layer in (gate, up)]
        apply, theirs = (lambda layer: layer(x)), lambda layer: jax.vmap(layer)(x)
    whole = BlockSparseGLU.from_dense(gate, up, density=1.0, block_size=16)
    close(apply(whole), jax.nn.silu(theirs(gate)) * theirs(up))
    half = BlockSparseGLU.from_dense(gate, up, density=0.5, block_size=16)
    squares = np.pad(sum(np.square(w) for w in weights), ((0, 3), (0, 15))).reshape(4, 16, 3, 16).sum((1, 3))
    assert half.layout == bsj.interleaved_layout(
        Layout.from_mask(squares >= np.sort(squares.ravel())[6], 16, out_features=HIDDEN, in_features=IN)
    )
    with pytest.raises(ValueError, match="gate or up alone has a bias"):
        BlockSparseGLU.from_dense(gate, lone, density=0.5)


@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_of_equinox(rng, gated):
    eqx = pytest.importorskip("equinox")
    from blocksparse.jax.equinox import BlockSparseMLP

    x = jnp.asarray(rng.standard_normal((5, IN)), jnp.float32)
    mlp = BlockSparseMLP(IN, HIDDEN, EACH, DOWN, gated=gated, use_bias=True, key=jax.random.key(0))
    close(eqx.filter_jit(mlp)(x), dense_mlp(x, mlp.up, mlp.down, gated, "weight"))
    moved = eqx.filter_grad(lambda mlp: mlp(x).sum())(mlp)
    assert float(abs(moved.up.weight).max()) > 0
