"""TensorFlow's linear op in graphs, functions and saved models; its memory, threads, devices and tables."""

import gc
import os
import runpy
import subprocess
import sys
import weakref

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from conftest import make_layout  # noqa: E402
from side_by_side import two_processes  # noqa: E402
from tensorflow_cases import problem, same  # noqa: E402

import blocksparse.numpy as bsn  # noqa: E402
import blocksparse.tensorflow as bstf  # noqa: E402
from blocksparse import Layout  # noqa: E402
from blocksparse.tensorflow import tables  # noqa: E402

v1 = tf.compat.v1


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
/* Each stands in front of the core's function of its name, and writes down where three of its tensors are. */
#define IN_FRONT(name, parameters, arguments, first, second, third)                                                   \\
  bs_status name parameters {                                                                                         \\
    void* core = dlopen(getenv("BLOCKSPARSE_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);                                      \\
    bs_status (*function) parameters = dlsym(core, #name);                                                            \\
    FILE* file = fopen(getenv("PLACES"), "w");                                                                        \\
    fprintf(file, "%zu %zu %zu", (size_t)(first)->data, (size_t)(second)->data, (size_t)(third)->data);               \\
    fclose(file);                                                                                                     \\
    return function arguments;                                                                                        \\
  }
typedef const bs_tensor* T;
typedef const bs_layout_view* L;
IN_FRONT(bs_linear_fprop, (L l, T x, T w, T g, const bs_epilogue* e, T y, bs_workspace s, bs_stream t),
         (l, x, w, g, e, y, s, t), x, w, y)
IN_FRONT(bs_linear_dgrad, (L l, T dy, T w, T g, T dx, bs_workspace s, bs_stream t), (l, dy, w, g, dx, s, t), dy, w, dx)
IN_FRONT(bs_linear_wgrad, (L l, int64_t n, T x, T dy, T w, T g, int32_t a, T dw, T dg, bs_workspace s, bs_stream t),
         (l, n, x, dy, w, g, a, dw, dg, s, t), x, dy, dw)
IN_FRONT(bs_conv_fprop, (L l, const bs_conv_geometry* c, T x, T w, T g, const int32_t* o, const bs_epilogue* e, T y,
         bs_workspace s, bs_stream t), (l, c, x, w, g, o, e, y, s, t), x, w, y)
IN_FRONT(bs_lstm_forward, (L l, T pre, T w, T h, T c, const int64_t* n, const bs_lstm_outputs* o, bs_workspace s,
         bs_stream t), (l, pre, w, h, c, n, o, s, t), pre, w, o->y)
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
dy = tf.ones_like(x)
for given in (x, values):
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = bstf.linear(x, values, layout)
    made = tape.gradient(y, given, dy)
    assert of_the_core() == ([place(dy), place(values)] if given is x else [place(x), place(dy)]) + [place(made)]
images, filters = tf.reshape(x, [4, 4, 4, 128]), tf.random.normal([16, 1, 32, 32])
y = bstf.conv2d(images, filters, layout, kernel_size=1)
assert of_the_core() == [place(images), place(filters), place(y)]
pre, recurrent = tf.random.normal([3, 2, 4, 128]), tf.random.normal([64, 32, 32])
y, _ = bstf.lstm(pre, recurrent, layout.stack(4))
assert of_the_core() == [place(pre), place(recurrent), place(y)]
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


SHARED = make_layout()
COMPILED = tf.function(lambda x, values: bstf.linear(x, values, SHARED))


def products(thread):
    """Whether products and gradients, eager and of one function, have NumPy's bits, over and over."""
    x, values, _, _, dy = problem(np.random.default_rng(thread), SHARED)
    y = bsn.linear_fprop(x, values, SHARED)
    expected = [y, y, bsn.linear_dgrad(dy, values, SHARED), bsn.linear_wgrad(x, dy, SHARED)]
    for _ in range(20):
        given = tf.constant(x), tf.constant(values)
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = bstf.linear(*given, SHARED)
        made = [y, COMPILED(*given), *tape.gradient(y, given, dy)]
        if not all(np.array_equal(mine.numpy(), theirs) for mine, theirs in zip(made, expected, strict=True)):
            return False
    return True


def test_two_processes_of_eight_threads():
    assert two_processes("test_tensorflow_graphs", "products") == [True] * 16


def test_tensors_on_a_gpu_are_refused(layout, monkeypatch):
    class OnGpu:
        device = "/job:localhost/replica:0/task:0/device:GPU:0"

    monkeypatch.setattr(tables, "_has_gpu", True)
    with pytest.raises(ValueError, match=r"\[linear\] x is on /job.*GPU:0, and the op is for CPUs.*blocksparse.jax"):
        bstf.linear(OnGpu(), tf.ones(layout.values_shape), layout)
    with tf.Graph().as_default(), tf.device("/GPU:0"), pytest.raises(ValueError, match="the op is for CPUs"):
        bstf.linear(tf.ones([1, layout.in_features]), tf.ones(layout.values_shape), layout)
    bstf.linear(tf.ones([1, layout.in_features]), tf.ones(layout.values_shape), layout)  # on the CPU


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
