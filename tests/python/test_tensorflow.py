"""The linear op on TensorFlow's tensors: the same bits as NumPy's, eagerly, in functions, graphs and saved models."""

import gc
import os
import runpy
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from conftest import make_layout  # noqa: E402

import blocksparse.numpy as bsn  # noqa: E402
import blocksparse.tensorflow as bstf  # noqa: E402
from blocksparse import Layout  # noqa: E402
from blocksparse.tensorflow import tables  # noqa: E402

v1 = tf.compat.v1
DTYPES = [np.float32, np.float64, np.float16, tf.bfloat16.as_numpy_dtype]


def wide_of(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def problem(rng, layout, dtype=np.float32, n=7):
    """X, values, bias, gates and dy."""
    sides = ((n, layout.in_features), layout.values_shape, (layout.out_features,), (n, layout.out_features))
    x, values, bias, dy = (rng.standard_normal(side).astype(dtype) for side in sides)
    return x, values, bias, rng.random(layout.blocks).astype(wide_of(dtype)), dy


def same(mine, theirs):
    """To the bit, zeros and their signs, too."""
    mine, theirs = np.ascontiguousarray(mine), np.ascontiguousarray(theirs)
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_array_equal(mine.reshape(-1).view(np.uint8), theirs.reshape(-1).view(np.uint8))


def numeric_gradients(function, arguments, rng, delta=1e-5):
    """Fails unless the gradients are those of central differences along a random direction of each argument."""
    variables = [tf.Variable(argument) for argument in arguments]
    with tf.GradientTape() as tape:
        total = function(*variables)
    gradients = tape.gradient(total, variables, unconnected_gradients="zero")
    for gradient, variable in zip(gradients, variables, strict=True):
        direction = rng.standard_normal(variable.shape)
        before = variable.numpy()
        sides = []
        for sign in (1, -1):
            variable.assign(before + sign * delta * direction)
            sides.append(float(function(*variables)))
        variable.assign(before)
        slope = float((gradient.numpy() * direction).sum())
        assert slope == pytest.approx((sides[0] - sides[1]) / (2 * delta), rel=1e-5, abs=1e-7)


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


# ---- Graphs, functions, saved models -------------------------------------------------------------------------------


def test_graphs_and_sessions_of_version_1(rng, layout):
    x, values, bias, _, _ = problem(rng, layout)
    with tf.Graph().as_default(), v1.Session() as session:
        fed, w = v1.placeholder(tf.float32, [None, layout.in_features]), v1.get_variable("w", initializer=values)
        y = bstf.linear(fed, w, layout, bias)
        assert y.shape.as_list() == [None, layout.out_features]
        dx, dw = v1.gradients(y, [fed, w])
        assert dx.shape.as_list() == [None, layout.in_features]
        assert dw.shape.as_list() == list(layout.values_shape)
        (ddw,) = v1.gradients(tf.reduce_sum(dx**2), [w])

        def again(i, h):
            return i + 1, bstf.linear(tf.pad(h, [[0, 0], [0, layout.in_features - layout.out_features]]), w, layout)

        start, sizes = (0, fed[:, : layout.out_features]), (tf.TensorShape([]), tf.TensorShape([None, None]))
        _, looped = v1.while_loop(lambda i, _: i < 3, again, start, shape_invariants=sizes)
        after = bstf.linear(fed, w, layout)  # the tables were made in the loop
        step = v1.train.AdamOptimizer(1e-2).minimize(tf.reduce_sum(y**2))
        session.run(v1.global_variables_initializer())
        results = session.run([y, dx, dw, ddw, looped, after], {fed: x})
        same(results[0], bsn.linear_fprop(x, values, layout, bias=bias))
        same(results[1], bsn.linear_dgrad(np.ones_like(results[0]), values, layout))
        same(results[5], bsn.linear_fprop(x, values, layout))
        before = session.run(tf.reduce_sum(y**2), {fed: x})
        for _ in range(5):
            session.run(step, {fed: x})
        assert session.run(tf.reduce_sum(y**2), {fed: x}) < before


def test_a_loop_of_a_function_and_a_data_set(rng, layout):
    x, values, _, _, _ = problem(rng, layout)
    expected = bsn.linear_fprop(x, values, layout)
    mapped = tf.map_fn(lambda one: bstf.linear(one, values, layout), x, fn_output_signature=tf.float32)
    np.testing.assert_allclose(mapped.numpy(), expected, rtol=1e-5, atol=1e-5)
    rows = tf.data.Dataset.from_tensor_slices(x).batch(7).map(lambda batch: bstf.linear(batch, values, layout))
    same(next(iter(rows)), expected)


def test_the_example_runs():
    runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "..", "examples", "linear_tensorflow.py"))


def test_functions_of_unknown_batch_know_their_result(layout):
    signature = [tf.TensorSpec([None, None, layout.in_features]), tf.TensorSpec(layout.values_shape)]
    function = tf.function(lambda x, values: bstf.linear(x, values, layout), input_signature=signature)
    assert function.get_concrete_function().output_shapes.as_list() == [None, None, layout.out_features]


LOADED = """
import sys
import numpy as np
import tensorflow as tf
import blocksparse.tensorflow
model = tf.saved_model.load(sys.argv[1])
x = tf.constant(np.load(sys.argv[2]))
with tf.GradientTape() as tape:
    y = model(x)
dw, dbias = tape.gradient(y, [model.values, model.bias])
np.savez(sys.argv[3], y=y, dw=dw, dbias=dbias)
"""


def test_saved_models_come_back_in_another_process(rng, layout, tmp_path):
    x, values, bias, gates, _ = problem(rng, layout)

    class Model(tf.Module):
        def __init__(self):
            self.values, self.bias = tf.Variable(values), tf.Variable(bias)

        @tf.function(input_signature=[tf.TensorSpec([None, layout.in_features])])
        def __call__(self, x):
            return bstf.linear(x, self.values, layout, self.bias, gates=gates)

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "model"))
    np.save(tmp_path / "x.npy", x)
    files = [str(tmp_path / name) for name in ("model", "x.npy", "results.npz")]
    subprocess.run([sys.executable, "-c", LOADED, *files], check=True)
    results = np.load(tmp_path / "results.npz")
    same(results["y"], bsn.linear_fprop(x, values, layout, bias=bias, gates=gates))
    assert results["dbias"].tolist() == [len(x)] * layout.out_features
    same(results["dw"], bsn.linear_wgrad(x, np.ones_like(results["y"]), layout, values=values, gates=gates))


# ---- Memory, threads, devices --------------------------------------------------------------------------------------

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include "blocksparse/c_api.h"
/* Stands in front of the core's function, and writes down where its tensors are. */
bs_status bs_linear_fprop(const bs_layout_view* layout, const bs_tensor* x, const bs_tensor* w, const bs_tensor* gates,
                          const bs_epilogue* epilogue, const bs_tensor* y, bs_workspace workspace, bs_stream stream) {
  void* core = dlopen(getenv("BLOCKSPARSE_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
  bs_status (*function)(const bs_layout_view*, const bs_tensor*, const bs_tensor*, const bs_tensor*,
                        const bs_epilogue*, const bs_tensor*, bs_workspace, bs_stream) = dlsym(core, "bs_linear_fprop");
  FILE* file = fopen(getenv("PLACES"), "w");
  fprintf(file, "%zu %zu %zu", (size_t)x->data, (size_t)w->data, (size_t)y->data);
  fclose(file);
  return function(layout, x, w, gates, epilogue, y, workspace, stream);
}
"""

WATCHED = """
import os
import numpy as np
import tensorflow as tf
import blocksparse.tensorflow as bstf
from blocksparse import Layout

def place(tensor):
    return np.asarray(memoryview(tensor)).__array_interface__["data"][0]  # unlike that of tensor.numpy(), no copy

def of_the_core():
    return [int(text) for text in open(os.environ["PLACES"]).read().split()]

layout = Layout.from_graph("dense(4)", 32)
x, values = tf.random.normal([64, 128]), tf.random.normal(layout.values_shape)
y = bstf.linear(x, values, layout)
assert of_the_core() == [place(x), place(values), place(y)]
variable = tf.Variable(values)
bstf.linear(x, variable, layout)
assert of_the_core()[1] == place(variable.read_value())
y = tf.function(lambda x: bstf.linear(x, variable, layout))(x)
assert of_the_core() == [place(x), place(variable.read_value()), place(y)]
y = bstf.linear(tf.reshape(x, [128, 64]), values, layout, feature_axis=0)
assert of_the_core() == [place(x), place(values), place(y)]
"""


def test_nothing_is_copied(tmp_path):
    from blocksparse._core import library

    (tmp_path / "shim.c").write_text(SHIM)
    include = os.path.join(os.path.dirname(__file__), "..", "..", "include")
    shim = tmp_path / "shim.so"
    command = ["cc", "-shared", "-fPIC", f"-I{include}", str(tmp_path / "shim.c"), "-o", str(shim), "-ldl"]
    subprocess.run(command, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "PLACES": str(tmp_path / "places"),
        "BLOCKSPARSE_LIBRARY": str(library.library_path()),
    }
    subprocess.run([sys.executable, "-c", WATCHED], check=True, env=environment)


def test_threads_side_by_side(rng, layout):
    x, values, _, _, _ = problem(rng, layout, n=64)
    expected, wrong = bsn.linear_fprop(x, values, layout), []
    fresh = Layout.from_pattern(layout.pattern())

    def work():
        for _ in range(50):
            y = bstf.linear(tf.constant(x), tf.constant(values), fresh)
            if not (y.numpy() == expected).all():
                wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_on_a_gpu_are_refused(layout, monkeypatch):
    class OnGpu:
        device = "/job:localhost/replica:0/task:0/device:GPU:0"

    monkeypatch.setattr(tables, "_has_gpu", True)
    with pytest.raises(ValueError, match=r"\[linear\] x is on /job.*GPU:0, and the op is for CPUs.*blocksparse.jax"):
        bstf.linear(OnGpu(), tf.ones(layout.values_shape), layout)
    with tf.Graph().as_default(), tf.device("/GPU:0"), pytest.raises(ValueError, match="the op is for CPUs"):
        bstf.linear(tf.ones([1, layout.in_features]), tf.ones(layout.values_shape), layout)
    bstf.linear(tf.ones([1, layout.in_features]), tf.ones(layout.values_shape), layout)  # on the CPU


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


def test_python_says_what_is_wrong(layout):
    x, values = tf.ones([2, layout.in_features]), tf.ones(layout.values_shape)
    with pytest.raises(TypeError, match=r"\[linear\] layout is a int"):
        bstf.linear(x, values, 3)
    with pytest.raises(ValueError, match="activation is 'tanh', needs one of none, relu"):
        bstf.linear(x, values, layout, activation="tanh")
    with pytest.raises(ValueError, match=r"residual is float32 \(60,\), needs float32 \(2, 60\)"):
        bstf.linear(x, values, layout, residual=tf.ones([60]))
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


def test_tables_are_made_once(layout):
    fresh = Layout.from_pattern(make_layout().pattern())
    assert bstf.index_of(fresh) is bstf.index_of(fresh) is bstf.index_of(fresh.t())
    with tf.Graph().as_default() as graph:
        assert bstf.index_of(fresh).name == bstf.index_of(fresh).name
        inner = tf.function(lambda: bstf.linear(tf.ones([1, 90]), tf.ones(fresh.values_shape), fresh))
        with v1.Session() as session:  # not the eager one, although there is one
            assert session.run(inner()).shape == (1, 60)
    forgotten = weakref.ref(graph)
    del graph, inner, session
    gc.collect()
    assert forgotten() is None
