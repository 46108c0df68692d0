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


@pytest.fixture
def seen(monkeypatch):
    """Of each call of a handler: its name, and the addresses of operands and results."""
    calls, kept = [], []
    registry.register()
    for name in ("linear_fprop", "linear_dgrad", "linear_wgrad", "conv_fprop", "conv_dgrad", "conv_wgrad"):
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

    monkeypatch.setattr("blocksparse.jax.ops.products.lower", with_spy)
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
