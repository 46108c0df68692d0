import multiprocessing

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse import Layout, graphs
from blocksparse import numpy as ops

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def relative_error(got, expected):
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(got.astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-300)


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("b", [8, 16, 32, 64, 128])
def test_all_passes_against_dense(isa, rng, b, dtype):
    layout = Layout.from_graph("random(3,4,0.5)", b, seed=b, out_features=3 * b - 5, in_features=4 * b - 3)
    x, dy = normal(rng, (37, layout.in_features), dtype), normal(rng, (37, layout.out_features), dtype)
    w = normal(rng, layout.values_shape, dtype)
    dense, live = layout.to_dense(w).astype(np.float64), layout.to_dense(np.ones(w.shape)) != 0
    x64, dy64 = x.astype(np.float64), dy.astype(np.float64)
    assert relative_error(ops.linear_fprop(x, w, layout), x64 @ dense.T) < TOLERANCE[dtype]
    assert relative_error(ops.linear_dgrad(dy, w, layout), dy64 @ dense) < TOLERANCE[dtype]
    dw = ops.linear_wgrad(x, dy, layout)
    assert relative_error(layout.to_dense(dw), (dy64.T @ x64) * live) < TOLERANCE[dtype]
    assert relative_error(ops.linear_fprop(dy, w, layout.t()), dy64 @ dense) < TOLERANCE[dtype]


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_against_scipy(seed):
    rng = np.random.default_rng(seed)
    b = int(rng.choice([8, 16, 32]))
    rows, columns, n = rng.integers(1, 12, 3)
    layout = Layout.from_mask(rng.random((rows, columns)) < 0.4, b)
    w, x = rng.standard_normal(layout.values_shape), rng.standard_normal((n, columns * b))
    crow, col = layout.csr()
    bsr = scipy.sparse.bsr_array((w, col, crow), shape=(rows * b, columns * b))
    assert np.allclose(ops.linear_fprop(x, w, layout), (bsr @ x.T).T)


def test_features_first_is_answered_in_kind(layout, rng):
    x = rng.standard_normal((layout.in_features, 21)).astype(np.float32)
    w = rng.standard_normal(layout.values_shape).astype(np.float32)
    y = ops.linear_fprop(x.T, w, layout)
    assert y.T.flags.c_contiguous
    assert np.allclose(y, x.T @ layout.to_dense(w).T, atol=1e-4)


def test_epilogue_and_gates(layout, rng):
    x, w = rng.standard_normal((7, 90)), rng.standard_normal(layout.values_shape)
    bias, residual = rng.standard_normal(60), rng.standard_normal((7, 60))
    gates = rng.standard_normal(layout.blocks)
    gates[0] = 0
    w[0] = np.nan  # skipped
    live = np.where(np.isnan(w), 0, w) * gates[:, None, None]
    z = x @ layout.to_dense(live).T + bias + residual
    y = ops.linear_fprop(x, w, layout, bias=bias, residual=residual, activation="relu", gates=gates)
    assert np.allclose(y, np.maximum(z, 0))


def test_gradient_of_gates_and_lists_of_pairs(layout, rng):
    xs = [rng.standard_normal((n, 90)) for n in (5, 9, 1)]
    dys = [rng.standard_normal((len(x), 60)) for x in xs]
    w, gates = rng.standard_normal(layout.values_shape), rng.standard_normal(layout.blocks)
    s = sum(ops.linear_wgrad(x, dy, layout) for x, dy in zip(xs, dys, strict=True))
    out, gates_out = np.ones(layout.values_shape), np.ones(layout.blocks)
    got = ops.linear_wgrad(
        xs, dys, layout, values=np.nan_to_num(w), gates=gates, out=out, gates_out=gates_out, accumulate=True
    )
    assert got is out
    inside = layout.to_dense(np.ones(layout.values_shape))
    assert np.allclose(layout.to_dense(out), layout.to_dense(s * gates[:, None, None]) + inside * (out.max() != 0))
    masked = s * w  # s is 0 beyond the edges
    assert np.allclose(gates_out, masked.sum((1, 2)) + 1)


def test_results_go_where_asked(layout, rng):
    x, w = rng.standard_normal((7, 90)), rng.standard_normal(layout.values_shape)
    wide = np.zeros((7, 100))
    out = ops.linear_fprop(x, w, layout, out=wide[:, 20:80])
    assert np.shares_memory(out, wide)
    assert np.allclose(wide[:, 20:80], x @ layout.to_dense(w).T)
    assert not wide[:, :20].any()
    assert not wide[:, 80:].any()


def test_leading_dimensions(layout, rng):
    x, w = rng.standard_normal((2, 3, 1, 90)), rng.standard_normal(layout.values_shape)
    expected = x @ layout.to_dense(w).T
    assert np.allclose(ops.linear_fprop(x, w, layout), expected)
    assert np.allclose(ops.linear_fprop(x[0, 0, 0], w, layout), expected[0, 0, 0])
    assert ops.linear_fprop(x[:0], w, layout).shape == (0, 3, 1, 60)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": np.zeros((5, 80))}, ValueError, r"x is \[5, 80\], layout needs \[N, 90\]"),
        ({"x": np.zeros((5, 90), np.int32)}, ValueError, "an array of int32"),
        ({"x": np.zeros((5, 90), ">f8")}, ValueError, "byte order"),
        ({"x": np.zeros((5, 90), np.float32)}, ValueError, "w is f64, needs f32"),
        ({"x": np.zeros((5, 180))[:, ::2]}, ValueError, "needs contiguous features"),
        ({"x": [[1.0]]}, TypeError, "needs a NumPy array, got list"),
        ({"x": np.zeros((1,) * 6 + (180,))[..., ::2]}, ValueError, "7 dimensions"),
        ({"x": np.zeros((5, 90), [("a", "f8"), ("b", "i1")])["a"]}, ValueError, "needs whole elements"),
        ({"threads": 2**40}, ValueError, "threads is 1099511627776"),
        ({"gates": np.array(0.5)}, ValueError, "gates has 0 dimensions"),
        ({"bias": np.array(5.0)}, ValueError, "bias has 0 dimensions"),
        ({"residual": np.array(5.0)}, ValueError, "residual has 0 dimensions"),
        ({"values": np.zeros((2, 16, 16))}, ValueError, "w is "),
        ({"bias": np.zeros(61)}, ValueError, r"bias is \[61\], needs \[60\]"),
        ({"residual": np.zeros((5, 61))}, ValueError, "residual is"),
        ({"gates": np.zeros(3)}, ValueError, "gates is"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
        ({"out": np.zeros((4, 60))}, ValueError, "y is "),
        ({"threads": -1}, ValueError, "threads is -1"),
    ],
)
def test_says_what_is_wrong(layout, change, error, text):
    arguments = {"x": np.zeros((5, 90)), "values": np.zeros(layout.values_shape), **change}
    with pytest.raises(error, match=text):
        ops.linear_fprop(arguments.pop("x"), arguments.pop("values"), layout, **arguments)


def test_outputs_are_not_written_to_where_that_is_forbidden(layout):
    x, w, y = np.zeros((5, 90)), np.zeros(layout.values_shape), np.zeros((5, 60))
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ops.linear_fprop(x, w, layout, out=y)
    with pytest.raises(ValueError, match="dgates has 0 dimensions"):
        ops.linear_wgrad(x, np.zeros((5, 60)), layout, values=w, gates_out=np.array(0.0))


def test_layouts_are_layouts():
    with pytest.raises(TypeError, match="layout is a Report, needs"):
        ops.linear_dgrad(np.zeros((5, 8)), np.zeros((1, 8, 8)), graphs.report(graphs.dense(1, block_size=8)))


def test_many_leading_dimensions(layout, rng):
    x, w = rng.standard_normal((2, 1, 1, 3, 1, 2, 90)), rng.standard_normal(layout.values_shape)
    y = ops.linear_fprop(x, w, layout)
    np.testing.assert_array_equal(y.reshape(12, 60), ops.linear_fprop(x.reshape(12, 90), w, layout))


def test_output_may_not_overlap(layout):
    memory, w = np.zeros(5 * 90 + 5 * 60), np.zeros(layout.values_shape)
    x, out = memory[: 5 * 90].reshape(5, 90), memory[90 : 90 + 300].reshape(5, 60)
    with pytest.raises(ValueError, match="y overlaps x"):
        ops.linear_fprop(x, w, layout, out=out)


def _in_child(layout, queue):
    x = np.ones((64, layout.in_features), np.float32)
    queue.put(float(ops.linear_fprop(x, np.ones(layout.values_shape, np.float32), layout, threads=2).sum()))


def test_fork_after_use_does_not_hang():
    layout = Layout.from_graph("random(32,0.3)", 32)
    x, w = np.ones((64, layout.in_features), np.float32), np.ones(layout.values_shape, np.float32)
    expected = float(ops.linear_fprop(x, w, layout, threads=2).sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(layout, queue))
    child.start()
    try:
        assert queue.get(timeout=30) == expected
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()


def test_virtual_matrices_beyond_2_to_the_31(rng):
    """131072 x 131072 has 2^34 elements; memory follows the blocks, and offsets do not overflow."""
    side, b = 131072, 8
    last = side // b - 1
    layout = Layout.from_coordinates([0, last, last], [last, 0, last], (side // b, side // b), b)
    x, w = rng.standard_normal((3, side)).astype(np.float32), rng.standard_normal((3, b, b)).astype(np.float32)
    y = ops.linear_fprop(x, w, layout)
    assert np.allclose(y[:, :b], x[:, -b:] @ w[0].T, atol=1e-5)
    assert np.allclose(y[:, -b:], x[:, :b] @ w[1].T + x[:, -b:] @ w[2].T, atol=1e-5)
    assert not y[:, b:-b].any()


@pytest.mark.parametrize(("name", "out_of_order"), [("x", 0), ("values", 0), ("bias", 0), ("x", 1), ("x", 2)])
def test_what_has_other_strides_is_said_how_to_mend(name, out_of_order):
    layout = Layout.from_graph("ba(8,2)", 16)
    arrays = {
        "x": np.ones((4, 128), np.float32),
        "values": np.ones(layout.values_shape, np.float32),
        "bias": np.ones(128, np.float32),
    }
    views = (lambda a: a[::-1], lambda a: a[:, ::-1], lambda a: np.repeat(a, 2, 1)[:, ::2])
    given = {**arrays, name: views[out_of_order](arrays[name])}
    shown = {"values": "w"}.get(name, name)
    mend = rf"\[linear_fprop\] {shown} .*has strides .*: np\.ascontiguousarray\({shown}\) is taken"
    with pytest.raises(ValueError, match=mend):
        ops.linear_fprop(layout=layout, **given)
    mended = {**given, name: np.ascontiguousarray(given[name])}
    ops.linear_fprop(layout=layout, **mended)


def test_an_output_of_other_strides_cannot_be_mended_so():
    layout = Layout.from_graph("ba(8,2)", 16)
    x, w = np.ones((4, 128), np.float32), np.ones(layout.values_shape, np.float32)
    with pytest.raises(ValueError, match="y has strides") as refusal:
        ops.linear_fprop(x, w, layout, out=np.ones((4, 128), np.float32)[::-1])
    assert "ascontiguousarray" not in str(refusal.value)
