"""The linear op for JAX: agreement with the other front ends, derivatives, transformations, refusals."""

import pickle

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
from conftest import make_layout
from jax.test_util import check_grads
from side_by_side import two_processes

import blocksparse.jax as bsj
import blocksparse.numpy as bsn
from blocksparse import Layout, UnavailableError
from blocksparse._core import library
from blocksparse.jax.arguments import allows_tf32
from blocksparse.jax.ops import registry

DTYPES = ["float32", "bfloat16", "float16", "float64"]
LAYOUT = make_layout()


@pytest.fixture
def x64():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield


def arrays(rng, layout=LAYOUT, n=7, dtype="float32"):
    """x, values, bias and gates."""
    shapes = ((n, layout.in_features), layout.values_shape, (layout.out_features,))
    given = [np.asarray(jnp.asarray(rng.standard_normal(shape)).astype(dtype)) for shape in shapes]
    gates = rng.integers(0, 3, layout.blocks).astype("float64" if dtype == "float64" else "float32")
    return *given, gates


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---- Agreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_is_numpys_to_the_bit(rng, x64, dtype, activation, first, transposed):
    layout = LAYOUT.t() if transposed else LAYOUT
    x, w, bias, gates = arrays(rng, layout, dtype=dtype)
    residual = bsn.linear_fprop(x, w, layout)
    given = {"bias": bias, "gates": gates, "activation": activation, "residual": residual}
    turned = {**given, "residual": residual.T} if first else given
    if first:  # for both, as the bf16 of a CPU counts denormals as 0 where no array has to be turned
        x, given["residual"] = np.asfortranarray(x), np.asfortranarray(residual)
    expected = bsn.linear_fprop(x, w, layout, **given)
    y = bsj.linear(x.T if first else x, w, layout, feature_axis=0 if first else -1, **turned)
    assert y.dtype == dtype
    same(y.T if first else y, expected)  # with denormals behind gelu, where the instruction set keeps them
    compiled = jax.jit(bsj.linear, static_argnames=("layout", "activation", "feature_axis"))
    same(compiled(x.T if first else x, w, layout=layout, feature_axis=0 if first else -1, **turned), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_numpys_to_the_bit(rng, x64, dtype):
    x, w, bias, gates = arrays(rng, dtype=dtype)
    y, pull = jax.vjp(lambda x, w, bias: bsj.linear(x, w, LAYOUT, bias, gates=gates), x, w, bias)
    dy = np.asarray(jnp.asarray(rng.standard_normal(y.shape), dtype))
    dx, dw, dbias = pull(dy)
    same(dx, bsn.linear_dgrad(dy, w, LAYOUT, gates=gates))
    same(dw, bsn.linear_wgrad(x, dy, LAYOUT, gates=gates))
    np.testing.assert_allclose(dbias.astype("float32"), dy.astype("float32").sum(0), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_pytorchs_to_the_bit(rng, x64, dtype):
    torch = pytest.importorskip("torch")
    import blocksparse.torch as bst

    given = arrays(rng, dtype=dtype)
    tensors = [torch.from_numpy(a.astype("float64")).to(getattr(torch, dtype)).requires_grad_() for a in given[:3]]
    gates = torch.from_numpy(given[3])
    y = bst.linear(*tensors[:2], LAYOUT, tensors[2], gates=gates)
    y.sum().backward()
    mine, pull = jax.vjp(lambda x, w, b: bsj.linear(x, w, LAYOUT, b, gates=given[3]), *given[:3])
    same(mine.astype("float64"), y.detach().double())
    for gradient, tensor in zip(pull(jnp.ones_like(mine))[:2], tensors, strict=False):
        same(gradient.astype("float64"), tensor.grad.double())


def test_leading_axes_and_empty_batches(rng):
    x, w, bias, _ = arrays(rng, n=24)
    y = bsj.linear(x, w, LAYOUT, bias)
    same(bsj.linear(x.reshape(2, 3, 4, 1, 1, 1, -1), w, LAYOUT, bias).reshape(y.shape), y)
    assert bsj.linear(x[:0], w, LAYOUT).shape == (0, 60)
    assert bsj.linear(x[0], w, LAYOUT).shape == (60,)
    first = bsj.linear(x.T.reshape(90, 4, 6), w, LAYOUT, bias, feature_axis=0)
    np.testing.assert_allclose(first.reshape(60, 24), y.T, rtol=1e-5, atol=1e-5)
    empty = Layout.from_mask(np.zeros((4, 6)), 16, out_features=60, in_features=90)
    same(bsj.linear(x, np.zeros((0, 16, 16), np.float32), empty, bias), np.broadcast_to(bias, (24, 60)))


def test_layouts_without_blocks_and_batches_without_tokens_have_gradients(rng):
    x, w, bias, _ = arrays(rng)
    empty = Layout.from_mask(np.zeros((4, 6)), 16, out_features=60, in_features=90)
    gradient = jax.grad(lambda x, w, bias, layout: bsj.linear(x, w, layout, bias).sum(), (0, 1, 2))
    for given in ((x, w[:0], bias, empty), (x[:0], w, bias, LAYOUT)):
        dx, dw, dbias = gradient(*given)
        same(dx, np.zeros_like(given[0]))
        same(dw, np.zeros_like(given[1]))
        same(dbias, np.full(60, len(given[0])))


def test_arrays_that_lie_otherwise(rng):
    """What XLA holds transposed comes as the core needs it; tables for a card will do on the CPU."""
    x, w, bias, _ = arrays(rng)
    expected = bsj.linear(x, w, LAYOUT, bias)
    turned = jax.jit(lambda x, w: bsj.linear(x.T, w.swapaxes(1, 2), LAYOUT, bias))
    same(turned(x.T.copy(), w.swapaxes(1, 2).copy()), expected)
    for_card = bsj.Tables(jnp.asarray(LAYOUT.index_for_card()), bsj.tables_of(LAYOUT).sizes)
    same(bsj.linear(x, w, for_card, bias), expected)
    sliced = np.lib.stride_tricks.sliding_window_view(np.concatenate([x.ravel(), x.ravel()]), 90)[::90][:7]
    same(bsj.linear(sliced, w, LAYOUT, bias), expected)
    with pytest.raises(ValueError, match="x is >f4, needs one of"):
        bsj.linear(x.astype(">f4"), w, LAYOUT)


# ---- Derivatives ---------------------------------------------------------------------------------------------------

RANDOM = [
    ("random(3,2,0.5)", {"in_features": 13}, "silu", -1, ["fwd", "rev"]),
    ("random(2,5,0.6)", {"out_features": 11}, "gelu", 0, ["rev"]),
    ("ba(5,2)", {}, "gelu_tanh", -1, ["rev"]),
]


@pytest.mark.parametrize(("graph", "sizes", "activation", "axis", "modes"), RANDOM)
def test_derivatives_to_second_order(rng, x64, graph, sizes, activation, axis, modes):
    layout = Layout.from_graph(graph, 8, seed=7, **sizes)
    x, w, bias, gates = arrays(rng, layout, n=3, dtype="float64")
    residual = rng.standard_normal((3, layout.out_features))

    def f(x, w, bias, gates, residual):
        x, residual = (x.T, residual.T) if axis == 0 else (x, residual)
        options = {"gates": gates, "residual": residual, "activation": activation, "feature_axis": axis}
        return bsj.linear(x, w, layout, bias, **options)

    check_grads(jax.jit(f), (x, w, bias, gates, residual), order=2, modes=modes)


def test_gradients_may_be_wider_than_x(rng):
    x, w, bias, gates = arrays(rng, dtype="bfloat16")
    from blocksparse.jax.linear import apply_linear

    wide = w.astype("float32")

    def f(w):
        return apply_linear(x, w, LAYOUT, bias, gates, wide=True).astype("float32").sum()

    assert f(wide) == f(w)
    dw = jax.grad(f)(wide)
    ones = np.ones((7, 60), x.dtype)
    expected = bsn.linear_wgrad(x, ones, LAYOUT, gates=gates, out=np.empty(w.shape, np.float32))
    assert dw.dtype == np.float32
    same(dw, expected)


def test_gates_and_weights_share_a_product(rng):
    x, w, bias, gates = arrays(rng)

    def f(w, gates):
        return bsj.linear(x, w, LAYOUT, bias, gates=gates, activation="relu").sum()

    text = str(jax.make_jaxpr(jax.grad(f, (0, 1)))(w, gates))
    assert text.count("blocksparse_wgrad") == 1
    assert text.count("blocksparse_dgrad") == 0


# ---- Transformations -----------------------------------------------------------------------------------------------


def calls(f, *given):
    return str(jax.make_jaxpr(f)(*given)).count("blocksparse_fprop")


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_batch_of_tokens_is_one_product(rng, axis):
    _, w, bias, _ = arrays(rng)
    xs = rng.standard_normal((3, 5, 90) if axis == -1 else (3, 90, 5)).astype("float32")
    residuals = rng.standard_normal((3, 5, 60) if axis == -1 else (3, 60, 5)).astype("float32")

    def f(x, r):
        return bsj.linear(x, w, LAYOUT, bias, residual=r, feature_axis=axis, activation="relu")

    batched = jax.vmap(f)
    assert "scan" not in str(jax.make_jaxpr(batched)(xs, residuals))
    close(batched(xs, residuals), np.stack([f(x, r) for x, r in zip(xs, residuals, strict=True)]))
    close(jax.vmap(f, (0, None))(xs, residuals[0]), np.stack([f(x, residuals[0]) for x in xs]))
    close(jax.vmap(f, (None, 0))(xs[0], residuals), np.stack([f(xs[0], r) for r in residuals]))
    moved = jax.vmap(f, in_axes=(1, 2), out_axes=1)(np.moveaxis(xs, 0, 1), np.moveaxis(residuals, 0, 2))
    close(np.moveaxis(moved, 1, 0), batched(xs, residuals))
    assert jax.vmap(f)(xs[:0], residuals[:0]).shape == (0, *residuals.shape[1:])


def test_a_batch_of_weights_is_a_loop(rng):
    x, w, bias, gates = arrays(rng)
    ws = rng.standard_normal((3, *w.shape)).astype("float32")

    def f(w):
        return bsj.linear(x, w, LAYOUT, bias, gates=gates)

    assert "scan" in str(jax.make_jaxpr(jax.vmap(f))(ws))
    close(jax.vmap(f)(ws), np.stack([f(w) for w in ws]))
    g = jax.grad(lambda w, x: (bsj.linear(x, w, LAYOUT) ** 2).sum())
    xs = rng.standard_normal((3, 5, 90)).astype("float32")
    close(jax.vmap(g, (None, 0))(w, xs), np.stack([g(w, x) for x in xs]))  # gradients of single examples
    close(
        jax.grad(lambda w: (jax.vmap(lambda x: bsj.linear(x, w, LAYOUT))(xs) ** 2).sum())(w), sum(g(w, x) for x in xs)
    )


def test_without_compilation(rng):
    x, w, bias, _ = arrays(rng)

    def f(x, w):
        return bsj.linear(x, w, LAYOUT, bias, activation="silu")

    with jax.disable_jit():
        y, dw = f(x, w), jax.grad(lambda w: f(x, w).sum())(w)
    same(y, jax.jit(f)(x, w))
    np.testing.assert_allclose(dw, jax.grad(lambda w: f(x, w).sum())(w), rtol=1e-5, atol=1e-5)


def test_checkpoint_and_scan(rng):
    layout = Layout.from_graph("balanced(4,2)", 16, seed=1)
    x, w, bias, _ = arrays(rng, layout)
    w = w / 8

    def run(w, step):
        y, _ = jax.lax.scan(lambda h, _: (step(h, w), None), x, None, length=3)
        return (y**2).sum()

    def step(h, w):
        return bsj.linear(h, w, layout, bias, activation="gelu")

    plain, saved = (jax.jit(jax.grad(run), static_argnums=1)(w, s) for s in (step, jax.checkpoint(step)))
    close(plain, saved)
    by_hand = jax.grad(lambda w: (step(step(step(x, w), w), w) ** 2).sum())(w)
    close(plain, by_hand)


def test_a_scan_over_layers_with_layouts_of_their_own(rng):
    layouts = [Layout.from_mask(np.roll(np.eye(4), i, 1), 16) for i in range(3)]
    x, ws = rng.standard_normal((5, 64)).astype("float32"), rng.standard_normal((3, 4, 16, 16)).astype("float32")
    stacked = jax.tree.map(lambda *words: jnp.stack(words), *map(bsj.tables_of, layouts))
    y, _ = jax.lax.scan(lambda h, layer: (bsj.linear(h, *layer), None), x, (ws, stacked))
    for w, layout in zip(ws, layouts, strict=True):
        x = bsj.linear(x, w, layout)
    close(y, x)


def test_a_layout_is_static_and_its_tables_may_be_operands(rng):
    x, w, _, _ = arrays(rng)
    traced = []

    def f(x, w, layout):
        traced.append(layout)
        return bsj.linear(x, w, layout)

    compiled = jax.jit(f, static_argnames="layout")
    again = pickle.loads(pickle.dumps(LAYOUT))
    same(compiled(x, w, layout=LAYOUT), compiled(x, w, layout=again))
    assert len(traced) == 1  # equal layouts are one program
    tables = bsj.tables_of(LAYOUT)
    assert bsj.tables_of(LAYOUT) is tables  # moved once
    turned = bsj.tables_of(LAYOUT.t())
    assert turned.words is tables.words
    assert turned.t().sizes == tables.sizes
    assert bsj.tables_of(LAYOUT.t()) is turned
    program = jax.jit(lambda x, w, tables: bsj.linear(x, w, tables))
    same(program(x, w, tables), compiled(x, w, layout=LAYOUT))
    assert f"{tables.words.size}xi32>) -> " in program.lower(x, w, tables).as_text().replace("%arg2: tensor<", "")
    other = Layout.from_mask(np.roll(LAYOUT.mask(), 1, 0), 16, out_features=60, in_features=90)
    if bsj.tables_of(other).sizes == tables.sizes:  # the same program, other tables
        same(program(x, w, bsj.tables_of(other)), bsn.linear_fprop(x, w, other))


# ---- What is wrong -------------------------------------------------------------------------------------------------

X, W, BIAS, GATES = arrays(np.random.default_rng(0))
REFUSED = [
    (lambda: bsj.linear(X[:, 1:], W, LAYOUT), ValueError, r"\[linear\] x is \[7, 89\], layout needs \[\.\.\., 90\]"),
    (lambda: bsj.linear(X, W, LAYOUT, feature_axis=0), ValueError, r"x is \[7, 90\], layout needs \[90, \.\.\.\]"),
    (lambda: bsj.linear(X, W, LAYOUT, feature_axis=1), ValueError, "feature_axis is 1, needs -1"),
    (
        lambda: bsj.linear(X, W[1:], LAYOUT),
        ValueError,
        r"values is float32 \[9, 16, 16\], needs float32 \[10, 16, 16\]",
    ),
    (lambda: bsj.linear(X, W.astype("float16"), LAYOUT), ValueError, r"values is float16 .*, needs float32"),
    (lambda: bsj.linear(X.astype("float16"), W, LAYOUT), ValueError, r"values is float32 .*, needs float16"),
    (lambda: bsj.linear(X, W, LAYOUT, BIAS[1:]), ValueError, r"bias is float32 \[59\], needs float32 \[60\]"),
    (lambda: bsj.linear(X, W, LAYOUT, gates=GATES.astype("float16")), ValueError, "gates is float16"),
    (
        lambda: bsj.linear(X, W, LAYOUT, residual=X),
        ValueError,
        r"residual is float32 \[7, 90\], needs float32 \[7, 60\]",
    ),
    (lambda: bsj.linear(X, W, LAYOUT, activation="tanh"), ValueError, "activation is 'tanh', needs one of none"),
    (lambda: bsj.linear(X, W, LAYOUT, precision=3), ValueError, "precision is 3"),
    (lambda: bsj.linear(X, W, LAYOUT, precision="hihgest"), ValueError, "precision is 'hihgest', needs None"),
    (lambda: bsj.linear(X.astype("int32"), W, LAYOUT), ValueError, "x is int32, needs one of float32"),
    (lambda: bsj.linear(X.astype("float64"), W, LAYOUT), ValueError, "x is float64, which JAX would round .*x64"),
    (lambda: bsj.linear(X.tolist(), W, LAYOUT), TypeError, "x is a list, needs an array of JAX or NumPy"),
    (lambda: bsj.linear(X, W, "ba(8,2)"), TypeError, r"\[linear\] layout is a str"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_wrong_is_refused_while_tracing(case):
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call()
    with pytest.raises(kind, match=text):
        jax.eval_shape(call)


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [
        *((name, True) for name in (None, "default", "fastest", "high", "tensorfloat32", jax.lax.Precision.DEFAULT)),
        *((name, False) for name in ("highest", "float32", jax.lax.Precision.HIGHEST)),
        *(("TF32_TF32_F32", True), (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, True), ("TF32_TF32_F32_X3", False)),
    ],
)
def test_tf32_is_taken_where_jaxs_products_take_it(precision, allowed):
    assert allows_tf32("linear", precision, jnp.float32) is allowed
    assert allows_tf32("linear", precision, jnp.float64) is False
    if isinstance(precision, str) and precision != "fastest":
        with jax.default_matmul_precision(precision):
            assert allows_tf32("linear", None, jnp.float32) is allowed


def test_errors_at_run_time_name_the_op():
    """Tables that do not belong to the sizes: only the core sees that."""
    tables = bsj.tables_of(LAYOUT)
    broken = bsj.Tables(jnp.zeros_like(tables.words), tables.sizes)
    with pytest.raises(Exception, match=r"\[layout\] this is no layout index of version"):
        jax.block_until_ready(bsj.linear(X, W, broken))
    narrow = Layout.from_graph("random(4,6,0.4)", 16, seed=3, out_features=59, in_features=90)
    with pytest.raises(Exception, match=r"\[linear\] the tables are of 10 blocks of 16 in 59 x 90, needs"):
        jax.block_until_ready(bsj.linear(X, W, bsj.Tables(bsj.tables_of(narrow).words, tables.sizes)))


@pytest.mark.parametrize(
    ("theirs", "text"),
    [((1, 0), "jaxlib 9.9 has 1.0: it is too new"), ((0, 0), "has 0.0: it is too old"), ((-1, -1), "too old")],
)
def test_a_runtime_of_another_version_is_refused_by_name(theirs, text):
    with pytest.raises(UnavailableError, match="speaks versions 0.1 to 0.4 of XLA's interface.*" + text):
        registry.check_versions((0, 4), theirs, "9.9")
    registry.check_versions((0, 4), (0, 1), "0.4.38")
    registry.check_versions((0, 4), (0, 9), "9.9")
    assert library.xla_versions()[0] == (0, 4)


def test_an_axis_of_an_explicit_mesh_is_refused():
    if not hasattr(jax.sharding, "AxisType"):
        pytest.skip("JAX before 0.6.1 has no types of axes")
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    with pytest.raises(ValueError, match=r"divided along an axis of type Explicit: needs jax\.shard_map"):
        bsj.linear(jax.device_put(X, spec), W, LAYOUT)


# ---- Threads and processes -----------------------------------------------------------------------------------------

COMPILED = jax.jit(lambda x, w: bsj.linear(x, w, LAYOUT))
SLOPES = jax.jit(jax.grad(lambda x, w: bsj.linear(x, w, LAYOUT).sum(), (0, 1)))


def products(_thread):
    """Whether products and gradients, eager and compiled, have NumPy's bits, over and over."""
    y, ones = bsn.linear_fprop(X, W, LAYOUT), np.ones((7, 60), np.float32)
    expected = [y, y, bsn.linear_dgrad(ones, W, LAYOUT), bsn.linear_wgrad(X, ones, LAYOUT)]
    for _ in range(20):
        made = [bsj.linear(X, W, LAYOUT), COMPILED(X, W), *SLOPES(X, W)]
        if not all(map(np.array_equal, made, expected)):
            return False
    return True


def test_two_processes_of_eight_threads():
    assert two_processes("test_jax", "products") == [True] * 16
