import itertools

import ml_dtypes
import numpy as np
import pytest

from blocksparse import Layout
from blocksparse import numpy as ops

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def relative_error(got, expected):
    return np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected)


def as_format(x, channels_last):
    if not channels_last:
        return x
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)


def dense_filter(layout, w):
    """[out, in, taps]."""
    return np.stack([layout.to_dense(np.ascontiguousarray(w[:, tap])) for tap in range(w.shape[1])], -1)


def reference(x, w, kernel, stride, dilation, before, out_size):
    """y of a convolution, by taps: x [n, c, *size], w [out, in, taps]."""
    padded = np.zeros((*x.shape[:2], *[4 * s + 40 for s in x.shape[2:]]))
    padded[(slice(None), slice(None), *[slice(b, b + s) for b, s in zip(before, x.shape[2:], strict=True)])] = x
    y = np.zeros((x.shape[0], w.shape[0], *out_size))
    for tap, place in enumerate(itertools.product(*[range(k) for k in kernel])):
        rows = [
            slice(p * d, p * d + (o - 1) * s + 1, s)
            for p, d, o, s in zip(place, dilation, out_size, stride, strict=True)
        ]
        y += np.einsum("oc,nc...->no...", w[:, :, tap], padded[(slice(None), slice(None), *rows)])
    return y


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "size"),
    [
        ((3, 3), 1, 1, 1, (9, 8)),
        ((3, 2), (2, 1), [(1, 0), (0, 2)], (1, 2), (10, 7)),
        ((5,), 2, 2, 1, (21,)),
        ((2, 3, 1), 1, [1, 0, 0], 1, (4, 5, 3)),
        ((1, 1), 1, 0, 1, (6, 5)),
    ],
)
def test_all_passes_against_dense(isa, rng, kernel, stride, padding, dilation, size, channels_last, dtype):
    b, rank = 8, len(kernel)
    layout = Layout.from_graph("random(3,4,0.5)", b, seed=1, out_features=3 * b - 5, in_features=4 * b - 3)
    geometry = ops.conv_geometry(kernel, stride=stride, padding=padding, dilation=dilation)
    out_size = ops.conv_output_size(geometry, size)
    strides = (stride,) * rank if isinstance(stride, int) else stride
    dilations = (dilation,) * rank if isinstance(dilation, int) else dilation
    before = [padding] * rank if isinstance(padding, int) else [p if isinstance(p, int) else p[0] for p in padding]
    w = normal(rng, (layout.blocks, int(np.prod(kernel)), b, b), dtype)
    x = as_format(normal(rng, (2, layout.in_features, *size), dtype), channels_last)
    dy = as_format(normal(rng, (2, layout.out_features, *out_size), dtype), channels_last)
    order = rng.permutation(layout.in_features).astype(np.int32)

    def product(x64, w64):
        return reference(x64[:, order], dense_filter(layout, w64), kernel, strides, dilations, before, out_size)

    x64, w64, dy64 = x.astype(np.float64), w.astype(np.float64), dy.astype(np.float64)
    y = ops.conv_fprop(x, w, layout, geometry, channel_order=order)
    assert y.strides[1] == (y.itemsize if channels_last else y.itemsize * np.prod(out_size))
    assert relative_error(y, product(x64, w64)) < TOLERANCE[dtype]
    # The other passes are the adjoints of the first: <dy, conv(x, w)> in another order of sums.
    dx = ops.conv_dgrad(dy, w, layout, geometry, size, channel_order=order).astype(np.float64)
    dw = ops.conv_wgrad(x, dy, layout, geometry, channel_order=order).astype(np.float64)
    u, v = rng.standard_normal(x.shape), rng.standard_normal(w.shape)
    scale = np.linalg.norm(dy64) * TOLERANCE[dtype]
    assert abs((dx * u).sum() - (dy64 * product(u, w64)).sum()) < scale * np.linalg.norm(product(u, w64))
    assert abs((dw * v).sum() - (dy64 * product(x64, v)).sum()) < scale * np.linalg.norm(product(x64, v))


def test_transposed_is_the_gradient_of_a_convolution(rng):
    layout = Layout.from_graph("random(3,2,0.7)", 16, seed=2)
    options = {"stride": 2, "padding": 1, "dilation": 1}
    forward, transposed = (ops.conv_geometry((3, 3), **options), ops.conv_geometry((3, 3), transposed=True, **options))
    w = rng.standard_normal((layout.blocks, 9, 16, 16))
    dy = rng.standard_normal((2, layout.out_features, 5, 6))
    dx = ops.conv_dgrad(dy, w, layout, forward, (9, 11))
    assert np.allclose(dx, ops.conv_fprop(dy, w, layout.t(), transposed))


def test_epilogue_gates_and_accumulation(rng):
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=3)
    geometry = ops.conv_geometry((3, 3), padding=1)
    x, w = rng.standard_normal((2, 16, 5, 5)), rng.standard_normal((layout.blocks, 9, 8, 8))
    bias, gates = rng.standard_normal(16), rng.standard_normal(layout.blocks)
    plain = ops.conv_fprop(x, w * gates[:, None, None, None], layout, geometry)
    y = ops.conv_fprop(x, w, layout, geometry, bias=bias, residual=x, activation="relu", gates=gates)
    assert np.allclose(y, np.maximum(plain + bias[:, None, None] + x, 0))
    dgates = np.empty(layout.blocks)
    dw = ops.conv_wgrad(x, y, layout, geometry, values=w, gates_out=dgates)
    assert np.allclose(dgates, (dw * w).sum((1, 2, 3)))
    twice = ops.conv_wgrad(x, y, layout, geometry, out=dw.copy(), accumulate=True)
    assert np.allclose(twice, 2 * dw)


def test_bad_input_is_explained(rng):
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=3)
    x = rng.standard_normal((2, 16, 5, 5))
    w = rng.standard_normal((layout.blocks, 9, 8, 8))
    geometry = ops.conv_geometry((3, 3), padding=1)
    with pytest.raises(ValueError, match=r"x is \[2, 15, 5, 5\], needs \[n, 16\] and 2 sizes"):
        ops.conv_fprop(x[:, :15], w, layout, geometry)
    with pytest.raises(ValueError, match=r"needs \[4, 9, 8, 8\]|needs \[3, 9, 8, 8\]"):
        ops.conv_fprop(x, w[:, :4], layout, geometry)
    with pytest.raises(ValueError, match="covers 9 pixels, more than the 5"):
        ops.conv_fprop(x, w, layout, ops.conv_geometry((9, 9)))
    with pytest.raises(ValueError, match="needs 1 to 3 sizes"):
        ops.conv_geometry((3, 3, 3, 3))
    with pytest.raises(ValueError, match="stride is \\(1, 2, 3\\), needs one number or 2"):
        ops.conv_geometry((3, 3), stride=(1, 2, 3))
    with pytest.raises(ValueError, match="needs \\[n, channels\\] and 2 sizes"):
        ops.conv_fprop(x[0], w, layout, geometry)
    with pytest.raises(TypeError, match="channel_order is a list, needs a NumPy array of int32"):
        ops.conv_fprop(x, w, layout, geometry, channel_order=list(range(16)))
    with pytest.raises(ValueError, match="channel_order is int64"):
        ops.conv_fprop(x, w, layout, geometry, channel_order=np.arange(16))
    with pytest.raises(ValueError, match="twice"):
        ops.conv_fprop(x, w, layout, geometry, channel_order=np.zeros(16, np.int32))
    with pytest.raises(ValueError, match=r"not contiguous|not channels-last"):
        ops.conv_fprop(x, w, layout, geometry, out=as_format(np.empty_like(x), True))
    with pytest.raises(ValueError, match="output_padding"):
        ops.conv_fprop(x, w, layout, ops.conv_geometry((3, 3), output_padding=1))


def test_arguments_of_another_kind_are_explained(rng):
    layout = Layout.from_graph("random(2,2,0.8)", 8, seed=3)
    x, w = rng.standard_normal((2, 16, 5, 5)), rng.standard_normal((layout.blocks, 9, 8, 8))
    geometry = ops.conv_geometry((3, 3), padding=1)
    calls = {
        "fprop": lambda x, layout, geometry: ops.conv_fprop(x, w, layout, geometry),
        "dgrad": lambda x, layout, geometry: ops.conv_dgrad(x, w, layout, geometry, (5, 5)),
        "wgrad": lambda x, layout, geometry: ops.conv_wgrad(x, x, layout, geometry),
    }
    for call in calls.values():
        with pytest.raises(TypeError, match="layout is a str, needs"):
            call(x, "ba(32,3)", geometry)
        with pytest.raises(TypeError, match="geometry is a tuple, needs what conv_geometry makes"):
            call(x, layout, (3, 3))
        with pytest.raises(TypeError, match="is a list, needs a NumPy array"):
            call(x.tolist(), layout, geometry)
        with pytest.raises(ValueError, match=r"an array of \(5,\), needs \[n, channels\] and 2 sizes"):
            call(x[0, 0, 0], layout, geometry)
    for size in ((5,), (5, 5, 5), 5, (5, 5.5)):
        with pytest.raises(ValueError, match="needs 2 integers"):
            ops.conv_output_size(geometry, size)


@pytest.mark.parametrize(
    ("kernel", "options", "text"),
    [
        (3, {}, "kernel is 3, needs 1 to 3 sizes"),
        ((1.5, 3), {}, "needs 1 to 3 sizes, integers"),
        ((3, 3), {"stride": 1.5}, "stride is 1.5, needs one number or 2"),
        ((3, 3), {"padding": 1.5}, "padding is 1.5, needs one number or 2"),
        ((3, 3), {"padding": (1, 2, 3)}, r"padding is \(1, 2, 3\), needs"),
        ((3, 3), {"padding": (1, (1, 2, 3))}, r"padding is \(1, \(1, 2, 3\)\), needs"),
    ],
)
def test_geometries_of_no_integers_are_explained(kernel, options, text):
    with pytest.raises(ValueError, match=text):
        ops.conv_geometry(kernel, **options)


def test_geometries_take_numbers_of_numpy():
    one = np.int64(1)
    geometry = ops.conv_geometry(np.asarray([3, 3]), stride=one, padding=(one, (one, 1)), dilation=[one, one])
    assert ops.conv_output_size(geometry, np.asarray([5, 6])) == (5, 6)


def test_a_residual_decides_the_order_where_x_fits_both():
    rng = np.random.default_rng(3)
    layout = Layout.from_mask(np.ones((1, 1), bool), 16, out_features=16, in_features=1)
    geometry = ops.conv_geometry((3,), padding=1)
    x, values = rng.standard_normal((2, 1, 5)), rng.standard_normal((1, 3, 16, 16))
    residual = np.moveaxis(rng.standard_normal((2, 5, 16)), -1, 1)
    y = ops.conv_fprop(x, values, layout, geometry, residual=residual)
    assert y.strides == residual.strides
    same = ops.conv_fprop(x, values, layout, geometry, residual=np.ascontiguousarray(residual))
    np.testing.assert_allclose(y, same, rtol=1e-12)
