"""Convolutions and the LSTM on TensorFlow's tensors: the same bits as NumPy's, or as the core's by hand."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from conftest import make_channels  # noqa: E402
from tensorflow_cases import numeric_gradients, same, wide_of  # noqa: E402

import blocksparse.numpy as bsn  # noqa: E402
import blocksparse.tensorflow as bstf  # noqa: E402
from blocksparse import Layout  # noqa: E402

HOW = {
    1: {"kernel_size": 3, "stride": 2, "padding": ((2, 1),), "dilation": 2},
    2: {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, (1, 0)), "dilation": (1, 2)},
    3: {"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 1},
}
SIZES = {1: (9,), 2: (7, 6), 3: (3, 4, 3)}
TAPS = {1: 3, 2: 6, 3: 8}


def function_of(rank, transposed):
    return getattr(bstf, f"conv_transpose{rank}d" if transposed else f"conv{rank}d")


def geometry_of(rank, transposed):
    how = dict(HOW[rank])
    kernel = how.pop("kernel_size")
    return bsn.conv_geometry((kernel,) * rank if isinstance(kernel, int) else kernel, transposed=transposed, **how)


def to_first(images):
    return images.transpose(0, images.ndim - 1, *range(1, images.ndim - 1))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, tf.bfloat16.as_numpy_dtype])
def test_convolutions_and_gradients_are_numpys(rng, channels, rank, transposed, last, dtype):
    shape = (2, *SIZES[rank], channels.in_features) if last else (2, channels.in_features, *SIZES[rank])
    x = rng.standard_normal(shape).astype(dtype)
    b = channels.block_size
    values = rng.standard_normal((channels.blocks, TAPS[rank], b, b)).astype(dtype)
    bias = rng.standard_normal(channels.out_features).astype(dtype)
    gates = rng.random(channels.blocks).astype(wide_of(dtype))
    order = rng.permutation(channels.in_features).astype(np.int32)

    def call(x, values, bias, gates):
        more = {"gates": gates, "channel_order": order, "channels_last": last}
        return function_of(rank, transposed)(x, values, channels, bias, **more, **HOW[rank])

    geometry = geometry_of(rank, transposed)
    as_numpy = to_first if last else (lambda images: images)
    expected = bsn.conv_fprop(as_numpy(x), values, channels, geometry, bias=bias, gates=gates, channel_order=order)
    unknown = tf.TensorSpec([None] * (rank + 2), tf.as_dtype(dtype))
    specs = [unknown, *(tf.TensorSpec(a.shape, tf.as_dtype(a.dtype)) for a in (values, bias, gates))]
    for run in (call, tf.function(call, input_signature=specs)):
        given = [tf.constant(a) for a in (x, values, bias, gates)]
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = run(*given)
        same(as_numpy(y.numpy()), expected)
        dy = rng.standard_normal(y.shape).astype(dtype)
        dx, dw, dbias, dgates = tape.gradient(y, given, tf.constant(dy))
        more = {"gates": gates, "channel_order": order}
        same(as_numpy(dx.numpy()), bsn.conv_dgrad(as_numpy(dy), values, channels, geometry, SIZES[rank], **more))
        of_gates = np.empty(channels.blocks, wide_of(dtype))
        more |= {"values": values, "gates_out": of_gates}
        same(dw, bsn.conv_wgrad(as_numpy(x), as_numpy(dy), channels, geometry, **more))
        same(dgates, of_gates)
        total = as_numpy(dy).astype(np.float64).sum((0, *range(2, rank + 2)))
        np.testing.assert_allclose(dbias.numpy().astype(np.float64), total, rtol=0.01, atol=0.02)


def test_a_function_knows_what_can_be_known_of_the_result(channels):
    b = channels.block_size
    values = np.zeros((channels.blocks, 9, b, b), np.float32)
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None, 8, channels.in_features])
        y = bstf.conv2d(x, values, channels, kernel_size=3, stride=2, padding=1)
        assert y.shape.as_list() == [None, None, 4, channels.out_features]


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_gradients(rng, transposed):
    layout = Layout.from_graph("random(2,2,0.7)", 8, seed=1, out_features=13, in_features=16)
    x, values = rng.standard_normal((2, 5, 16)), rng.standard_normal((layout.blocks, 2, 8, 8))
    bias, gates = rng.standard_normal(13), rng.random(layout.blocks)

    def slopes(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            x, values, bias, gates = given
            y = function_of(1, transposed)(x, values, layout, bias, gates=gates, kernel_size=2, stride=2)
            total = tf.reduce_sum(tf.sin(y))
        return tf.add_n([tf.reduce_sum(tf.cos(gradient)) for gradient in tape.gradient(total, given)])

    numeric_gradients(slopes, (x, values, bias, gates), rng)


def test_says_what_is_wrong(channels):
    b = channels.block_size
    x, values = tf.ones([2, 7, channels.in_features]), tf.ones([channels.blocks, 3, b, b])
    invalid = tf.errors.InvalidArgumentError
    for match, given, more in (
        (r"images are \[7, 30\], needs n, channels and 1 sizes", (x[0], values), {}),
        (r"\[conv_fprop\] w is", (x, values[:, :2]), {}),
        (r"channel_order is \[2\], needs \[30\]", (x, values), {"channel_order": [0, 1]}),
        (r"x has 5 channels|layout needs|needs", (x[:, :, :5], values), {}),
    ):
        with pytest.raises(invalid, match=match):
            bstf.conv1d(*given, channels, kernel_size=3, **more)
    with pytest.raises(ValueError, match=r"stride is .*needs an integer, or 1 of them"):
        bstf.conv1d(x, values, channels, kernel_size=3, stride=(1, 2))
    with pytest.raises(TypeError, match="output_padding is of transposed"):
        bstf.conv1d(x, values, channels, kernel_size=3, output_padding=1)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="layout needs 30 channels"):
        bstf.conv1d(tf.ones([2, 7, 5]), np.ones(values.shape, np.float32), make_channels(), kernel_size=3)


# ---- The LSTM ------------------------------------------------------------------------------------------------------


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def lstm_by_hand(pre, weight, h, c, lengths):
    ys = []
    for t, z in enumerate(pre):
        i, f, g, o = np.split(z + h @ weight.T, 4, axis=1)
        running = (t < lengths)[:, None]
        c = np.where(running, sigmoid(f) * c + sigmoid(i) * np.tanh(g), c)
        h = np.where(running, sigmoid(o) * np.tanh(c), h)
        ys.append(np.where(running, h, 0))
    return np.stack(ys), h, c


def lstm_problem(rng):
    layout = Layout.from_graph("random(2,2,0.7)", 8, seed=1).stack(4)
    pre, values = rng.standard_normal((5, 3, 64)), 0.3 * rng.standard_normal(layout.values_shape)
    return layout, pre, values, rng.standard_normal((3, 16)), rng.standard_normal((3, 16))


def test_an_lstm_is_that_of_the_formulas(rng):
    layout, pre, values, h, c = lstm_problem(rng)
    lengths = np.array([5, 0, 3])
    expected = lstm_by_hand(pre, layout.to_dense(values), h, c, lengths)
    y, (h_last, c_last) = bstf.lstm(pre, values, layout, (h, c), lengths)
    for mine, theirs in zip((y, h_last, c_last), expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-10, atol=1e-12)
    run = tf.function(
        lambda pre: bstf.lstm(pre, values, layout)[0], input_signature=[tf.TensorSpec([None, None, 64], tf.float64)]
    )
    zeros = np.zeros((3, 16))
    expected = lstm_by_hand(pre, layout.to_dense(values), zeros, zeros, np.full(3, 5))[0]
    np.testing.assert_allclose(run(tf.constant(pre)).numpy(), expected, rtol=1e-10, atol=1e-12)
    assert run.get_concrete_function().output_shapes.as_list() == [None, None, 16]


def total(pre, values, h, c, layout, lengths=(5, 0, 3)):
    y, (h, c) = bstf.lstm(pre, values, layout, (h, c), lengths)
    return tf.reduce_sum(tf.sin(y)) + tf.reduce_sum(h * c)


def test_gradients_of_an_lstm(rng):
    layout, *given = lstm_problem(rng)
    numeric_gradients(lambda *given: total(*given, layout), given, rng)


def test_gradients_of_gradients_of_an_lstm(rng):
    """Eagerly, by forward mode, and in a session whose graph knows neither steps nor n."""
    layout, *given = lstm_problem(rng)
    counts, direction = np.array([5, 0, 3]), rng.standard_normal(given[1].shape)

    def slopes(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            value = total(*map(tf.convert_to_tensor, given), layout, counts)
        return sum(tf.reduce_sum(tf.sin(slope)) for slope in tape.gradient(value, given))

    numeric_gradients(slopes, given, rng)
    variables = [tf.Variable(one) for one in given]
    with tf.autodiff.ForwardAccumulator(variables[1], tf.constant(direction)) as forward, tf.GradientTape() as tape:
        value = total(*variables, layout, counts)
    slope = tf.reduce_sum(tape.gradient(value, variables)[1] * direction)
    np.testing.assert_allclose(forward.jvp(value), slope, rtol=1e-10)
    with tf.GradientTape() as tape:
        value = slopes(*variables)
    expected = [gradient.numpy() for gradient in tape.gradient(value, variables)]
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        fed = [v1.placeholder(tf.float64, [None, None, 64]), *map(tf.constant, given[1:])]
        counts = v1.placeholder(tf.int64, [None])
        first = v1.gradients(total(*fed, layout, counts), fed)
        second = v1.gradients(sum(tf.reduce_sum(tf.sin(slope)) for slope in first), fed)
        got = session.run(second, {fed[0]: given[0], counts: [5, 0, 3]})
        none = session.run(second, {fed[0]: given[0][:0], counts: [0, 0, 0]})
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)
    assert none[0].shape == (0, 3, 64)
    assert not none[1].any()
    for mine, side in zip(none[2:], given[2:], strict=True):  # the state stays: the slopes of sum(h c) are c and h
        np.testing.assert_allclose(mine, np.cos(side))


def test_an_lstm_says_what_is_wrong(rng):
    layout, pre, values, _, _ = lstm_problem(rng)
    with pytest.raises(ValueError, match=r"layout is 32 x 16, needs 4 hidden x hidden"):
        bstf.lstm(pre, values, Layout.from_graph("dense(4,2)", 8))
    with pytest.raises(ValueError, match=r"pre is \(5, 3, 60\), needs \[steps, n, 4, 16\]"):
        bstf.lstm(pre[..., :60], values, layout)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"lengths are \[2\], needs \[3\]"):
        bstf.lstm(pre, values, layout, lengths=[1, 2])
    with pytest.raises(TypeError, match=r"\[lstm\] lengths are float32, needs integers"):
        bstf.lstm(pre, values, layout, lengths=[1.5, 2.0, 1.0])
    with pytest.raises(TypeError, match=r"\[lstm\] state is a tuple, needs \(h, c\)"):
        bstf.lstm(pre, values, layout, (values,))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[lstm_forward\] lengths\[1\] is 6"):
        bstf.lstm(pre, values, layout, lengths=[1, 6, 2])
