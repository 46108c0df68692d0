"""Modules for `flax.nnx`. A layout is part of a module's static structure, and its tables lie with the program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("blocksparse.jax.nnx needs flax: pip install flax", name="flax") from error

from ..layout import Layout
from . import convert
from .conv import apply_conv
from .glu import apply_linear_glu
from .initializers import Initializer, lecun_normal
from .interleave import interleave_rows
from .layers import both_norms, glu_layout, hashable, layout_of, need_sizes, promoted
from .linear import apply_linear
from .lstm import State, apply_lstm
from .ops.products import sum_dtype

_zeros = jax.nn.initializers.zeros


class _Layer(nnx.Module):
    """Parameters over the blocks of a layout: `kernel` [blocks, ..., b, b], `bias` [out_features], `gates` [blocks]."""

    def __init__(
        self,
        shape: tuple[int, ...],
        layout: Layout,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        gates: bool = False,
        activation: str | None = "none",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = _zeros,
    ) -> None:
        self.layout, self.activation, self.dtype, self.precision = layout, activation, dtype, precision
        self.kernel = nnx.Param((kernel_init or lecun_normal(layout))(rngs.params(), shape, param_dtype))
        bias = bias_init(rngs.params(), (layout.out_features,), param_dtype) if use_bias else None
        self.bias = nnx.Param(bias) if use_bias else nnx.data(None)
        self.gates = nnx.Param(jnp.ones(layout.blocks, sum_dtype(param_dtype))) if gates else nnx.data(None)

    def _operands(self, x: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """X, values and bias of the dtype to compute in, and options."""
        x, values, bias = promoted(x, self.kernel[...], _value(self.bias), self.dtype)
        gates = _value(self.gates)
        gates = gates if gates is None else gates.astype(sum_dtype(x.dtype))
        options = {"gates": gates, "activation": self.activation, "precision": self.precision, "wide": True}
        return x, values, bias, options


def _value(parameter: Any) -> Any:
    return None if parameter is None else parameter[...]


class BlockSparseLinear(_Layer):
    """y = x W^T + bias with W [out_features, in_features] zero outside of the blocks of a layout.

    Args:
        in_features: columns of W.
        out_features: rows of W.
        layout: which blocks there are; of that size.
        options: `rngs`; `use_bias` (True); `gates` (False), a factor for each block, 1 at first; `activation`
            ("none"); `dtype` to compute in, and `param_dtype`, as in flax; `precision`; `kernel_init` and `bias_init`.

    Raises:
        ValueError: the layout has another size.
    """

    def __init__(self, in_features: int, out_features: int, layout: Layout, **options: Any) -> None:
        need_sizes("BlockSparseLinear", layout, out_features, in_features)
        super().__init__(layout.values_shape, layout, **options)

    def __call__(self, x: Any, residual: Any = None) -> jax.Array:
        """x [..., in_features] -> [..., out_features]; see `blocksparse.jax.linear`."""
        x, values, bias, options = self._operands(x)
        return apply_linear(x, values, self.layout, bias, residual=residual, **options)

    @classmethod
    def from_dense(
        cls,
        dense: nnx.Linear,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        **options: Any,
    ) -> BlockSparseLinear:
        """A layer with the blocks of a dense one that have the largest norms, or with those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, or the sizes do not fit.
        """
        weight, bias = dense.kernel[...].T, _value(dense.bias)
        layout = layout_of(weight, density, block_size, layout)
        given: dict[str, Any] = {"dtype": dense.dtype, "param_dtype": weight.dtype, "use_bias": bias is not None}
        layer = cls(dense.in_features, dense.out_features, layout, rngs=nnx.Rngs(0), **given, **options)
        layer.kernel[...] = convert.from_dense(weight, layout)
        if bias is not None:
            layer.bias[...] = bias
        return layer


class BlockSparseConv(_Layer):
    """A convolution, dense in space and block-sparse over channels; x is [n, size..., channels].

    Args:
        in_features: channels of x.
        out_features: channels of the result.
        kernel_size: 1 to 3 sizes.
        layout: which blocks of channels (out, in) are connected.
        strides: one number, or one for each size.
        padding: see `blocksparse.jax.conv2d`.
        kernel_dilation: as strides.
        transposed: whether it is a transposed convolution; padding is then numbers.
        options: those of `BlockSparseLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        layout: Layout,
        *,
        strides: int | Sequence[int] = 1,
        padding: Any = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        transposed: bool = False,
        **options: Any,
    ) -> None:
        need_sizes("BlockSparseConv", layout, out_features, in_features)
        blocks, b, _ = layout.values_shape
        self.kernel_size, self.transposed = hashable(tuple(kernel_size)), transposed
        self.strides, self.padding = hashable(strides), hashable(padding)
        self.kernel_dilation = hashable(kernel_dilation)
        super().__init__((blocks, math.prod(self.kernel_size), b, b), layout, **options)

    def __call__(self, x: Any, residual: Any = None) -> jax.Array:
        """x [n, size..., in_features] -> [n, size'..., out_features]."""
        x, values, bias, options = self._operands(x)
        return apply_conv(
            *(x, values, self.layout, bias),
            rank=len(self.kernel_size),
            transposed=self.transposed,
            kernel_size=self.kernel_size,
            stride=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
            residual=residual,
            **options,
        )

    @classmethod
    def from_dense(
        cls,
        dense: nnx.Conv,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        **options: Any,
    ) -> BlockSparseConv:
        """A layer with the blocks of a dense one that have the largest norms, or with those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, the sizes do not fit, or the dense one has
                groups or a dilated input.
        """
        if dense.feature_group_count != 1 or not np.all(np.equal(dense.input_dilation, 1)):
            raise ValueError(
                f"[from_dense] feature_group_count is {dense.feature_group_count}, input_dilation "
                f"{dense.input_dilation}, needs 1"
            )
        weight, bias = jnp.moveaxis(dense.kernel[...], (-1, -2), (0, 1)), _value(dense.bias)
        layout = layout_of(weight, density, block_size, layout)
        given: dict[str, Any] = {"dtype": dense.dtype, "param_dtype": weight.dtype, "use_bias": bias is not None}
        given |= {name: getattr(dense, name) for name in ("strides", "padding", "kernel_dilation")}
        given |= {"rngs": nnx.Rngs(0), **options}
        layer = cls(dense.in_features, dense.out_features, dense.kernel_size, layout, **given)
        layer.kernel[...] = convert.from_dense(weight, layout)
        if bias is not None:
            layer.bias[...] = bias
        return layer


class BlockSparseGLU(_Layer):
    """y = activation(W_gate x + b_gate) * (W_up x + b_up), both by one product; `kernel` holds both, interleaved.

    Args:
        in_features: columns of W_gate and W_up.
        hidden_features: rows of each.
        layout: which blocks there are in W_gate, and in W_up the same; or that of both, from `interleaved_layout`.
        use_bias: whether to add biases.
        activation: "silu" (SwiGLU), "gelu", "gelu_tanh" or "relu".
        options: those of `BlockSparseLinear`.

    Raises:
        ValueError: the layout has another size.

    Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        layout: Layout,
        *,
        use_bias: bool = False,
        activation: str = "silu",
        **options: Any,
    ) -> None:
        self.hidden_features = hidden_features
        layout = glu_layout("BlockSparseGLU", layout, hidden_features, in_features)
        super().__init__(layout.values_shape, layout, use_bias=use_bias, activation=activation, **options)

    def __call__(self, x: Any) -> jax.Array:
        """x [..., in_features] -> [..., hidden_features]; see `blocksparse.jax.linear_glu`."""
        x, values, bias, options = self._operands(x)
        return apply_linear_glu(x, values, self.layout, self.hidden_features, bias, **options)

    @classmethod
    def from_dense(
        cls,
        gate: nnx.Linear,
        up: nnx.Linear,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        **options: Any,
    ) -> BlockSparseGLU:
        """A layer with the blocks of two dense ones that have the largest norms together, or those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, the sizes do not fit, or one alone has a bias.
        """
        if (gate.bias is None) != (up.bias is None):
            raise ValueError("[from_dense] gate or up alone has a bias, needs both or none")
        weights, biased = [dense.kernel[...].T for dense in (gate, up)], gate.bias is not None
        layout = layout_of(both_norms(*weights), density, block_size, layout)
        given: dict[str, Any] = {"dtype": gate.dtype, "param_dtype": weights[0].dtype, "use_bias": biased}
        layer = cls(gate.in_features, gate.out_features, layout, rngs=nnx.Rngs(0), **{**given, **options})
        layer.kernel[...] = convert.from_dense(interleave_rows(*weights), layer.layout)
        if biased:
            layer.bias[...] = interleave_rows(gate.bias[...], up.bias[...])
        return layer


class BlockSparseMLP(nnx.Module):
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
        options: those of `BlockSparseLinear`, for both layers.

    Raises:
        ValueError: a layout has another size.
    """

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
        **options: Any,
    ) -> None:
        up: type[BlockSparseGLU | BlockSparseLinear] = BlockSparseGLU if gated else BlockSparseLinear
        out_features = in_features if out_features is None else out_features
        options["use_bias"] = use_bias
        self.up = up(in_features, hidden_features, layout, activation=activation, **options)
        self.down = BlockSparseLinear(hidden_features, out_features, down_layout, **options)

    def __call__(self, x: Any) -> jax.Array:
        """x [..., in_features] -> [..., out_features]."""
        return self.down(self.up(x))


class BlockSparseLSTM(nnx.Module):
    """A layer of an LSTM over whole sequences, with a block-sparse recurrent weight.

    Args:
        in_features: of x.
        hidden_features: units.
        layout: of one gate's recurrent weight [hidden, hidden], which the four share, or of all, [4 hidden, hidden].
        rngs: for the initial weights.
        input_layout: of the input's weight [4 hidden, in_features]; None: it is dense.
        forget_bias: what the bias of the forget gate begins with.
        time_major: whether x is [steps, n, in_features] rather than [n, steps, in_features].
        dtype: to compute in.
        param_dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        layout: Layout,
        *,
        rngs: nnx.Rngs,
        input_layout: Layout | None = None,
        forget_bias: float = 0.0,
        time_major: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ) -> None:
        whole = layout.sizes == (4 * hidden_features, hidden_features)
        self.layout = need_sizes(
            "BlockSparseLSTM", layout if whole else layout.stack(4), 4 * hidden_features, hidden_features
        )
        self.time_major, self.dtype = time_major, dtype
        more: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        size = (in_features, 4 * hidden_features)
        self.input = (
            nnx.Linear(*size, **more) if input_layout is None else BlockSparseLinear(*size, input_layout, **more)
        )
        of_forget = slice(hidden_features, 2 * hidden_features)
        self.input.bias[...] = self.input.bias[...].at[of_forget].add(forget_bias)
        self.kernel = nnx.Param(lecun_normal(self.layout)(rngs.params(), self.layout.values_shape, param_dtype))

    def __call__(self, x: Any, state: State | None = None, lengths: Any = None) -> tuple[jax.Array, State]:
        """x [n, steps, in_features] -> y [n, steps, hidden], and the state (h, c); see `blocksparse.jax.lstm`."""
        pre = self.input(x if self.time_major else jnp.swapaxes(x, 0, 1))
        pre, values, _ = promoted(pre, self.kernel[...], None, self.dtype)
        y, state = apply_lstm(pre, values, self.layout, state, lengths, wide=True)
        return y if self.time_major else jnp.swapaxes(y, 0, 1), state
