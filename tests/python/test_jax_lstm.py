"""The LSTM for JAX."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
from jax.test_util import check_grads
from test_jax import close, same, x64  # noqa: F401

import blocksparse.jax as bsj
from blocksparse import Layout

LAYOUT = Layout.from_graph("random(2,2,0.6)", 8, seed=2).stack(4)
HIDDEN = 16


def given_for(rng, steps=5, n=3, dtype="float32"):
    """pre, values, (h0, c0)"""
    shapes = ((steps, n, 4 * HIDDEN), LAYOUT.values_shape, (n, HIDDEN), (n, HIDDEN))
    pre, w, h0, c0 = (rng.standard_normal(shape) / 2 for shape in shapes)
    wide = "float64" if dtype == "float64" else "float32"
    return *(jnp.asarray(a, dtype) for a in (pre, w)), (jnp.asarray(h0, dtype), jnp.asarray(c0, wide))


def in_steps(pre, w, state, lengths=None):
    """The meaning, in JAX's own operations."""
    (h, c), dense, ys = state, bsj.to_dense(w, LAYOUT), []
    for t, z in enumerate(pre):
        i, f, g, o = jnp.split(z + h @ dense.T, 4, -1)
        c_new = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h_new = jax.nn.sigmoid(o) * jnp.tanh(c_new)
        runs = np.ones((len(h), 1), bool) if lengths is None else (t < np.asarray(lengths))[:, None]
        h, c = jnp.where(runs, h_new, h), jnp.where(runs, c_new, c)
        ys.append(jnp.where(runs, h_new, 0))
    return jnp.stack(ys), (h, c)


def scalar(f):
    """A function of the outputs that has different derivatives everywhere."""

    def g(*given):
        y, (h, c) = f(*given)
        return jnp.sin(y).sum() + (h**2).sum() + jnp.cos(c).sum()

    return g


@pytest.mark.parametrize("lengths", [None, [3, 0, 2]])
def test_is_what_it_means(rng, x64, lengths):  # noqa: F811
    pre, w, state = given_for(rng, steps=3, dtype="float64")

    def f(pre, w, state):
        return bsj.lstm(pre, w, LAYOUT, state, None if lengths is None else np.array(lengths))

    def expected(pre, w, state):
        return in_steps(pre, w, state, lengths)

    for a, b in zip(jax.tree.leaves(f(pre, w, state)), jax.tree.leaves(expected(pre, w, state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    gradients = [jax.jit(jax.grad(scalar(g), (0, 1, 2)))(pre, w, state) for g in (f, expected)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("lengths", "order", "modes"), [(None, 1, ["fwd"]), ([3, 0, 2], 1, ["fwd"]), ([3, 0, 2], 2, ["rev"])]
)
def test_derivatives(rng, x64, lengths, order, modes):  # noqa: F811
    pre, w, (h0, c0) = given_for(rng, steps=3, dtype="float64")
    counts = None if lengths is None else jnp.array(lengths)

    def f(pre, w, h0, c0):
        return bsj.lstm(pre, w, LAYOUT, (h0, c0), counts)

    check_grads(jax.jit(f), (pre, w, h0, c0), order=order, modes=modes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_is_pytorchs_to_the_bit(rng, x64, dtype):  # noqa: F811
    torch = pytest.importorskip("torch")
    import blocksparse.torch as bst

    pre, w, state = given_for(rng, dtype=dtype)
    tensors = [torch.from_numpy(np.array(a, "float64")).to(getattr(torch, str(a.dtype))) for a in (pre, w, *state)]
    for tensor in tensors:
        tensor.requires_grad_()
    y, (h, c) = bst.lstm(*tensors[:2], LAYOUT, tuple(tensors[2:]), torch.tensor([5, 0, 2]))
    y.sum().backward()
    lengths = np.array([5, 0, 2])
    (mine, states), pull = jax.vjp(lambda *a: bsj.lstm(*a[:2], LAYOUT, a[2], lengths), pre, w, state)
    for a, b in zip((mine, *states), (y, h, c), strict=True):
        same(a.astype("float64"), b.detach().double())
    cts = (jnp.ones_like(mine), jax.tree.map(jnp.zeros_like, states))
    for a, b in zip(jax.tree.leaves(pull(cts)), tensors, strict=True):
        same(a.astype("float64"), b.grad.double())


def test_a_batch_is_more_sequences(rng):
    pre, w, state = given_for(rng, n=6)
    lengths = np.array([5, 4, 0, 1, 2, 3])

    def f(pre, state, lengths):
        return bsj.lstm(pre, w, LAYOUT, state, lengths)

    stacked = (pre.reshape(5, 2, 3, -1), jax.tree.map(lambda a: a.reshape(2, 3, -1), state), lengths.reshape(2, 3))
    batched = jax.vmap(f, (1, 0, 0))
    assert "scan" not in str(jax.make_jaxpr(batched)(*stacked))
    y, (h, c) = batched(*stacked)
    whole, (h_whole, c_whole) = f(pre, state, lengths)
    close(y, jnp.moveaxis(whole.reshape(5, 2, 3, -1), 1, 0))
    close(h.reshape(6, -1), h_whole)
    close(c.reshape(6, -1), c_whole)
    ws = jnp.stack([w, 2 * w])
    close(jax.vmap(lambda w: bsj.lstm(pre, w, LAYOUT, state)[0])(ws)[1], bsj.lstm(pre, 2 * w, LAYOUT, state)[0])


def test_truncated_backpropagation_and_chunks(rng):
    pre, w, state = given_for(rng, steps=6)
    y, last = bsj.lstm(pre, w, LAYOUT, state)
    first, middle = bsj.lstm(pre[:2], w, LAYOUT, state)
    rest, end = bsj.lstm(pre[2:], w, LAYOUT, middle)
    same(jnp.concatenate([first, rest]), y)
    jax.tree.map(same, end, last)
    nothing, same_state = bsj.lstm(pre[:0], w, LAYOUT, state)
    assert nothing.shape == (0, 3, HIDDEN)
    jax.tree.map(same, same_state, state)


def test_what_is_wrong_is_refused(rng):
    pre, w, state = given_for(rng)
    square = Layout.from_graph("random(2,2,0.6)", 8, seed=2)
    for call, kind, text in [
        (
            lambda: bsj.lstm(pre[..., 1:], w, LAYOUT),
            ValueError,
            r"\[lstm\] pre is \[5, 3, 63\], needs \[steps, n, 64\]",
        ),
        (lambda: bsj.lstm(pre, w[1:], LAYOUT), ValueError, "values is"),
        (lambda: bsj.lstm(pre, w, square), ValueError, r"layout is 16 x 16, needs 4 hidden x hidden"),
        (lambda: bsj.lstm(pre, w, LAYOUT.t()), ValueError, "transposed"),
        (lambda: bsj.lstm(pre, w, LAYOUT, state[0]), TypeError, r"needs \(h, c\)"),
        (lambda: bsj.lstm(pre, w, LAYOUT, (state[0][1:], state[1])), ValueError, "h is"),
        (lambda: bsj.lstm(pre, w, LAYOUT, state, np.array([6, 0, 0])), ValueError, "lengths are 0 to 6, needs 0 to 5"),
        (lambda: bsj.lstm(pre, w, LAYOUT, state, np.array([1.0, 0, 0])), ValueError, "lengths are float64"),
        (lambda: bsj.lstm(pre, w, LAYOUT, state, np.array([1])), ValueError, r"needs integers \[3\]"),
    ]:
        with pytest.raises(kind, match=text):
            jax.eval_shape(call)
    traced = jax.jit(lambda lengths: bsj.lstm(pre, w, LAYOUT, state, lengths)[0])
    with pytest.raises(Exception, match=r"\[lstm.*\] lengths"):
        jax.block_until_ready(traced(jnp.array([6, 0, -1])))
