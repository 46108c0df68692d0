"""Convolutions for JAX."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
from conftest import make_channels
from jax.test_util import check_grads
from test_jax import close, same, x64  # noqa: F401

import blocksparse.jax as bsj
import blocksparse.numpy as bsn
from blocksparse import Layout

LAYOUT = make_channels()  # 30 channels to 21
FUNCTIONS = {
    (1, False): bsj.conv1d,
    (2, False): bsj.conv2d,
    (3, False): bsj.conv3d,
    (1, True): bsj.conv_transpose1d,
    (2, True): bsj.conv_transpose2d,
    (3, True): bsj.conv_transpose3d,
}
SIZES = {1: (9,), 2: (5, 6), 3: (3, 4, 3)}
KERNELS = {1: (3,), 2: (2, 3), 3: (2, 1, 3)}


def images(rng, rank, last=True, n=2, dtype="float32"):
    size, blocks, b = SIZES[rank], LAYOUT.blocks, LAYOUT.block_size
    x = rng.standard_normal((n, *size, 30) if last else (n, 30, *size))
    w = rng.standard_normal((blocks, int(np.prod(KERNELS[rank])), b, b))
    bias, gates = rng.standard_normal(21), rng.integers(0, 3, blocks)
    given = [np.asarray(jnp.asarray(a).astype(dtype)) for a in (x, w, bias)]
    return *given, gates.astype("float64" if dtype == "float64" else "float32")


def as_core(x, last):
    return np.moveaxis(x, -1, 1) if last else x


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("last", [True, False])
def test_is_numpys_to_the_bit(rng, rank, transposed, last):
    x, w, bias, gates = images(rng, rank, last)
    order = rng.permutation(30)
    options = {"stride": 2, "padding": [(1, 0)] * rank, "dilation": 1}
    geometry = bsn.conv_geometry(KERNELS[rank], transposed=transposed, **options)
    given = {"bias": bias, "gates": gates, "activation": "silu"}
    expected = bsn.conv_fprop(as_core(x, last), w, LAYOUT, geometry, channel_order=order.astype("int32"), **given)
    f = FUNCTIONS[rank, transposed]
    options |= {"kernel_size": KERNELS[rank], "channels_last": last, "channel_order": order}
    y, pull = jax.vjp(lambda x, w: f(x, w, LAYOUT, bias, gates=gates, **options), x, w)
    same(as_core(f(x, w, LAYOUT, bias, gates=gates, activation="silu", **options), last), expected)
    same(f(x[0], w, LAYOUT, bias, gates=gates, **options), f(x[:1], w, LAYOUT, bias, gates=gates, **options)[0])
    dy = rng.standard_normal(y.shape).astype("float32")
    dx, dw = pull(dy)
    more = {"channel_order": order.astype("int32"), "gates": gates}
    same(as_core(dx, last), bsn.conv_dgrad(as_core(dy, last), w, LAYOUT, geometry, SIZES[rank], **more))
    same(dw, bsn.conv_wgrad(as_core(x, last), as_core(dy, last), LAYOUT, geometry, **more))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_is_pytorchs_to_the_bit(rng, x64, dtype):  # noqa: F811
    torch = pytest.importorskip("torch")
    import blocksparse.torch as bst

    x, w, bias, _ = images(rng, 2, dtype=dtype)
    options = {"kernel_size": (2, 3), "stride": 2, "padding": 1}
    tensors = [torch.from_numpy(a.astype("float64")).to(getattr(torch, dtype)) for a in (x, w, bias)]
    theirs = bst.conv2d(tensors[0].permute(0, 3, 1, 2), tensors[1], LAYOUT, tensors[2], **options)
    mine = bsj.conv2d(x, w, LAYOUT, bias, **options)
    same(np.moveaxis(np.asarray(mine.astype("float64")), -1, 1), theirs.double())


@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_to_second_order(rng, x64, transposed):  # noqa: F811
    layout = Layout.from_graph("random(2,2,0.6)", 8, seed=2, out_features=9, in_features=13)
    x, w = rng.standard_normal((1, 5, 13)), rng.standard_normal((layout.blocks, 3, 8, 8))
    bias, gates = rng.standard_normal(9), rng.standard_normal(layout.blocks)
    order = rng.permutation(13)

    def f(x, w, bias, gates):
        options = {"kernel_size": 3, "stride": 2, "padding": 1, "activation": "silu", "channel_order": order}
        return FUNCTIONS[1, transposed](x, w, layout, bias, gates=gates, **options)

    check_grads(jax.jit(f), (x, w, bias, gates), order=2, modes=["rev"] if transposed else ["fwd", "rev"])


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "VALID", "SAME_LOWER"])
def test_paddings_by_word_are_jaxs(rng, stride, padding):
    layout = Layout.from_mask(np.ones((2, 2)), 8)
    x, w = rng.standard_normal((2, 7, 6, 16)).astype("float32"), rng.standard_normal((4, 6, 8, 8)).astype("float32")
    options = {"stride": stride, "padding": padding, "dilation": 1 if stride > 1 else 2}
    y = bsj.conv2d(x, w, layout, kernel_size=(2, 3), **options)
    dense = bsj.to_dense(w, layout, (2, 3))
    how = {"window_strides": (stride,) * 2, "padding": padding, "rhs_dilation": (options["dilation"],) * 2}
    expected = jax.lax.conv_general_dilated(x, dense, dimension_numbers=("NHWC", "OIHW", "NHWC"), **how)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    options["kernel_size"] = 2
    causal = bsj.conv1d(x[:, :, 0], w[:, :2], layout, **{**options, "padding": "causal"})
    same(causal, bsj.conv1d(x[:, :, 0], w[:, :2], layout, **{**options, "padding": [(options["dilation"], 0)]}))


def test_a_batch_is_more_images(rng):
    x, w, bias, _ = images(rng, 2, n=6)

    def f(x):
        return bsj.conv2d(x, w, LAYOUT, bias, kernel_size=(2, 3), padding=1)

    stacked = x.reshape(3, 2, *x.shape[1:])
    assert "scan" not in str(jax.make_jaxpr(jax.vmap(f))(stacked))
    close(jax.vmap(f)(stacked), f(x).reshape(3, 2, *f(x).shape[1:]))
    close(jax.vmap(f)(x), f(x))  # single images


REFUSED = [
    ({"x": np.zeros((2, 5, 6, 29))}, ValueError, r"\[conv\] x is \[2, 5, 6, 29\], needs \[n, height, width, 30\]"),
    ({"x": np.zeros((5, 6))}, ValueError, "needs"),
    ({"values": np.zeros((2, 2, 8, 8))}, ValueError, "values is"),
    ({"kernel_size": (2, 3, 4)}, ValueError, "kernel_size is"),
    ({"stride": 0}, ValueError, "stride"),
    ({"padding": -1}, ValueError, "padding"),
    ({"padding": "full"}, ValueError, "padding is 'full'"),
    ({"channel_order": [0] * 30}, ValueError, "no permutation of 0 to 29"),
    ({"channel_order": [0.5]}, ValueError, r"channel_order is float64 \[1\]"),
    ({"output_padding": 1}, TypeError, "output_padding is of transposed"),
    ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
    ({"strides": 2}, TypeError, "strides"),
    ({"kernel_size": 9}, ValueError, "kernel|size"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_wrong_is_refused_while_tracing(rng, case):
    change, kind, text = REFUSED[case]
    x, w, _, _ = images(rng, 2)
    given = {"x": x, "values": w, "layout": LAYOUT, "kernel_size": (2, 3)} | change
    given = {k: v.astype("float32") if isinstance(v, np.ndarray) else v for k, v in given.items()}
    with pytest.raises(kind, match=text):
        jax.eval_shape(lambda: bsj.conv2d(given.pop("x"), given.pop("values"), given.pop("layout"), **given))
