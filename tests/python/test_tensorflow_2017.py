"""The classes of the 2017 release on TensorFlow: the announcement's program, and the original project's own test."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import blocksparse.ew  # noqa: E402
import blocksparse.norms  # noqa: E402
from blocksparse import graphs  # noqa: E402
from blocksparse.conv import BlocksparseConv, BlocksparseDeconv, cwise_linear  # noqa: E402
from blocksparse.matmul import BlocksparseMatMul, SparseProj, group_param_grads  # noqa: E402

v1 = tf.compat.v1
ROOT = Path(__file__).parents[2]
PAIRS = [(8, 0), (16, 0), (32, 0), (32, 1), (64, 1), (64, 0), (128, 0), (128, 1), (8, 1), (16, 1)]


def test_the_announcements_program():
    """In a process of its own: it turns eager execution off."""
    code = "import runpy, sys; result = runpy.run_path(sys.argv[1])['result']; print(len(result), result[0].shape)"
    command = [sys.executable, "-c", code, str(ROOT / "examples" / "announcement_2017.py")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "1 (64, 4096)"


def test_it_is_as_it_was_printed():
    """All names of the original are there, and nothing but the import differs."""
    lines = (ROOT / "examples" / "announcement_2017.py").read_text().splitlines()
    code = [line for line in lines if line and not line.startswith(("#", '"""'))]
    assert [line for line in code if "import" in line] == [
        "from blocksparse.matmul import BlocksparseMatMul",
        "import tensorflow.compat.v1 as tf",
        "import numpy as np",
    ]
    assert "bsmm = BlocksparseMatMul(sparsity, block_size=block_size)" in code
    assert "x = tf.placeholder(tf.float32, shape=[None, hidden_size])" in code
    assert "y = bsmm(x, w)" in code


# ---- The original's test of the class ------------------------------------------------------------------------------


def scale_free(nodes):
    """As the original's: each block linked with itself, the first ones with each other."""
    mask = graphs.barabasi_albert(nodes, 2, block_size=8).mask().astype(np.int32)
    mask[np.arange(nodes), np.arange(nodes)] = 1
    mask[:2, :2] = 1
    return mask


def dense(bsmm, w):
    full, b = np.zeros((bsmm.C, bsmm.K)), bsmm.bsize
    for i in range(bsmm.blocks):
        c, k = bsmm.block_coord(i)
        full[c * b : c * b + b, k * b : k * b + b] = w[i]
    return full


def blocks(bsmm, full):
    b = bsmm.bsize
    coords = (bsmm.block_coord(i) for i in range(bsmm.blocks))
    return np.stack([full[c * b : c * b + b, k * b : k * b + b] for c, k in coords])


def checkerboard(bsmm):
    """Gates of 1 and 0."""
    return np.array([1 - sum(bsmm.block_coord(i)) % 2 for i in range(bsmm.blocks)], np.float32)


def rounded(rng, scale, shape):
    return (scale * rng.standard_normal(shape)).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("block_size", "axis"), PAIRS)
def test_products_in_a_row(rng, block_size, axis, dtype):
    """Two products that share their weights, with y, dx and dw in one run, for several sizes of the minibatch."""
    bsmm = BlocksparseMatMul(scale_free(12), block_size=block_size, feature_axis=axis)
    weights = rounded(rng, 0.05, bsmm.w_shape)
    full = dense(bsmm, weights)
    with tf.Graph().as_default(), v1.Session() as session:
        n = v1.placeholder(tf.float32, [None, bsmm.C] if axis else [bsmm.C, None])
        e = v1.placeholder(tf.float32, [None, bsmm.K] if axis else [bsmm.K, None])
        w = tf.constant(weights)
        y = tf.cast(n, dtype)
        for _ in range(2):
            y = bsmm(y, tf.cast(w, dtype))
        y = tf.cast(y, tf.float32)
        dx, dw = v1.gradients(y, [n, w], e)
        for tokens in (64, 8, 1):
            x, dy = rounded(rng, 0.1, bsmm.i_shape(tokens)), rounded(rng, 0.1, bsmm.o_shape(tokens))
            got = session.run([y, dx, dw], {n: x, e: dy})
            x, dy = (x, dy) if axis else (x.T, dy.T)  # [tokens, features]
            hidden, back = x @ full, dy @ full.T
            expected = [hidden @ full, back @ full.T, blocks(bsmm, x.T @ back + hidden.T @ dy)]
            if not axis:
                expected[:2] = [expected[0].T, expected[1].T]
            bound = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}[dtype]
            for mine, theirs in zip(got, expected, strict=True):
                assert np.linalg.norm(mine - theirs) <= bound * np.linalg.norm(theirs)


@pytest.mark.parametrize(("block_size", "axis"), PAIRS)
def test_gated_and_normalized_weights(rng, block_size, axis):
    """A product whose blocks count once or not at all, and one of columns of length 1: y, and the gradients of both."""
    bsmm = BlocksparseMatMul(scale_free(8), block_size=block_size, feature_axis=axis)
    weights, gates = rounded(rng, 0.05, bsmm.w_shape), checkerboard(bsmm)
    x, dy = rounded(rng, 0.1, bsmm.i_shape(16)), rounded(rng, 0.1, bsmm.o_shape(16))
    with tf.Graph().as_default(), v1.Session() as session:
        tx, w, g = map(tf.constant, (x, weights, gates))
        gated, normal = bsmm(tx, w, gate=g), bsmm(tx, bsmm.l2_normalize(w))
        got = session.run([gated, *v1.gradients(gated, [tx, w, g], dy), normal, *v1.gradients(normal, [tx, w], dy)])
    if not axis:
        x, dy, got[0], got[1], got[4], got[5] = (a.T for a in (x, dy, got[0], got[1], got[4], got[5]))
    whole, live, s = dense(bsmm, weights), dense(bsmm, weights * gates[:, None, None]), x.T @ dy
    lengths = np.linalg.norm(whole, axis=0)
    unit = whole / lengths
    slope = (s - unit * (unit * s * (dense(bsmm, np.ones_like(weights)))).sum(0)) / lengths
    s_blocks = blocks(bsmm, s)
    expected = [x @ live, dy @ live.T, s_blocks * gates[:, None, None], (s_blocks * weights).sum((1, 2))]
    expected += [x @ unit, dy @ unit.T, blocks(bsmm, slope)]
    for mine, theirs in zip(got, expected, strict=True):
        assert np.linalg.norm(mine - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("z_order", [False, True])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_what_numpy_and_tensorflow_answer_is_the_same(rng, axis, z_order):
    bsmm = BlocksparseMatMul(rng.random((5, 7)) < 0.5, 16, feature_axis=axis, z_order=z_order)
    x, w, gate = (
        a.astype(np.float32) for a in (rng.random(bsmm.i_shape(9)), rng.random(bsmm.w_shape), rng.random(bsmm.blocks))
    )
    np.testing.assert_array_equal(bsmm(tf.constant(x), w, gate).numpy(), bsmm(x, w, gate))
    with tf.GradientTape() as tape:
        variables = [tf.Variable(a) for a in (x, w, gate)]
        y = bsmm(*variables)
    dx, dw, dgate = tape.gradient(y, variables)
    assert not any(isinstance(gradient, tf.IndexedSlices) for gradient in (dx, dw, dgate))
    tokens, dy = (x, y * 0 + 1) if axis else (x.T, tf.transpose(y) * 0 + 1)
    s = blocks(bsmm, tokens.T @ dy.numpy())
    np.testing.assert_allclose(dw.numpy(), s * gate[:, None, None], rtol=1e-4)
    np.testing.assert_allclose(dgate.numpy(), (s * w).sum((1, 2)), rtol=1e-4)
    full = dense(bsmm, w * gate[:, None, None])
    np.testing.assert_allclose(dx.numpy() if axis else dx.numpy().T, dy.numpy() @ full.T, rtol=1e-4)


def test_the_axis_is_inferred():
    bsmm = BlocksparseMatMul(np.ones((2, 3)), 8)
    w = np.ones(bsmm.w_shape, np.float32)
    assert bsmm(np.ones((5, 16), np.float32), w).shape == (5, 24)
    assert bsmm(np.ones((16, 5), np.float32), w).shape == (24, 5)
    assert bsmm(np.ones((16, 5, 2), np.float32), w).shape == (24, 5, 2)
    with tf.Graph().as_default():
        assert bsmm(v1.placeholder(tf.float32, [None, 16]), w).shape.as_list() == [None, 24]
        assert bsmm(v1.placeholder(tf.float32, [16, None]), w).shape.as_list() == [24, None]
        for shape, match in (
            ([None, None], r"x is \(None, None\), neither .* pass feature_axis=1 .* \[N, 16\], feature_axis=0"),
            ([16, 16], r"x is \(16, 16\), both could be the 16 features: pass feature_axis=1"),
            ([None, 24], r"x is \(None, 24\), neither"),
            (None, "x is of unknown shape"),
        ):
            with pytest.raises(ValueError, match=match):
                bsmm(v1.placeholder(tf.float32, shape), w)
    given = BlocksparseMatMul(np.ones((2, 3)), 8, feature_axis=1)
    with pytest.raises(ValueError, match=r"x is \(16, 5\), needs \[N, 16\]"):
        given(tf.ones([16, 5]), w)


def test_arguments_that_are_not_taken_say_what_to_do():
    bsmm = BlocksparseMatMul(np.ones((2, 3)), 8, feature_axis=1)
    x, w = tf.ones([4, 16]), tf.ones(bsmm.w_shape)
    for name in ("gate_grad", "dw_gated", "dw_dtype", "bench"):
        with pytest.raises(TypeError, match=f"{name} is given: "):
            bsmm(x, w, **{name: 1})
    with pytest.raises(NotImplementedError, match=r"tf.gradients adds the gradients .*linear_wgrad"):
        group_param_grads(w, 8)
    with pytest.raises(TypeError, match="x is a list, w is a EagerTensor, needs NumPy arrays"):
        bsmm([1.0], w)


# ---- Initializers and normalization --------------------------------------------------------------------------------


def test_initializers_of_variables():
    bsmm = BlocksparseMatMul(np.ones((3, 3)), 8, feature_axis=1)
    with tf.Graph().as_default(), v1.Session() as session:
        w = v1.get_variable("w", bsmm.w_shape, initializer=bsmm.identity_init())
        o = v1.get_variable("o", bsmm.w_shape, initializer=bsmm.ortho_init(seed=1))
        x = tf.constant(np.random.default_rng(0).random((4, 24)), tf.float32)
        y = bsmm(x, w)
        session.run(v1.global_variables_initializer())
        got, given, orthogonal = session.run([y, x, o])
    np.testing.assert_array_equal(got, given)
    np.testing.assert_allclose(dense(bsmm, orthogonal).T @ dense(bsmm, orthogonal), np.eye(24), atol=1e-6)
    sparse = BlocksparseMatMul(scale_free(6), 16)
    full = dense(sparse, sparse.ortho_init(seed=1)(sparse.w_shape, tf.float64))
    for k in range(6):
        column = full[:, 16 * k : 16 * k + 16]
        np.testing.assert_allclose(column.T @ column, np.eye(16), atol=1e-12)


@pytest.mark.parametrize("with_gain", [False, True])
def test_l2_normalize(rng, with_gain):
    bsmm = BlocksparseMatMul(scale_free(5), 8)
    w, gain = rng.standard_normal(bsmm.w_shape), rng.random(bsmm.K) if with_gain else None
    full = dense(bsmm, w)
    expected = full / np.linalg.norm(full, axis=0) * (1 if gain is None else gain)
    np.testing.assert_allclose(dense(bsmm, bsmm.l2_normalize(w, gain)), expected, rtol=1e-12)
    variable = tf.Variable(w)
    with tf.GradientTape() as tape:
        made = bsmm.l2_normalize(variable, gain)
        total = tf.reduce_sum(made**3)
    np.testing.assert_allclose(dense(bsmm, made.numpy()), expected, rtol=1e-12)
    slope = (tape.gradient(total, variable).numpy() * w).sum()
    assert slope == pytest.approx(0, abs=1e-10)  # the length of a column does not matter
    assert bsmm.l2_normalize(variable, dtype=tf.bfloat16).dtype == tf.bfloat16


# ---- Projections and convolutions ----------------------------------------------------------------------------------


def test_projections(rng):
    """As in the original's test: results and gradients."""
    projection = SparseProj(64, 16, seed=3)
    lut = projection.gather_lut
    assert lut.size == 16
    assert (np.diff(lut) > 0).all()
    x, y, ex, ey = (rng.standard_normal((side, 5)) for side in (64, 16, 64, 16))
    tx, ty = tf.Variable(x), tf.Variable(y)
    with tf.GradientTape(persistent=True) as tape:
        gathered, scattered = projection.gather(tx), projection.scatter(ty)
        added, multiplied = projection.scatter_add(tx, ty), projection.scatter_mul(tx, ty)
    zeros, plus, times = np.zeros_like(x), x.copy(), x.copy()
    zeros[lut] = y
    plus[lut] += y
    times[lut] *= y
    for mine, theirs in ((gathered, x[lut]), (scattered, zeros), (added, plus), (multiplied, times)):
        np.testing.assert_array_equal(mine.numpy(), theirs)
    for numpy_made, theirs in (
        (projection.gather(x), x[lut]),
        (projection.scatter(y), zeros),
        (projection.scatter_add(x, y), plus),
        (projection.scatter_mul(x, y), times),
    ):
        np.testing.assert_array_equal(numpy_made, theirs)
    spread = np.zeros_like(x)
    spread[lut] = ey
    np.testing.assert_array_equal(tape.gradient(gathered, tx, ey).numpy(), spread)
    dx, dy = tape.gradient(added, [tx, ty], ex)
    np.testing.assert_array_equal(dx.numpy(), ex)
    np.testing.assert_array_equal(dy.numpy(), ex[lut])
    dx, dy = tape.gradient(multiplied, [tx, ty], ex)
    expected = ex.copy()
    expected[lut] *= y
    np.testing.assert_allclose(dx.numpy(), expected)
    np.testing.assert_allclose(dy.numpy(), ex[lut] * x[lut])


def test_projections_say_what_is_wrong():
    assert SparseProj(100, proj_stride=3, block_size=8).gather_lut.tolist() == list(range(0, 96, 3))
    for arguments, match in (
        ({}, "needs nproj, proj_stride or gather_lut"),
        ({"nproj": 9}, "nproj is 9, needs 1 to nhidden, 8"),
        ({"proj_stride": 0}, "proj_stride is 0"),
        ({"gather_lut": [1, 1]}, "no list of different features"),
        ({"gather_lut": [8]}, "each 0 to 7"),
    ):
        with pytest.raises(ValueError, match=match):
            SparseProj(8, **arguments)
    with pytest.raises(ValueError, match=r"x is \[3, 2\], needs \[8, ...\]"):
        SparseProj(8, 4).gather(np.ones((3, 2)))


@pytest.mark.parametrize("kind", [BlocksparseConv, BlocksparseDeconv])
def test_convolutions_of_lists_of_channels(rng, kind):
    """Lists of odd lengths that overlap: the same numbers as NumPy's, and dense gradients."""
    lists = [(range(0, 12), range(0, 8)), (range(8, 20), range(8, 20)), (range(3, 9), range(4, 10))]
    conv = kind(lists, (3, 3), (6, 5), strides=(2, 1))
    F = rng.standard_normal(conv.sizeF).astype(np.float32)
    x = rng.standard_normal(conv.i_shape(2)).astype(np.float32)
    expected = conv(F, x)
    filters = tf.Variable(F)
    with tf.GradientTape() as tape:
        y = conv(filters, x)
        total = tf.reduce_sum(y)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)
    dF = tape.gradient(total, filters)
    direction = rng.standard_normal(conv.sizeF).astype(np.float32)
    slope = float((dF.numpy() * direction).sum())
    assert slope == pytest.approx(float(conv(direction, x).sum()), rel=1e-3, abs=1e-3)  # y is linear in F
    np.testing.assert_allclose(conv.l2_normalize(filters).numpy(), conv.l2_normalize(F), rtol=1e-6)


def test_what_was_documented_is_there_or_says_where():
    for name in ("BlocksparseMatMul", "SparseProj", "group_param_grads"):
        assert hasattr(blocksparse.matmul, name)
    for name in ("identity_init", "ortho_init", "l2_normalize", "i_shape", "o_shape", "block_coord"):
        assert callable(getattr(BlocksparseMatMul, name))
    x, a = tf.ones([2, 3, 4, 4]), tf.reshape([1.0, 2.0, 3.0], [1, 3, 1, 1])
    np.testing.assert_array_equal(cwise_linear(x, a, -a).numpy(), 0)
    with pytest.raises(NotImplementedError, match=r"edge_bias is no part of it: take blocksparse.torch.EdgeBias"):
        BlocksparseConv([(range(8), range(8))], (3, 3), (4, 4), edge_bias=True)
    for module, name, way in (
        (blocksparse.ew, "add", "tf.math.add"),
        (blocksparse.ew, "fused_lstm_gates", "blocksparse.tensorflow.lstm"),
        (blocksparse.norms, "layer_norm", "keras.layers.LayerNormalization"),
    ):
        with pytest.raises(NotImplementedError, match=f"{name} of the 2017 release is not there: take {way}"):
            getattr(module, name)
        assert not hasattr(module, "nothing")
    assert blocksparse.BlocksparseMatMul is BlocksparseMatMul  # import blocksparse as bs
    assert (blocksparse.SparseProj, blocksparse.BlocksparseConv) == (SparseProj, BlocksparseConv)
    for name, way in (("float_cast", "tf.cast"), ("gradients", "tf.gradients"), ("layer_norm", "keras.layers")):
        with pytest.raises(NotImplementedError, match=rf"\[blocksparse\] {name} of the 2017 .* take {way}"):
            getattr(blocksparse, name)
    assert not hasattr(blocksparse, "nothing")
