"""The layers of Keras on the backend that Keras has here: results, shapes, training, configurations, files, pruning."""

import os

import numpy as np
import pytest

pytest.importorskip("keras")
if "KERAS_BACKEND" not in os.environ:  # what is installed here
    from importlib.util import find_spec

    os.environ["KERAS_BACKEND"] = next(name for name in ("tensorflow", "torch", "jax") if find_spec(name))

import keras

import blocksparse.keras as bsk
import blocksparse.numpy as bsn
from blocksparse import Layout
from blocksparse.keras import layouts


def numpy_of(tensor):
    return keras.ops.convert_to_numpy(tensor)


def built(layer, shape):
    if not layer.built:
        layer.build(shape)
    return layer


# ---- Dense ---------------------------------------------------------------------------------------------------------


def test_dense_is_the_product(rng, layout):
    layer = built(bsk.BlockSparseDense(60, layout, activation="relu", bias_initializer="random_normal"), (None, 90))
    x = rng.standard_normal((2, 3, 90)).astype(np.float32)
    kernel, bias = numpy_of(layer.kernel), numpy_of(layer.bias)
    expected = bsn.linear_fprop(x, kernel, layout, bias=bias, activation="relu")
    np.testing.assert_array_equal(numpy_of(layer(x)), expected)
    assert layer.compute_output_shape((None, 3, 90)) == (None, 3, 60)
    assert kernel.shape == layout.values_shape


def test_gates_scale_blocks(rng, layout):
    layer = built(bsk.BlockSparseDense(60, layout, gates=True), (None, 90))
    gates = rng.integers(0, 2, layout.blocks).astype(np.float32)
    layer.gates.assign(gates)
    x = rng.standard_normal((5, 90)).astype(np.float32)
    np.testing.assert_array_equal(numpy_of(layer(x)), bsn.linear_fprop(x, numpy_of(layer.kernel), layout, gates=gates))
    live = int(gates.sum())
    assert layer.sparsity == pytest.approx(1 - live / 24)
    assert len(layer.trainable_weights) == 2


def test_a_layout_is_drawn():
    layer = built(bsk.BlockSparseDense(96, density=0.3, block_size=8, seed=4), (None, 80))
    assert layer.layout.sizes == (96, 80)
    assert layer.layout.mask().sum(1).tolist() == [3] * 12
    again = built(bsk.BlockSparseDense(96, density=0.3, block_size=8, seed=4), (None, 80))
    assert layer.layout == again.layout


@pytest.mark.parametrize("initializer", ["glorot_uniform", "he_normal", "lecun_uniform"])
def test_initializers_know_the_fans_of_the_layout(initializer):
    layout = Layout.from_graph("random(40,60,0.04)", 64, seed=0)
    layer = built(bsk.BlockSparseDense(40 * 64, layout, kernel_initializer=initializer), (None, 60 * 64))
    fan_in, fan_out = 0.04 * 60 * 64, 0.04 * 40 * 64
    expected = {"glorot_uniform": 2 / (fan_in + fan_out), "he_normal": 2 / fan_in, "lecun_uniform": 1 / fan_in}
    assert float(np.var(numpy_of(layer.kernel))) == pytest.approx(expected[initializer], rel=0.03)


def test_dense_layers_are_pruned_into_it(rng):
    dense = built(keras.layers.Dense(40, activation="tanh"), (None, 50))
    dense.bias.assign(rng.standard_normal(40))
    x = rng.standard_normal((3, 50)).astype(np.float32)
    whole = bsk.BlockSparseDense.from_dense(dense, density=1.0, block_size=16)
    np.testing.assert_allclose(numpy_of(whole(x)), numpy_of(dense(x)), rtol=1e-4, atol=1e-5)
    half = bsk.BlockSparseDense.from_dense(dense, density=0.5, block_size=16, gates=True)
    weight = numpy_of(dense.kernel).T
    norms = np.pad(weight**2, ((0, 8), (0, 14))).reshape(3, 16, 4, 16).sum((1, 3))
    assert half.layout.blocks == 6
    assert norms[half.layout.mask()].min() > norms[~half.layout.mask()].max()
    np.testing.assert_array_equal(layouts.blocks_of(weight, half.layout), numpy_of(half.kernel))
    with pytest.raises(ValueError, match="needs density or layout, one of them"):
        bsk.BlockSparseDense.from_dense(dense)
    with pytest.raises(ValueError, match="is not built"):
        bsk.BlockSparseDense.from_dense(keras.layers.Dense(3), density=0.5)


# ---- Convolutions and the LSTM beside Keras's own ------------------------------------------------------------------

DENSE = {1: keras.layers.Conv1D, 2: keras.layers.Conv2D, 3: keras.layers.Conv3D}
SPARSE = {1: bsk.BlockSparseConv1D, 2: bsk.BlockSparseConv2D, 3: bsk.BlockSparseConv3D}


@pytest.mark.parametrize(
    ("padding", "stride", "dilation"),
    [("valid", 1, 2), ("valid", 2, 1), ("same", 1, 1), ("same", 2, 1), ("causal", 1, 2)],
)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_are_kerass(rng, rank, padding, stride, dilation):
    if padding == "causal" and rank > 1:
        with pytest.raises(ValueError, match="padding is 'causal'"):
            SPARSE[rank](8, 3, padding="causal")
        return
    shape = (2, *(7, 6, 5)[:rank], 16)
    how = {"padding": padding, "strides": stride, "dilation_rate": dilation, "data_format": "channels_last"}
    mine = built(SPARSE[rank](24, 3, Layout.from_graph("dense(3,2)", 8), **how), shape)
    theirs = built(DENSE[rank](24, 3, **how), shape)
    kernel = numpy_of(theirs.kernel).reshape(3**rank, 2, 8, 3, 8)  # taps, in, out
    mine.kernel.assign(kernel.transpose(3, 1, 0, 4, 2).reshape(6, 3**rank, 8, 8))
    x = rng.standard_normal(shape).astype(np.float32)
    y, expected = numpy_of(mine(x)), numpy_of(theirs(x))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert mine.compute_output_shape(shape) == expected.shape
    unknown = (None, *(None,) * rank, 16)
    if stride == 1:
        sizes = theirs.compute_output_shape(unknown)
        assert mine.compute_output_shape(unknown) == tuple(sizes)


def test_channels_first(rng, channels):
    last = built(bsk.BlockSparseConv2D(21, 3, channels, data_format="channels_last"), (None, 6, 5, 30))
    first = built(bsk.BlockSparseConv2D(21, 3, channels, data_format="channels_first"), (None, 30, 6, 5))
    first.kernel.assign(numpy_of(last.kernel))
    x = rng.standard_normal((2, 6, 5, 30)).astype(np.float32)
    y = numpy_of(first(x.transpose(0, 3, 1, 2)))
    np.testing.assert_array_equal(y.transpose(0, 2, 3, 1), numpy_of(last(x)))
    assert first.compute_output_shape((None, 30, 6, 5)) == (None, 21, 4, 3)


def test_the_lstm_is_kerass(rng):
    units, x = 16, rng.standard_normal((3, 5, 7)).astype(np.float32)
    theirs = built(keras.layers.LSTM(units, return_sequences=True, return_state=True), x.shape)
    whole = Layout.from_graph("dense(2)", 8)
    mine = built(bsk.BlockSparseLSTM(units, whole, return_sequences=True, return_state=True), x.shape)
    input_kernel, recurrent, bias = map(numpy_of, theirs.weights)
    np.testing.assert_array_equal(numpy_of(mine.bias), bias)  # ones for the forget gate
    mine.input_kernel.assign(input_kernel)
    mine.kernel.assign(layouts.blocks_of(recurrent.T, mine.layout))
    state = [rng.standard_normal((3, units)).astype(np.float32) for _ in "hc"]
    for given in ({}, {"initial_state": state}):
        for one, other in zip(mine(x, **given), theirs(x, **given), strict=True):
            np.testing.assert_allclose(numpy_of(one), numpy_of(other), rtol=1e-4, atol=1e-5)
    y, h, _ = mine(x, lengths=np.array([5, 2, 0]))
    assert not numpy_of(y)[1, 2:].any()
    np.testing.assert_array_equal(numpy_of(y)[1, 1], numpy_of(h)[1])
    last = bsk.BlockSparseLSTM(units, density=1.0, block_size=8)
    assert last(x).shape == (3, units)
    assert last.layout.sizes == (64, 16)


# ---- Models --------------------------------------------------------------------------------------------------------


def small_model(**options):
    size = {"block_size": 8, "density": 0.5}
    inputs = keras.Input((6, 6, 16))
    x = bsk.BlockSparseConv2D(16, 3, padding="same", activation="relu", data_format="channels_last", **size)(inputs)
    x = keras.layers.Reshape((36, 16))(x)
    x = bsk.BlockSparseConv1D(16, 4, strides=4, data_format="channels_last", **size)(x)
    x = bsk.BlockSparseLSTM(16, **size)(x)
    return keras.Model(inputs, bsk.BlockSparseDense(8, **size, **options)(x))


def test_a_model_learns_is_saved_and_comes_back(rng, tmp_path):
    model = small_model(kernel_regularizer="l2", bias_constraint="non_neg")
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = rng.standard_normal((64, 6, 6, 16)).astype(np.float32), rng.integers(0, 8, 64)
    losses = model.fit(x, y, batch_size=16, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.05
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    loaded.fit(x, y, batch_size=16, epochs=1, verbose=0)  # with its optimizer
    model.save_weights(tmp_path / "model.weights.h5")
    loaded.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)


@pytest.mark.parametrize("given", ["layout", "density"])
def test_configurations_go_round(layout, given):
    how = {"layout": layout} if given == "layout" else {"density": 0.3, "block_size": 16, "seed": 5}
    layer = bsk.BlockSparseDense(60, gates=True, activation="gelu", kernel_regularizer="l2", name="mine", **how)
    for _ in range(2):  # before it is built, and after
        config = layer.get_config()
        again = bsk.BlockSparseDense.from_config(config)
        assert again.get_config() == config
        built(again, (None, 90))
        built(layer, (None, 90))
        assert again.layout == layer.layout
    conv = bsk.BlockSparseConv2D(8, (3, 2), padding="same", strides=(1, 2), block_size=8)
    assert bsk.BlockSparseConv2D.from_config(conv.get_config()).get_config() == conv.get_config()
    lstm = bsk.BlockSparseLSTM(32, return_state=True, unit_forget_bias=False)
    assert bsk.BlockSparseLSTM.from_config(lstm.get_config()).get_config() == lstm.get_config()


def test_mixed_precision(rng):
    policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
    layer = bsk.BlockSparseDense(16, density=0.5, block_size=8, gates=True, dtype=policy)
    model = keras.Sequential([keras.Input((32,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = numpy_of(built(layer, (None, 32)).kernel)
    model.fit(rng.standard_normal((32, 32)), np.ones((32, 1)), verbose=0)
    assert layer.kernel.dtype == "float32"
    assert keras.backend.standardize_dtype(layer(np.ones((1, 32), np.float32)).dtype) == "bfloat16"
    assert not np.array_equal(numpy_of(layer.kernel), before)


# ---- What is wrong -------------------------------------------------------------------------------------------------


def test_weights_of_other_blocks_are_refused(layout):
    other = Layout.from_graph("random(4,6,0.4)", 16, seed=4, out_features=60, in_features=90)
    mine, theirs = (built(bsk.BlockSparseDense(60, one), (None, 90)) for one in (layout, other))
    store = {}
    theirs.save_own_variables(store)
    with pytest.raises(ValueError, match=r"weights are of Layout\(60 x 90.*needs Layout"):
        mine.load_own_variables(store)
    del store["pattern"]
    with pytest.raises(ValueError, match="of no block-sparse layer"):
        mine.load_own_variables(store)


def test_says_what_is_wrong(layout):
    for arguments, error, match in (
        ((60, 3), TypeError, "layout is a int, needs a blocksparse.Layout"),
        ((60, "abc"), ValueError, "layout is text, but no pattern"),
    ):
        with pytest.raises(error, match=match):
            bsk.BlockSparseDense(*arguments)
    with pytest.raises(ValueError, match=r"density is 1.5, needs 0 < density <= 1"):
        bsk.BlockSparseDense(8, density=1.5)
    with pytest.raises(ValueError, match=r"layout is \(60, 90\), needs \(60, 80\) \(out, in\)"):
        built(bsk.BlockSparseDense(60, layout), (None, 80))
    with pytest.raises(ValueError, match="units is 20, needs a multiple of the block size, 8"):
        bsk.BlockSparseLSTM(20, block_size=8)
    with pytest.raises(ValueError, match="activation or gates are given"):
        bsk.BlockSparseLSTM(16, gates=True, block_size=8)
    with pytest.raises(ValueError, match=r"kernel_size is .*needs an integer"):
        bsk.BlockSparseConv2D(8, (3, 3, 3))
    with pytest.raises(ValueError, match="is not built yet"):
        _ = bsk.BlockSparseDense(8).sparsity
    with pytest.raises(TypeError, match=r"\[BlockSparseDense\] units is 8.5, needs an integer"):
        bsk.BlockSparseDense(8.5)
    for layer, shape in (
        (bsk.BlockSparseDense(8), (None, None)),
        (bsk.BlockSparseDense(8), ()),
        (bsk.BlockSparseConv2D(8, 3), (None, 5, 5)),
        (bsk.BlockSparseLSTM(32), (None, 5)),
    ):
        with pytest.raises(ValueError, match=r"inputs are .*, needs .* ax.*, and a known size of axis -1"):
            layer.build(shape)
    with pytest.raises(ValueError, match=r"expected axis -1 of input shape to have value 90"):
        built(bsk.BlockSparseDense(60, layout), (None, 90))(np.ones((2, 80), np.float32))
    masked = keras.layers.Masking()(np.ones((2, 3, 8), np.float32))
    with pytest.raises(ValueError, match="the inputs have a mask, which it does not take: pass lengths"):
        bsk.BlockSparseLSTM(16, block_size=8)(masked)


def test_says_what_is_wrong_with_a_dense_layer():
    dense = built(keras.layers.Dense(16), (None, 16))
    with pytest.raises(ValueError, match=r"density is 1.5, needs 0 to 1"):
        bsk.BlockSparseDense.from_dense(dense, density=1.5, block_size=8)
    with pytest.raises(TypeError, match=r"dense is .*, needs a keras.layers.Dense"):
        bsk.BlockSparseDense.from_dense(keras.layers.Conv2D(3, 3), density=0.5)


# ---- Pruning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 3])
def test_pruning_while_fitting(rng, at_once, tmp_path):
    if at_once > 1 and keras.backend.backend() == "torch":
        pytest.skip("Keras runs one step at once on PyTorch")
    layers = [bsk.BlockSparseDense(32, density=1.0, block_size=8, gates=True, activation="relu") for _ in range(2)]
    inner = keras.Sequential([keras.Input((32,)), layers[1]])
    model = keras.Sequential(
        [keras.Input((32,)), layers[0], keras.layers.LayerNormalization(), inner, keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", steps_per_execution=at_once)
    schedule = bsk.PolynomialDecay(final_sparsity=0.75, begin_step=2, end_step=10, frequency=2)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            seen.append([layer.sparsity for layer in layers])

    x, y = rng.standard_normal((96, 32)).astype(np.float32), rng.standard_normal((96, 1))
    callback = bsk.PruneBlocks(schedule)
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[callback, Look()])
    assert seen[-1] == [pytest.approx(np.floor(schedule.sparsity(6) * 16 + 0.5) / 16)] * 2
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[callback, Look()])  # it goes on
    assert seen[-1] == [0.75, 0.75]
    assert np.diff(np.array(seen), axis=0).min() >= 0
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "pruned.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "pruned.keras").predict(x, verbose=0), expected)
    stripped = bsk.strip_pruning(model)
    np.testing.assert_allclose(stripped.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
    assert stripped.layers[0].layout.blocks == stripped.layers[2].layers[0].layout.blocks == 4
    assert stripped.layers[0].gates is None
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)  # which is a model of its own


def test_the_smallest_blocks_go_first(rng, layout):
    layer = built(bsk.BlockSparseDense(60, layout, gates=True), (None, 90))
    kernel = numpy_of(layer.kernel)
    bsk.prune(layer, 0.3)
    gone = numpy_of(layer.gates) == 0
    norms = np.square(kernel).sum((1, 2))
    assert gone.sum() == 3
    assert norms[gone].max() < norms[~gone].min()
    layer.kernel.assign(rng.standard_normal(kernel.shape))
    bsk.prune(layer, 0.5)
    assert (numpy_of(layer.gates) == 0)[gone].all()
    bsk.prune(layer, 0.1)  # what is gone stays gone
    assert (numpy_of(layer.gates) == 0).sum() == 5


def test_pruning_says_what_is_wrong(layout):
    schedule = bsk.PolynomialDecay(final_sparsity=0.5, begin_step=0, end_step=10)
    with pytest.raises(ValueError, match="has no gates: make it with gates=True"):
        bsk.PruneBlocks(schedule, [bsk.BlockSparseDense(60, layout)])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no block-sparse layer with gates"):
        model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0, callbacks=[bsk.PruneBlocks(schedule)])
