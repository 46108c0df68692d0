"""Modules for `flax.linen`: a layout is an attribute, parameters are `kernel`, `bias` and `gates`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    import flax.linen as nn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("blocksparse.jax.linen needs flax: pip install flax", name="flax") from error

from ..interleave import interleaved_layout
from ..layout import Layout, need_layout
from .conv import apply_conv
from .glu import apply_linear_glu
from .initializers import Initializer, lecun_normal
from .layers import promoted
from .linear import apply_linear
from .lstm import State, apply_lstm
from .ops.products import sum_dtype

_zeros = jax.nn.initializers.zeros
_interleaved = functools.lru_cache(maxsize=256)(interleaved_layout)  # a layout keeps its tables


class _OfLayout(nn.Module):
    layout: Layout

    def __post_init__(self) -> None:
        need_layout(type(self).__name__, self.layout)
        super().__post_init__()


class _Layer(_OfLayout):
    use_bias: bool = True
    gates: bool = False
    activation: str | None = "none"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Initializer | None = None
    bias_init: Initializer = _zeros

    def _operands(self, x: Any, shape: tuple[int, ...], layout: Layout) -> tuple[Any, Any, Any, dict[str, Any]]:
        """X, values and bias of the dtype to compute in, and options."""
        values = self.param("kernel", self.kernel_init or lecun_normal(layout), shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (layout.out_features,), self.param_dtype) if self.use_bias else None
        x, values, bias = promoted(x, values, bias, self.dtype)
        gates = None
        if self.gates:
            ones = jax.nn.initializers.ones
            gates = self.param("gates", ones, (layout.blocks,), sum_dtype(self.param_dtype))
            gates = gates.astype(sum_dtype(x.dtype))
        options = {"gates": gates, "activation": self.activation, "precision": self.precision, "wide": True}
        return x, values, bias, options


class BlockSparseLinear(_Layer):
    """y = x W^T + bias with W zero outside of the blocks of a layout [out_features, in_features]; see `nnx`."""

    @nn.compact
    def __call__(self, x: Any, residual: Any = None) -> jax.Array:
        """x [..., in_features] -> [..., out_features]."""
        x, values, bias, options = self._operands(x, self.layout.values_shape, self.layout)
        return apply_linear(x, values, self.layout, bias, residual=residual, **options)


class BlockSparseConv(_Layer):
    """A convolution, dense in space and block-sparse over channels; x is [n, size..., channels]; see `nnx`."""

    kernel_size: Sequence[int] = (3, 3)
    strides: int | Sequence[int] = 1
    padding: Any = "SAME"
    kernel_dilation: int | Sequence[int] = 1
    transposed: bool = False

    @nn.compact
    def __call__(self, x: Any, residual: Any = None) -> jax.Array:
        """x [n, size..., in_features] -> [n, size'..., out_features]."""
        blocks, b, _ = self.layout.values_shape
        x, values, bias, options = self._operands(x, (blocks, math.prod(self.kernel_size), b, b), self.layout)
        return apply_conv(
            *(x, values, self.layout, bias),
            rank=len(self.kernel_size),
            transposed=self.transposed,
            kernel_size=tuple(self.kernel_size),
            stride=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
            residual=residual,
            **options,
        )


class BlockSparseGLU(_Layer):
    """y = activation(W_gate x) * (W_up x), both by one product; `layout` is that of each, [hidden, in]; see `nnx`."""

    use_bias: bool = False
    activation: str = "silu"

    @nn.compact
    def __call__(self, x: Any) -> jax.Array:
        """x [..., in] -> [..., hidden]."""
        both = _interleaved(self.layout)
        x, values, bias, options = self._operands(x, both.values_shape, both)
        return apply_linear_glu(x, values, both, self.layout.out_features, bias, **options)


class BlockSparseMLP(_OfLayout):
    """y = W_down (f(W_gate x) * (W_up x)), of the layers `up` and `down`; see `nnx`.

    `layout` is that of W_up [hidden, in], and of W_gate; `down_layout` that of W_down [out, hidden].
    """

    down_layout: Layout
    gated: bool = True
    activation: str = "silu"
    use_bias: bool = False
    gates: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None

    @nn.compact
    def __call__(self, x: Any) -> jax.Array:
        """x [..., in] -> [..., out]."""
        more = {name: getattr(self, name) for name in ("use_bias", "gates", "dtype", "param_dtype", "precision")}
        up = BlockSparseGLU if self.gated else BlockSparseLinear
        hidden = up(self.layout, activation=self.activation, name="up", **more)(x)
        return BlockSparseLinear(self.down_layout, name="down", **more)(hidden)


class BlockSparseLSTM(_OfLayout):
    """A layer of an LSTM over whole sequences; `layout` is that of one gate [hidden, hidden], or of all; see `nnx`."""

    input_layout: Layout | None = None
    time_major: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any, state: State | None = None, lengths: Any = None) -> tuple[jax.Array, State]:
        """x [n, steps, in_features] -> y [n, steps, hidden], and the state (h, c)."""
        out, hidden = self.layout.sizes
        layout = self.layout.stack(4) if out == hidden else self.layout
        more: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype, "name": "input"}
        dense = (
            nn.Dense(4 * hidden, **more) if self.input_layout is None else BlockSparseLinear(self.input_layout, **more)
        )
        pre = dense(x if self.time_major else jnp.swapaxes(x, 0, 1))
        values = self.param("kernel", lecun_normal(layout), layout.values_shape, self.param_dtype)
        pre, values, _ = promoted(pre, values, None, self.dtype)
        y, state = apply_lstm(pre, values, layout, state, lengths, wide=True)
        return y if self.time_major else jnp.swapaxes(y, 0, 1), state
