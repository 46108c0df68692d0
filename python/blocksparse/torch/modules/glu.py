"""`BlockSparseGLU`: gate and up of a gated linear unit, as one block-sparse layer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..._core.arguments import to_int
from ...interleave import interleaved_features, interleaved_layout
from ...layout import Layout
from .. import convert
from ..arguments import need_sizes, need_tensor
from ..functional.glu import apply_linear_glu, need_glu_activation, need_glu_sizes
from ..interleave import interleave_rows, separate_rows
from .layer import BlockSparseLayer
from .leaf import as_leaf


class BlockSparseGLU(BlockSparseLayer):
    """y = activation(W_gate x + b_gate) * (W_up x + b_up), both products in one launch.

    `weight` [blocks, b, b] holds gate and up, whose rows lie in turn, eight at a time: `weights()` tells them apart.
    `layout` is that of both, [2 round_up(hidden_features, 8), in_features].

    Args:
        in_features: columns of W_gate and W_up.
        hidden_features: rows of each.
        layout: which blocks there are in W_gate, and in W_up the same; or that of both, from `interleaved_layout`.
        bias: whether to add biases.
        gates: whether to have a parameter `gates` [blocks], all 1 at first: block i counts gates[i] times.
        activation: "silu" (SwiGLU), "gelu" (the exact one), "gelu_tanh" or "relu".
        device: of the parameters.
        dtype: of the parameters: float32, float64, bfloat16 or float16. Gates are float32 (float64 for float64).

    Raises:
        ValueError: the layout has another size, or there is no such activation.

    Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        layout: Layout,
        bias: bool = False,
        *,
        gates: bool = False,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "BlockSparseGLU"
        need_glu_activation(op, activation)
        hidden_features = to_int("hidden_features", hidden_features, op=op)
        if not isinstance(layout, Layout) or layout.sizes != (interleaved_features(hidden_features), in_features):
            need_sizes(op, layout, hidden_features, in_features)
            layout = interleaved_layout(layout)
        need_glu_sizes(op, layout, hidden_features)
        options: Any = {"bias": bias, "gates": gates, "activation": "none", "device": device, "dtype": dtype}
        self._make_parameters(layout, layout.values_shape, **options)
        self.activation = activation
        self.in_features, self.hidden_features = in_features, hidden_features
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., hidden_features]; see `blocksparse.torch.linear_glu`."""
        if not isinstance(x, Tensor):
            if (node := as_leaf(self, x)) is not None:
                return cast(Tensor, node)
            need_tensor("BlockSparseGLU", "x", x)
        index = self.tables(x.device)
        gates = self.gates if self._gated else None
        sizes = (self.layout.out_features, self.in_features)
        return apply_linear_glu(
            x, self.weight, index, sizes, self.hidden_features, self.bias, gates, self.activation,
            transposed=self._transposed,
        )  # fmt: skip

    def weights(self) -> dict[str, Tensor]:
        """Dense `gate` and `up` [hidden_features, in_features], and `gate_bias` and `up_bias`; gates are in them."""
        parts = separate_rows(convert.to_dense(self._gated_weight(), self.layout), self.hidden_features)
        found = dict(zip(("gate", "up"), parts, strict=True))
        if self.bias is not None:
            biases = separate_rows(self.bias, self.hidden_features)
            found |= zip(("gate_bias", "up_bias"), biases, strict=True)
        return found

    @torch.no_grad()
    def set_weights(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
    ) -> None:
        """Takes the layout's blocks of dense weights [hidden_features, in_features], and biases if it has some.

        Raises:
            ValueError: a weight has another size.
        """
        for name, weight in (("gate", gate), ("up", up)):
            need_tensor("BlockSparseGLU", name, weight)
            if tuple(weight.shape) != (size := (self.hidden_features, self.in_features)):
                raise ValueError(f"[BlockSparseGLU] {name} is {list(weight.shape)}, needs {list(size)}")
        self.weight.copy_(convert.from_dense(interleave_rows(gate, up), self.layout))
        if self.bias is not None:
            biases = (b if b is not None else gate.new_zeros(self.hidden_features) for b in (gate_bias, up_bias))
            self.bias.copy_(interleave_rows(*biases))

    def extra_repr(self) -> str:
        """The sizes, the blocks and what else there is."""
        return f"in_features={self.in_features}, hidden_features={self.hidden_features}, {self._describe()}"
