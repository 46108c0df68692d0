"""What is built on the ops for JAX: conversions, initialisers, modules of flax and equinox, pruning by optax."""

import importlib
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
from conftest import make_channels, make_layout

import blocksparse.jax as bsj
from blocksparse import Layout
from blocksparse.schedules import PolynomialDecay

LAYOUT = make_layout()  # 60 x 90, ragged
WHOLE = Layout.from_graph("balanced(4,2)", 16, seed=1)  # 64 x 64


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---- Conversions and initialisers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT.t(), WHOLE], ids=["ragged", "transposed", "whole"])
def test_dense_weights_and_blocks(rng, layout):
    dense = rng.standard_normal(layout.sizes).astype("float32")
    values = bsj.from_dense(dense, layout)
    b = layout.block_size
    mask = np.kron(layout.mask(), np.ones((b, b)))[: layout.out_features, : layout.in_features]
    same(bsj.to_dense(values, layout), dense * mask)
    same(layout.to_dense(np.asarray(values)), dense * mask)
    taps = rng.standard_normal((*layout.sizes, 2, 3)).astype("float32")
    same(bsj.to_dense(bsj.from_dense(taps, layout), layout, (2, 3)), taps * mask[..., None, None])
    gradient = jax.grad(lambda w: (bsj.from_dense(w, layout) ** 2).sum())(dense)
    same(gradient, 2 * dense * mask)


def test_sparse_matrices_of_jax_and_scipy(rng):
    values = jnp.asarray(rng.standard_normal(WHOLE.values_shape), jnp.float32)
    matrix = bsj.to_bcsr(values, WHOLE)
    dense = np.asarray(matrix.todense()).swapaxes(1, 2).reshape(64, 64)
    same(dense, bsj.to_dense(values, WHOLE))
    again, layout = bsj.from_bcsr(matrix)
    assert layout == WHOLE
    assert again.unsafe_buffer_pointer() == values.unsafe_buffer_pointer()
    scipy_matrix = bsj.to_bsr(values, WHOLE)
    same(scipy_matrix.toarray(), dense)
    again, layout = bsj.from_bsr(scipy_matrix)
    assert layout == WHOLE
    same(again, values)
    with pytest.raises(ValueError, match="multiples of 16"):
        bsj.to_bcsr(np.zeros(LAYOUT.values_shape, "float32"), LAYOUT)
    with pytest.raises(TypeError, match=r"needs a jax\.experimental\.sparse\.BCSR"):
        bsj.from_bcsr(dense)


def test_the_blocks_with_the_largest_norms(rng):
    dense = rng.standard_normal((60, 90)).astype("float32")
    layout = bsj.select_blocks(dense, 0.3, 16)
    assert layout.blocks == 7  # of 24
    norms = np.linalg.norm(np.pad(dense, ((0, 4), (0, 6))).reshape(4, 16, 6, 16), axis=(1, 3))
    assert norms[layout.mask()].min() >= norms[~layout.mask()].max()
    for call, text in [
        (lambda: bsj.select_blocks(dense, 1.5, 16), "density is 1.5"),
        (lambda: bsj.select_blocks(dense[0], 0.5, 16), r"weight is \[90\]"),
        (lambda: bsj.from_dense(dense.T, LAYOUT), r"weight is \[90, 60\], needs \[60, 90\]"),
        (lambda: bsj.to_dense(dense, LAYOUT), "values are"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("name", ["fan_in_uniform", "lecun_normal", "he_normal", "glorot_uniform"])
def test_initial_weights_have_their_variance(name):
    layout = Layout.from_graph("random(8,6,0.5)", 64, seed=3, in_features=370)
    init = getattr(bsj.initializers, name)(layout)
    values = np.asarray(init(jax.random.key(0), layout.values_shape))
    out, in_ = layout.coordinates()
    width = np.where(in_ == 5, 50, 64)
    fan_in, fan_out = np.bincount(out, width)[out], (np.bincount(in_) * 64)[in_]
    wanted = {"fan_in_uniform": 1 / (3 * fan_in), "lecun_normal": 1 / fan_in, "he_normal": 2 / fan_in}
    np.testing.assert_allclose(values.var((1, 2)), wanted.get(name, 2 / (fan_in + fan_out)), rtol=0.15)
    with pytest.raises(ValueError, match="shape is"):
        init(jax.random.key(0), (3, 64, 64))


def test_filters_have_more_inputs():
    init = bsj.initializers.fan_in_uniform(WHOLE)
    filters = np.asarray(init(jax.random.key(0), (WHOLE.blocks, 9, 16, 16)))
    np.testing.assert_allclose(filters.var((1, 2, 3)), 1 / (3 * 9 * 32), rtol=0.15)


def test_identity_passes_x_on(rng):
    layout = Layout.from_graph("banded(4,2)", 16)
    values = bsj.initializers.identity(layout)(jax.random.key(0), layout.values_shape)
    x = rng.standard_normal((3, 64)).astype("float32")
    same(bsj.linear(x, values, layout), x)


# ---- Modules -------------------------------------------------------------------------------------------------------


def test_nnx(rng):
    nnx = pytest.importorskip("flax.nnx")
    import optax

    from blocksparse.jax import nnx as bn

    x = jnp.asarray(rng.standard_normal((8, 64)), jnp.float32)
    dense = nnx.Linear(64, 48, rngs=nnx.Rngs(0))
    full = bn.BlockSparseLinear.from_dense(dense, density=1.0, block_size=16)
    np.testing.assert_allclose(full(x), dense(x), atol=1e-6)
    layer = bn.BlockSparseLinear(64, 64, WHOLE, gates=True, activation="gelu", rngs=nnx.Rngs(0))
    given = {"gates": layer.gates[...], "activation": "gelu"}
    same(layer(x), bsj.linear(x, layer.kernel[...], WHOLE, layer.bias[...], **given))
    optimizer = nnx.Optimizer(layer, optax.sgd(0.3), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        loss, grads = nnx.value_and_grad(lambda layer: ((layer(x) - 1) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return loss

    losses = [float(step(layer, optimizer)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    narrow = bn.BlockSparseLinear(64, 64, WHOLE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert narrow(x).dtype == jnp.bfloat16
    gradient = nnx.grad(lambda layer: layer(x).sum().astype(jnp.float32))(narrow)["kernel"][...]
    assert gradient.dtype == jnp.float32
    assert (gradient.astype(jnp.bfloat16) != gradient).any()  # not rounded on the way
    channels = make_channels()
    conv = bn.BlockSparseConv(30, 21, (3, 3), channels, strides=[2, 2], rngs=nnx.Rngs(0))
    assert nnx.jit(conv)(jnp.ones((2, 7, 6, 30))).shape == (2, 4, 3, 21)
    images = jnp.asarray(rng.standard_normal((2, 7, 6, 30)), jnp.float32)
    dense_conv = nnx.Conv(30, 21, (3, 3), strides=2, rngs=nnx.Rngs(0))
    full_conv = bn.BlockSparseConv.from_dense(dense_conv, density=1.0, block_size=8)
    np.testing.assert_allclose(full_conv(images), dense_conv(images), atol=1e-5)
    grouped = nnx.Conv(30, 21, (3, 3), feature_group_count=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="feature_group_count is 3"):
        bn.BlockSparseConv.from_dense(grouped, density=1.0)
    lstm = bn.BlockSparseLSTM(20, 64, WHOLE, forget_bias=1.0, rngs=nnx.Rngs(0))
    y, (h, c) = lstm(jnp.ones((2, 5, 20)))
    assert (y.shape, h.shape, c.shape) == ((2, 5, 64), (2, 64), (2, 64))
    same(y[:, -1], h)
    with pytest.raises(ValueError, match=r"layout is \[64, 64\], needs \[64, 32\]"):
        bn.BlockSparseLinear(32, 64, WHOLE, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="density or layout, one of them"):
        bn.BlockSparseLinear.from_dense(dense)


def test_linen(rng):
    pytest.importorskip("flax")
    from blocksparse.jax import linen as bl

    x = jnp.asarray(rng.standard_normal((8, 64)), jnp.float32)
    layer = bl.BlockSparseLinear(WHOLE, gates=True, activation="relu")
    parameters = layer.init(jax.random.key(0), x)
    p = parameters["params"]
    same(layer.apply(parameters, x), bsj.linear(x, p["kernel"], WHOLE, p["bias"], gates=p["gates"], activation="relu"))
    conv = bl.BlockSparseConv(make_channels(), kernel_size=(3,), padding="causal")
    images = jnp.ones((2, 7, 30))
    assert conv.apply(conv.init(jax.random.key(0), images), images).shape == (2, 7, 21)
    lstm = bl.BlockSparseLSTM(WHOLE)
    steps = jnp.ones((2, 5, 20))
    y, (h, _) = jax.jit(lstm.apply)(lstm.init(jax.random.key(0), steps), steps)
    same(y[:, -1], h)
    with pytest.raises(TypeError, match=r"\[BlockSparseLinear\] layout is a int, needs a blocksparse.Layout"):
        bl.BlockSparseLinear(64, WHOLE)


def test_equinox(rng):
    eqx = pytest.importorskip("equinox")
    from blocksparse.jax import equinox as be

    x = jnp.asarray(rng.standard_normal((8, 64)), jnp.float32)
    dense = eqx.nn.Linear(64, 48, key=jax.random.key(0))
    full = be.BlockSparseLinear.from_dense(dense, density=1.0, block_size=16)
    np.testing.assert_allclose(jax.vmap(full)(x), jax.vmap(dense)(x), atol=1e-6)
    layer = be.BlockSparseLinear(64, 64, WHOLE, gates=True, key=jax.random.key(0))
    same(eqx.filter_jit(eqx.filter_vmap(layer))(x), bsj.linear(x, layer.weight, WHOLE, layer.bias, gates=layer.gates))
    gradient = eqx.filter_grad(lambda layer: (jax.vmap(layer)(x) ** 2).sum())(layer)
    assert gradient.weight.shape == WHOLE.values_shape
    assert gradient.layout == WHOLE
    conv = be.BlockSparseConv(30, 21, (3, 3), make_channels(), padding=[1, (2, 0)], key=jax.random.key(0))
    assert eqx.filter_jit(conv)(jnp.ones((30, 7, 6))).shape == (21, 7, 6)
    image = jnp.asarray(rng.standard_normal((30, 7, 6)), jnp.float32)
    dense_conv = eqx.nn.Conv2d(30, 21, 3, stride=2, padding=1, key=jax.random.key(0))
    full_conv = be.BlockSparseConv.from_dense(dense_conv, density=1.0, block_size=8)
    np.testing.assert_allclose(full_conv(image), dense_conv(image), atol=1e-5)
    with pytest.raises(ValueError, match="groups is 3"):
        be.BlockSparseConv.from_dense(eqx.nn.Conv2d(30, 21, 3, groups=3, key=jax.random.key(0)), density=1.0)
    lstm = be.BlockSparseLSTM(20, 64, WHOLE, key=jax.random.key(0))
    y, (h, _) = eqx.filter_jit(lstm)(jnp.ones((5, 2, 20)))
    same(y[-1], h)


# ---- Pruning -------------------------------------------------------------------------------------------------------

SCHEDULE = PolynomialDecay(0.75, begin_step=2, end_step=8, frequency=3)


def prune(schedule, steps, scope="layer", compiled=True, **options):
    optax = pytest.importorskip("optax")
    from blocksparse.jax import pruning

    rng = np.random.default_rng(1)
    params = {name: jnp.asarray(rng.standard_normal(size), jnp.float32) for name, size in (("a", (60, 90)), ("b", 60))}
    params["c"] = jnp.asarray(rng.standard_normal((32, 48)) * 3, jnp.float32)
    tx = pruning.wrap_optax(optax.sgd(0.05, momentum=0.9), schedule, block_size=16, scope=scope, **options)

    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    step, state = jax.jit(step) if compiled else step, tx.init(params)
    history = []
    for _ in range(steps):
        params, state = step(params, state)
        history.append((params, pruning.masks_of((state, "other"))))
    return history


def test_as_many_blocks_live_as_the_schedule_says():
    history = prune(SCHEDULE, 10)
    for t, (params, masks) in enumerate(history, 1):
        acted = max((s for s in range(t + 1) if SCHEDULE.acts_at(s)), default=None)
        live = 24 - np.floor(24 * (0 if acted is None else SCHEDULE.sparsity(acted)) + 0.5)
        assert masks["a"].sum() == live
        assert masks["b"] is None
        blocks = np.pad(params["a"], ((0, 4), (0, 6))).reshape(4, 16, 6, 16).any((1, 3))
        same(blocks, masks["a"])  # whatever momentum does
    for (_, before), (_, after) in itertools.pairwise(history):
        assert not (after["a"] & ~before["a"]).any()  # what was dropped stays so
    eager = prune(SCHEDULE, 3, compiled=False)
    jax.tree.map(same, eager[2][1], history[2][1])
    together = prune(SCHEDULE, 8, scope="global")[-1][1]
    assert together["a"].sum() + together["c"].sum() == 30 - np.floor(30 * 0.75 + 0.5)
    assert together["c"].sum() > 2  # its weights are larger


def test_the_same_blocks_as_with_pytorch():
    torch = pytest.importorskip("torch")
    import blocksparse.torch.sparsify as bss

    history = prune(SCHEDULE, 8)
    rng = np.random.default_rng(1)
    layer = torch.nn.Linear(90, 60)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(rng.standard_normal((60, 90)).astype("float32")))
    optimizer = torch.optim.SGD(layer.parameters(), 0.05, momentum=0.9)
    pruner = bss.MagnitudePruner(SCHEDULE, regrow=False, block_size=16)
    pruner.prepare(layer)
    pruner.attach(optimizer)
    for _, masks in history:
        optimizer.zero_grad()
        (-layer.weight.cos()).sum().backward()
        optimizer.step()
        same(masks["a"], next(iter(pruner.masks().values())))


def test_what_pruning_refuses():
    optax = pytest.importorskip("optax")
    from blocksparse.jax import pruning

    with pytest.raises(TypeError, match=r"schedule is 0\.9, needs one of blocksparse\.schedules"):
        pruning.wrap_optax(optax.sgd(0.1), 0.9)
    with pytest.raises(ValueError, match="scope is 'all'"):
        pruning.wrap_optax(optax.sgd(0.1), SCHEDULE, scope="all")
    with pytest.raises(ValueError, match="the state has 0 of wrap_optax"):
        pruning.masks_of(optax.sgd(0.1).init({}))
    tx = pruning.wrap_optax(optax.sgd(0.1), SCHEDULE)
    with pytest.raises(ValueError, match="update needs params"):
        tx.update({}, tx.init({}))
    layout = pruning.layout_from_mask(np.eye(2, 3), 16, (30, 48), transposed=True)
    assert (layout.sizes, layout.grid) == ((48, 30), (3, 2))


# ---- Several devices, and none of the libraries --------------------------------------------------------------------

SHARDED = """
import jax, json, numpy as np, jax.numpy as jnp
import blocksparse.jax as bsj
from blocksparse import Layout
from jax.sharding import PartitionSpec as P
auto = {"axis_types": (jax.sharding.AxisType.Auto,)} if hasattr(jax.sharding, "AxisType") else {}
mesh = jax.make_mesh((4,), ("i",), **auto)
layout = Layout.from_graph("balanced(8,3)", 16, seed=1)
rng = np.random.default_rng(0)
x, w, bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 128), layout.values_shape, (128,)))
whole = lambda x, w, bias: bsj.linear(x, w, layout, bias, activation="gelu")
tables = bsj.split_rows(layout, 4)
loss = lambda f: jax.jit(jax.value_and_grad(lambda *given: (f(*given) ** 2).sum(), (0, 1, 2)))
expected = jax.tree.leaves(loss(whole)(x, w, bias))
errors = []
for check in (True, False):
    over = lambda f, specs, out: jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)
    tokens = over(whole, (P("i"), P(), P()), P("i"))
    of_parts = lambda x, w, b, t: bsj.linear(x, w, t, b, activation="gelu")
    parts = over(of_parts, (P(), P("i"), P("i"), P("i")), P(None, "i"))
    rows = lambda x, w, bias: parts(x, w, bias, tables)
    for f in (tokens, rows):
        got = jax.tree.leaves(loss(f)(x, w, bias))
        errors += [float(abs(a - b).max() / abs(b).max()) for a, b in zip(got, expected)]
gates = layout.stack(4)
pre, v = (jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in ((3, 8, 4, 128), gates.values_shape))
sequences = lambda pre, v: bsj.lstm(pre, v, gates)[0]
divided = jax.shard_map(sequences, mesh=mesh, in_specs=(P(None, "i"), P()), out_specs=P(None, "i"))
of_lstm = lambda f: jax.jit(jax.grad(lambda *given: (f(*given) ** 2).sum(), (0, 1)))(pre, v)
errors += [float(abs(a - b).max() / abs(b).max()) for a, b in zip(of_lstm(divided), of_lstm(sequences))]
both, each = bsj.interleaved_layout(layout), layout.values_shape[0] * 2
wide = jnp.asarray(rng.standard_normal((each, 16, 16)), jnp.float32)
unit = lambda x, w: bsj.linear_glu(x, w, both, 128)
divided = jax.shard_map(unit, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
errors += [float(abs(a - b).max() / abs(b).max()) for a, b in ((divided(x, wide), unit(x, wide)),)]
of_unit = lambda f: jax.jit(jax.grad(lambda *given: (f(*given) ** 2).sum(), (0, 1)))(x, wide)
errors += [float(abs(a - b).max() / abs(b).max()) for a, b in zip(of_unit(divided), of_unit(unit))]
sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("i")))
errors.append(float(abs(jax.jit(whole)(sharded, w, bias) - whole(x, w, bias)).max()))
print(json.dumps(errors))
"""


def test_tokens_and_rows_over_devices():
    if not hasattr(jax, "shard_map"):
        pytest.skip("JAX before 0.6.1 has jax.shard_map elsewhere")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout)
    assert len(errors) == 22
    assert max(errors) < 1e-5


def test_rows_that_cannot_be_divided():
    for layout, parts, text in [
        (WHOLE, 3, "3 divides"),
        (WHOLE.t(), 2, "transposed view"),
        (Layout.from_mask([[1, 1], [1, 0]], 16), 2, "the parts have 2, 1 blocks, needs as many in each"),
    ]:
        with pytest.raises(ValueError, match=text):
            bsj.split_rows(layout, parts)


def test_nothing_else_is_imported():
    code = "import sys, blocksparse; assert 'jax' not in sys.modules; import blocksparse.jax; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "flax", "equinox", "optax", "tensorflow"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "library"), [("nnx", "flax"), ("linen", "flax"), ("equinox", "equinox"), ("pruning", "optax")]
)
def test_what_is_missing_is_named(monkeypatch, module, library):
    for name in (library, f"blocksparse.jax.{module}", *(("flax.linen",) if module == "linen" else ())):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"blocksparse.jax.{module} needs {library}: pip install {library}"):
        importlib.import_module(f"blocksparse.jax.{module}")


def test_the_command_line_says_that_jax_works(capsys):
    from blocksparse.__main__ import main

    assert main([]) == 0
    said = capsys.readouterr().out
    assert f"JAX               {jax.__version__}" in said
    assert f"JAX kernels       on {jax.default_backend()}; XLA's interface 0." in said
