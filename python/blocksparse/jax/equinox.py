"""Modules for equinox: a layout is a static field, weights are arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("blocksparse.jax.equinox needs equinox: pip install equinox", name="equinox") from error

from ..layout import Layout
from . import convert
from .conv import apply_conv
from .glu import apply_linear_glu
from .initializers import fan_in_uniform
from .interleave import interleave_rows
from .layers import both_norms, glu_layout, hashable, layout_of, need_sizes, promoted
from .linear import apply_linear
from .lstm import State, apply_lstm
from .ops.products import sum_dtype


class _Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    gates: jax.Array | None
    layout: Layout = eqx.field(static=True)
    activation: str | None = eqx.field(static=True)

    def __init__(
        self,
        shape: tuple[int, ...],
        layout: Layout,
        use_bias: bool,
        gates: bool,
        activation: str | None,
        dtype: Any,
        key: jax.Array,
    ) -> None:
        dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
        self.layout, self.activation = layout, activation
        self.weight = fan_in_uniform(layout)(key, shape, dtype)
        self.bias = jnp.zeros(layout.out_features, dtype) if use_bias else None
        self.gates = jnp.ones(layout.blocks, sum_dtype(dtype)) if gates else None

    def _operands(self, x: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """X, values and bias of the dtype to compute in, and options."""
        x, values, bias = promoted(x, self.weight, self.bias, None)
        gates = None if self.gates is None else self.gates.astype(sum_dtype(x.dtype))
        return x, values, bias, {"gates": gates, "activation": self.activation, "wide": True}


class BlockSparseLinear(_Layer):
    """y = x W^T + bias with W [out_features, in_features] zero outside of the blocks of a layout.

    Args:
        in_features: columns of W.
        out_features: rows of W.
        layout: which blocks there are; of that size.
        use_bias: whether to add one.
        gates: whether to have a factor for each block, 1 at first.
        activation: "none" (or None), "relu", "gelu", "gelu_tanh" or "silu".
        dtype: of the parameters; float32 by default.
        key: for the initial weights.

    Raises:
        ValueError: the layout has another size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout,
        use_bias: bool = True,
        *,
        gates: bool = False,
        activation: str | None = "none",
        dtype: Any = None,
        key: jax.Array,
    ) -> None:
        need_sizes("BlockSparseLinear", layout, out_features, in_features)
        super().__init__(layout.values_shape, layout, use_bias, gates, activation, dtype, key)

    def __call__(self, x: Any, *, key: jax.Array | None = None) -> jax.Array:
        """x [..., in_features] -> [..., out_features]; the key is not used."""
        x, values, bias, options = self._operands(x)
        return apply_linear(x, values, self.layout, bias, **options)

    @classmethod
    def from_dense(
        cls,
        dense: eqx.nn.Linear,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        activation: str | None = "none",
    ) -> BlockSparseLinear:
        """A layer with the blocks of a dense one that have the largest norms, or with those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, or the sizes do not fit.
        """
        layout = layout_of(dense.weight, density, block_size, layout)
        out, in_ = dense.weight.shape
        options: dict[str, Any] = {"activation": activation, "dtype": dense.weight.dtype, "key": jax.random.key(0)}
        layer = cls(in_, out, layout, dense.bias is not None, **options)
        given = (convert.from_dense(dense.weight, layout), dense.bias)
        return eqx.tree_at(lambda made: (made.weight, made.bias), layer, given, is_leaf=lambda leaf: leaf is None)


class BlockSparseConv(_Layer):
    """A convolution of x [channels, size...], as equinox has them; dense in space, block-sparse over channels.

    Args:
        in_channels: channels of x.
        out_channels: channels of the result.
        kernel_size: 1 to 3 sizes.
        layout: which blocks of channels (out, in) are connected.
        stride: one number, or one for each size.
        padding: see `blocksparse.jax.conv2d`.
        dilation: as stride.
        transposed: whether it is a transposed convolution.
        use_bias: whether to add one.
        gates: whether to have a factor for each block.
        activation: as in `BlockSparseLinear`.
        dtype: of the parameters.
        key: for the initial weights.
    """

    geometry: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        layout: Layout,
        *,
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        dilation: int | Sequence[int] = 1,
        transposed: bool = False,
        use_bias: bool = True,
        gates: bool = False,
        activation: str | None = "none",
        dtype: Any = None,
        key: jax.Array,
    ) -> None:
        need_sizes("BlockSparseConv", layout, out_channels, in_channels)
        sizes, (blocks, b, _) = tuple(kernel_size), layout.values_shape
        super().__init__((blocks, math.prod(sizes), b, b), layout, use_bias, gates, activation, dtype, key)
        names: dict[str, Any] = {"kernel_size": sizes, "stride": stride, "padding": padding, "dilation": dilation}
        names |= {"rank": len(sizes), "transposed": transposed}
        self.geometry = tuple((name, hashable(given)) for name, given in names.items())

    def __call__(self, x: Any, *, key: jax.Array | None = None) -> jax.Array:
        """x [channels, size...] -> [channels', size'...]; the key is not used."""
        x, values, bias, options = self._operands(x)
        return apply_conv(x, values, self.layout, bias, channels_last=False, **dict(self.geometry), **options)

    @classmethod
    def from_dense(
        cls,
        dense: eqx.nn.Conv,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        activation: str | None = "none",
    ) -> BlockSparseConv:
        """A layer with the blocks of a dense one that have the largest norms, or with those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, the sizes do not fit, or the dense one has
                groups or pads otherwise than with zeros.
        """
        if dense.groups != 1 or dense.padding_mode.lower() != "zeros":
            raise ValueError(
                f"[from_dense] groups is {dense.groups}, padding_mode {dense.padding_mode!r}, needs 1 and 'ZEROS'"
            )
        layout = layout_of(dense.weight, density, block_size, layout)
        options: dict[str, Any] = {name: getattr(dense, name) for name in ("stride", "padding", "dilation")}
        options |= {"activation": activation, "dtype": dense.weight.dtype, "use_bias": dense.bias is not None}
        sizes = dense.in_channels, dense.out_channels, dense.kernel_size
        layer = cls(*sizes, layout, key=jax.random.key(0), **options)
        given = (convert.from_dense(dense.weight, layout), None if dense.bias is None else dense.bias.reshape(-1))
        return eqx.tree_at(lambda made: (made.weight, made.bias), layer, given, is_leaf=lambda leaf: leaf is None)


class BlockSparseGLU(_Layer):
    """y = activation(W_gate x + b_gate) * (W_up x + b_up), both by one product; `weight` holds both, interleaved.

    Args:
        in_features: columns of W_gate and W_up.
        hidden_features: rows of each.
        layout: which blocks there are in W_gate, and in W_up the same; or that of both, from `interleaved_layout`.
        use_bias: whether to add biases.
        gates: whether to have a factor for each block.
        activation: "silu" (SwiGLU), "gelu", "gelu_tanh" or "relu".
        dtype: of the parameters.
        key: for the initial weights.
    """

    hidden_features: int = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        layout: Layout,
        use_bias: bool = False,
        *,
        gates: bool = False,
        activation: str = "silu",
        dtype: Any = None,
        key: jax.Array,
    ) -> None:
        self.hidden_features = hidden_features
        layout = glu_layout("BlockSparseGLU", layout, hidden_features, in_features)
        super().__init__(layout.values_shape, layout, use_bias, gates, activation, dtype, key)

    def __call__(self, x: Any, *, key: jax.Array | None = None) -> jax.Array:
        """x [..., in_features] -> [..., hidden_features]; the key is not used."""
        x, values, bias, options = self._operands(x)
        return apply_linear_glu(x, values, self.layout, self.hidden_features, bias, **options)

    @classmethod
    def from_dense(
        cls,
        gate: eqx.nn.Linear,
        up: eqx.nn.Linear,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        activation: str = "silu",
    ) -> BlockSparseGLU:
        """A layer with the blocks of two dense ones that have the largest norms together, or those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, the sizes do not fit, or one alone has a bias.
        """
        if (gate.bias is None) != (up.bias is None):
            raise ValueError("[from_dense] gate or up alone has a bias, needs both or none")
        layout = layout_of(both_norms(gate.weight, up.weight), density, block_size, layout)
        hidden, in_ = gate.weight.shape
        options: dict[str, Any] = {"activation": activation, "dtype": gate.weight.dtype, "key": jax.random.key(0)}
        layer = cls(in_, hidden, layout, gate.bias is not None, **options)
        weight = convert.from_dense(interleave_rows(gate.weight, up.weight), layer.layout)
        given = (weight, None if gate.bias is None else interleave_rows(gate.bias, up.bias))
        return eqx.tree_at(lambda made: (made.weight, made.bias), layer, given, is_leaf=lambda leaf: leaf is None)


class BlockSparseMLP(eqx.Module):
    """The feed-forward part of a transformer: y = W_down (f(W_gate x) * (W_up x)), ungated y = W_down f(W_up x).

    Args:
        in_features: of x.
        hidden_features: rows of W_gate and W_up, columns of W_down.
        layout: which blocks there are in W_up, and in W_gate the same.
        down_layout: which blocks there are in W_down, [out_features, hidden_features].
        out_features: of y; that of x if not given.
        gated: whether there is a gate: SwiGLU.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        use_bias: whether to add biases, to all products.
        dtype: of the parameters.
        key: for the initial weights.
    """

    up: BlockSparseGLU | BlockSparseLinear
    down: BlockSparseLinear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        layout: Layout,
        down_layout: Layout,
        *,
        out_features: int | None = None,
        gated: bool = True,
        activation: str = "silu",
        use_bias: bool = False,
        dtype: Any = None,
        key: jax.Array,
    ) -> None:
        up: type[BlockSparseGLU | BlockSparseLinear] = BlockSparseGLU if gated else BlockSparseLinear
        of_up, of_down = jax.random.split(key)
        self.up = up(in_features, hidden_features, layout, use_bias, activation=activation, dtype=dtype, key=of_up)
        out_features = in_features if out_features is None else out_features
        self.down = BlockSparseLinear(hidden_features, out_features, down_layout, use_bias, dtype=dtype, key=of_down)

    def __call__(self, x: Any, *, key: jax.Array | None = None) -> jax.Array:
        """x [..., in_features] -> [..., out_features]; the key is not used."""
        return self.down(self.up(x))


class BlockSparseLSTM(eqx.Module):
    """A layer of an LSTM over whole sequences, with a block-sparse recurrent weight.

    Args:
        input_size: of x.
        hidden_size: units.
        layout: of one gate's recurrent weight [hidden, hidden], which the four share, or of all, [4 hidden, hidden].
        dtype: of the parameters.
        key: for the initial weights.
    """

    input: eqx.nn.Linear
    weight: jax.Array
    layout: Layout = eqx.field(static=True)

    def __init__(self, input_size: int, hidden_size: int, layout: Layout, *, dtype: Any = None, key: jax.Array) -> None:
        whole = layout.sizes == (4 * hidden_size, hidden_size)
        self.layout = need_sizes("BlockSparseLSTM", layout if whole else layout.stack(4), 4 * hidden_size, hidden_size)
        of_input, recurrent = jax.random.split(key)
        self.input = eqx.nn.Linear(input_size, 4 * hidden_size, dtype=dtype, key=of_input)
        self.weight = fan_in_uniform(self.layout)(recurrent, self.layout.values_shape, self.input.weight.dtype)

    def __call__(self, x: Any, state: State | None = None, lengths: Any = None) -> tuple[jax.Array, State]:
        """x [steps, n, input_size] -> y [steps, n, hidden_size], and the state (h, c)."""
        pre = x @ self.input.weight.T + self.input.bias
        pre, values, _ = promoted(pre, self.weight, None, None)
        return apply_lstm(pre, values, self.layout, state, lengths, wide=True)
