"""Where the handlers for JAX read and write: nothing is copied."""

import ctypes

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp
from test_jax import LAYOUT, arrays
from xla_runtime import Buffer, CallFrame, P, handler

import blocksparse.jax as bsj
from blocksparse import Layout
from blocksparse.jax.ops import registry

NAMES = [f"{op}_{which}" for op in ("linear", "conv") for which in ("fprop", "dgrad", "wgrad")]
NAMES += ["linear_glu_fprop", "lstm_forward", "lstm_backward"]


@pytest.fixture
def seen(monkeypatch):
    """Of each call of a handler: its name, and the addresses of operands and results."""
    calls, kept = [], []
    registry.register()
    for name in NAMES:
        real = handler(f"bs_xla_{name}")

        def spy(address, name=name, real=real):
            frame = CallFrame.from_address(address)
            if not frame.extension_start:
                both = [
                    [Buffer.from_address(b.items[i]).data for i in range(b.size)] for b in (frame.args, frame.results)
                ]
                calls.append((name, *both))
            return real(address)

        kept.append(ctypes.CFUNCTYPE(P, P)(spy))
        jax.ffi.register_ffi_target(f"spy_{id(calls)}_{name}", jax.ffi.pycapsule(kept[-1]), platform="cpu")
    lower = registry.lower

    def with_spy(name, *rest):
        return lower(f"spy_{id(calls)}_{name.removeprefix('bs_xla_')}", *rest)

    for module in ("products", "glu", "lstm"):
        monkeypatch.setattr(f"blocksparse.jax.ops.{module}.lower", with_spy)
    yield calls
    KEPT.extend(kept)  # programs that call them may be kept, too


KEPT = []


def addresses(*arrays):
    return [array.unsafe_buffer_pointer() for array in arrays]


@pytest.mark.parametrize("axis", [-1, 0])
def test_nothing_is_copied(rng, seen, axis):
    """The pointers that handlers see are those of the arrays."""
    x, w, bias, _ = map(jnp.asarray, arrays(rng))
    x = x if axis == -1 else x.T.copy()
    tables = bsj.tables_of(LAYOUT)
    y = jax.jit(lambda *given: bsj.linear(*given, feature_axis=axis))(x, w, tables, bias)
    dy = jax.block_until_ready(y) + 1

    def gradients(x, w, tables, dy):
        return jax.vjp(lambda x, w: bsj.linear(x, w, tables, feature_axis=axis), x, w)[1](dy)

    dx, dw = jax.block_until_ready(jax.jit(gradients)(x, w, tables, dy))
    assert sorted(seen) == [
        ("linear_dgrad", addresses(dy, w, tables.words), addresses(dx)),
        ("linear_fprop", addresses(x, w, tables.words, bias), addresses(y)),
        ("linear_wgrad", addresses(x, dy, tables.words), addresses(dw)),
    ]


@pytest.mark.parametrize("last", [True, False])
def test_nothing_of_a_convolution_is_copied(rng, seen, last):
    layout = Layout.from_graph("random(3,2,0.6)", 8, seed=1)
    x = jnp.asarray(rng.standard_normal((2, 5, 6, 16) if last else (2, 16, 5, 6)), jnp.float32)
    w, tables = jnp.ones((layout.blocks, 9, 8, 8)), bsj.tables_of(layout)

    def conv(x, w, tables):
        return bsj.conv2d(x, w, tables, kernel_size=3, padding=1, channels_last=last)

    y = jax.block_until_ready(jax.jit(conv)(x, w, tables))
    dy = y + 1
    pull = jax.jit(lambda x, w, tables, dy: jax.vjp(lambda x, w: conv(x, w, tables), x, w)[1](dy))
    dx, dw = jax.block_until_ready(pull(x, w, tables, dy))
    assert sorted(seen) == [
        ("conv_dgrad", addresses(dy, w, tables.words), addresses(dx)),
        ("conv_fprop", addresses(x, w, tables.words), addresses(y)),
        ("conv_wgrad", addresses(x, dy, tables.words), addresses(dw)),
    ]


def test_nothing_of_a_gated_unit_is_copied(rng, seen):
    both = bsj.interleaved_layout(LAYOUT)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((7, 90), both.values_shape))
    tables = bsj.tables_of(both)
    y = jax.block_until_ready(jax.jit(lambda *given: bsj.linear_glu(*given, 60))(x, w, tables))
    assert seen == [("linear_glu_fprop", addresses(x, w, tables.words), addresses(y))]


def test_nothing_of_an_lstm_is_copied(rng, seen):
    layout = Layout.from_graph("random(2,2,0.6)", 8, seed=2).stack(4)
    sizes = ((5, 3, 64), layout.values_shape, (3, 16), (3, 16))
    pre, w, h, c = (jnp.asarray(rng.standard_normal(size), jnp.float32) for size in sizes)
    tables = bsj.tables_of(layout)

    def gradients(pre, w, h, c, tables, dy):
        y, pull, _ = jax.vjp(lambda *given: bsj.lstm(*given[:2], tables, given[2:]), pre, w, h, c, has_aux=True)
        return y, pull(dy)

    dy = jnp.ones((5, 3, 16))
    y, (dpre, dw, dh, dc) = jax.block_until_ready(jax.jit(gradients)(pre, w, h, c, tables, dy))
    (first, given, made), (second, saved, slopes) = seen
    assert (first, second) == ("lstm_forward", "lstm_backward")
    assert given == addresses(pre, w, tables.words, h, c)
    assert made[:1] == addresses(y)
    assert saved[:5] == [*addresses(w, tables.words, h, c), made[0]]
    assert saved[5:8] == [*made[3:5], *addresses(dy)]  # what was saved
    assert slopes == addresses(dpre, dw, dh, dc)
