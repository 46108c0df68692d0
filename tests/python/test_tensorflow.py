"""The linear op on TensorFlow's tensors: the same bits as NumPy's, derivatives of any order, what is wrong."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from tensorflow_cases import numeric_gradients, problem, same, wide_of  # noqa: E402

import blocksparse.numpy as bsn  # noqa: E402
import blocksparse.tensorflow as bstf  # noqa: E402
from blocksparse import Layout  # noqa: E402

v1 = tf.compat.v1
DTYPES = [np.float32, np.float64, np.float16, tf.bfloat16.as_numpy_dtype]


# ---- The same bits as NumPy's --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_and_gradients_are_numpys(rng, layout, dtype, compiled, transposed):
    layout = layout.t() if transposed else layout
    x, values, bias, gates, dy = problem(rng, layout, dtype)

    def call(x, values, bias, gates):
        return bstf.linear(x, values, layout, bias, gates=gates)

    run = tf.function(call) if compiled else call
    given = [tf.constant(a) for a in (x, values, bias, gates)]
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = run(*given)
    dx, dw, dbias, dgates = tape.gradient(y, given, tf.constant(dy))
    same(y, bsn.linear_fprop(x, values, layout, bias=bias, gates=gates))
    same(dx, bsn.linear_dgrad(dy, values, layout, gates=gates))
    of_gates = np.empty(layout.blocks, wide_of(dtype))
    same(dw, bsn.linear_wgrad(x, dy, layout, values=values, gates=gates, gates_out=of_gates))
    same(dgates, of_gates)
    np.testing.assert_allclose(
        dbias.numpy().astype(np.float64),
        dy.astype(np.float64).sum(0),
        rtol=0.02,
        atol=0.03 if dtype != np.float64 else 0,
    )


def test_features_first_reads_and_writes_them_so(rng, layout):
    x, values, bias, _, dy = problem(rng, layout, n=6)
    turned = tf.Variable(x.T.reshape(-1, 2, 3))
    with tf.GradientTape() as tape:
        y = bstf.linear(turned, values, layout, bias, feature_axis=0)
    assert y.shape == (layout.out_features, 2, 3)
    np.testing.assert_allclose(
        y.numpy().reshape(-1, 6).T, bsn.linear_fprop(x, values, layout, bias=bias), rtol=1e-5, atol=1e-5
    )
    dx = tape.gradient(y, turned, tf.constant(dy.T.reshape(-1, 2, 3)))
    np.testing.assert_allclose(dx.numpy().reshape(-1, 6).T, bsn.linear_dgrad(dy, values, layout), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 2, 1, 2, 1)])
def test_any_leading_dimensions(rng, layout, shape):
    _, values, _, _, _ = problem(rng, layout)
    x = rng.standard_normal((*shape, layout.in_features)).astype(np.float32)
    y = bstf.linear(x, values, layout)
    assert y.shape == (*shape, layout.out_features)
    same(y, bsn.linear_fprop(x.reshape(-1, layout.in_features), values, layout).reshape(y.shape))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "gelu_tanh", None])
def test_activations_and_residuals(rng, layout, activation):
    x, values, bias, _, residual = problem(rng, layout, np.float64)
    y = bstf.linear(x, values, layout, bias, residual=residual, activation=activation)
    expected = bsn.linear_fprop(x, values, layout, bias=bias, residual=residual, activation=activation or "none")
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6, atol=1e-8)  # tf.nn.gelu rounds sqrt(2) to float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_denormals_count(rng, layout, dtype, gated):
    """TensorFlow's own products round them to zero."""
    x, values, _, gates, _ = problem(rng, layout, dtype)
    tiny = 2e-7 if dtype == np.float16 else np.finfo(wide_of(dtype)).tiny / 4
    values = (values.astype(np.float64) * tiny).astype(dtype)
    assert np.count_nonzero(values) > values.size / 2
    more = {"gates": gates} if gated else {}
    for run in (bstf.linear, tf.function(bstf.linear)):
        y = run(x, values, layout, **more)
        same(y, bsn.linear_fprop(x, values, layout, **more))
        assert np.count_nonzero(y.numpy()) > y.numpy().size / 2


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed):
    """Any sizes, ragged or not, of any density."""
    rng = np.random.default_rng(seed)
    b, rows, columns = (int(rng.choice(sides)) for sides in ([8, 16, 32, 64, 128], range(1, 6), range(1, 6)))
    cut = [int(rng.integers(0, b)) if rng.random() < 0.5 else 0 for _ in range(2)]
    sizes = {"out_features": rows * b - cut[0], "in_features": columns * b - cut[1]}
    layout = Layout.from_graph(f"random({rows},{columns},{rng.choice([0, 0.3, 0.7, 1])})", b, seed=seed, **sizes)
    dtype = DTYPES[seed % 4]
    x, values, bias, gates, dy = problem(rng, layout, dtype, int(rng.choice([0, 1, 7, 33, 130])))
    given = [tf.constant(a) for a in (x, values)]
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = bstf.linear(*given, layout, bias, gates=gates)
    dx, dw = tape.gradient(y, given, tf.constant(dy))
    same(y, bsn.linear_fprop(x, values, layout, bias=bias, gates=gates))
    same(dx, bsn.linear_dgrad(dy, values, layout, gates=gates))
    same(dw, bsn.linear_wgrad(x, dy, layout, values=values, gates=gates))


# ---- Derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("feature_axis", [0, -1])
def test_gradients_of_gradients(rng, gated, feature_axis):
    layout = Layout.from_graph("random(2,3,0.6)", 8, seed=1, out_features=13, in_features=20)
    x, values, bias, gates, _ = problem(rng, layout, np.float64, 3)
    x = x.T.copy() if feature_axis == 0 else x

    def slopes(x, values, bias, gates):
        given = [x, values, bias, gates]
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = bstf.linear(x, values, layout, bias, gates=gates if gated else None, feature_axis=feature_axis)
            total = tf.reduce_sum(tf.sin(y))
        made = tape.gradient(total, given, unconnected_gradients="zero")
        return tf.add_n([tf.reduce_sum(tf.cos(gradient)) for gradient in made])

    numeric_gradients(slopes, (x, values, bias, gates), rng)


def test_third_derivatives(rng):
    layout = Layout.from_graph("dense(1,2)", 8)
    x, values, _, _, _ = problem(rng, layout, np.float64, 2)

    def second(x, values):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(values)
                total = tf.reduce_sum(bstf.linear(x, values, layout) ** 3)
            dw = inner.gradient(total, values)
        return tf.reduce_sum(outer.gradient(dw, x))

    numeric_gradients(second, (x, values), rng)


def test_jacobians_and_forward_mode(rng, layout):
    x, values, _, _, _ = problem(rng, layout, np.float64, 2)
    x, dense = tf.constant(x), layout.to_dense(values)
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        y = bstf.linear(x, values, layout)
    np.testing.assert_allclose(forward.jvp(y).numpy(), np.ones_like(x.numpy()) @ dense.T, rtol=1e-10)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = bstf.linear(x, values, layout)
    jacobian = tape.jacobian(y, x, experimental_use_pfor=False)
    np.testing.assert_allclose(jacobian[1, :, 1].numpy(), dense, rtol=1e-12)


# ---- What is wrong -------------------------------------------------------------------------------------------------


def test_the_core_says_what_is_wrong(layout):
    x, values = tf.ones([2, layout.in_features]), tf.ones(layout.values_shape)
    invalid = tf.errors.InvalidArgumentError
    for match, arguments, more in (
        (r"\[linear_fprop\] x is \[2, 5\], layout needs \[N, 90\]", (x[:, :5], values), {}),
        (r"\[linear_fprop\] w is", (x, values[1:]), {}),
        (r"\[linear_fprop\] bias is \[3\], needs", (x, values, layout, tf.ones([3])), {}),
        (r"\[linear_fprop\] gates is \[3\], needs", (x, values), {"gates": tf.ones([3])}),
        (r"\[linear_fprop\] gates is f64, needs f32", (x, values), {"gates": tf.ones([layout.blocks], tf.float64)}),
        (r"x is a scalar, needs", (tf.constant(1.0), values), {}),
        (r"a tensor of 6 dimensions, needs 5 or fewer", (x, tf.ones([1] * 6)), {}),
    ):
        given = arguments if len(arguments) > 2 else (*arguments, layout)
        with pytest.raises(invalid, match=match):
            bstf.linear(*given, **more)
    with pytest.raises(
        invalid, match=r"BlocksparseLinear as input #1.* was expected to be a float tensor but is a double"
    ):
        bstf.linear(x, tf.cast(values, tf.float64), layout)
    for given in ((x, np.ones(layout.values_shape)), (np.ones(x.shape), values)):  # NumPy's are not rounded either
        with pytest.raises(invalid, match=r"was expected to be a (float|double) tensor but is a (double|float)"):
            bstf.linear(*given, layout)


def test_python_says_what_is_wrong(layout):
    x, values = tf.ones([2, layout.in_features]), tf.ones(layout.values_shape)
    with pytest.raises(TypeError, match=r"\[linear\] layout is a int"):
        bstf.linear(x, values, 3)
    with pytest.raises(ValueError, match="activation is 'tanh', needs one of none, relu"):
        bstf.linear(x, values, layout, activation="tanh")
    with pytest.raises(ValueError, match=r"residual is float32 \(60,\), needs float32 \(2, 60\)"):
        bstf.linear(x, values, layout, residual=tf.ones([60]))
    graph = tf.function(lambda r: bstf.linear(x, values, layout, residual=r), input_signature=[tf.TensorSpec(None)])
    for shape in ([60], [1, 60]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="must have the same size and shape"):
            graph(tf.ones(shape))
    with pytest.raises(ValueError, match="feature_axis is 1, needs -1"):
        bstf.linear(x, values, layout, feature_axis=1)
    with tf.Graph().as_default():
        for shape, match in (
            ([None, 5], r"x is \[None, 5\], layout needs \[..., 90\]"),
            (None, "the rank of x is not known"),
            ([], r"x is \[\], layout needs"),
        ):
            with pytest.raises(ValueError, match=match):
                bstf.linear(v1.placeholder(tf.float32, shape), np.ones(layout.values_shape, np.float32), layout)


def test_what_a_graph_cannot_know_is_refused_when_it_runs(layout):
    function = tf.function(lambda x, values: bstf.linear(x, values, layout))
    function = function.get_concrete_function(tf.TensorSpec([None, None]), tf.TensorSpec(None))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"x is \[2, 5\], layout needs \[N, 90\]"):
        function(tf.ones([2, 5]), tf.ones(layout.values_shape))


def test_damaged_tables_are_refused(layout):
    from blocksparse.tensorflow import ops

    x, values, index = tf.ones([2, layout.in_features]), tf.ones(layout.values_shape), bstf.index_of(layout)
    for wrong, match in (
        (index[:10], "index has 10 words"),
        (index + 1, "this is no layout index"),
        (tf.reshape(index, [1, -1]), r"index is \[1, .*\], needs the int32 words"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            ops.linear(x=x, values=values, index=wrong, gates=[], bias=[])


def test_raw_calls_that_make_no_sense_are_refused(channels):
    """Of which no function of the front end is the author."""
    from blocksparse.tensorflow import ops

    b = channels.block_size
    values, index = tf.ones([channels.blocks, 1, b, b]), bstf.index_of(channels)
    x, dy = tf.ones([1, 4, channels.in_features]), tf.ones([1, 4, channels.out_features])
    shared = {"index": index, "gates": [], "channel_order": [], "channels_last": True}
    plain, far = [0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1 << 61, 1 << 61, 0]
    gradient = {**shared, "dy": dy, "values": values, "geometry": plain}
    for match, call in (
        (
            "gate_count is 2, needs 0 or 1",
            lambda: ops.linear(x=x, values=values[:, 0], index=index, gates=[dy] * 2, bias=[]),
        ),
        (
            "geometry has 3 numbers, needs 7, 13",
            lambda: ops.conv(x=x, values=values, bias=[], **shared, geometry=[0, 1, 1]),
        ),
        ("does not fit|too large|is", lambda: ops.conv(x=x, values=values, bias=[], **shared, geometry=far)),
        (r"dy is \[1, 4, 21\], needs sizes \[9\]", lambda: ops.conv_input_gradient(size=[9], **gradient)),
        (r"size is \[2\], needs \[1\]", lambda: ops.conv_input_gradient(size=[4, 4], **gradient)),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            call()


def test_xla_says_that_it_has_no_kernel(layout):
    function = tf.function(lambda x, w: bstf.linear(x, w, layout), jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="BlocksparseLinear"):
        function(tf.ones([2, layout.in_features]), tf.ones(layout.values_shape))
