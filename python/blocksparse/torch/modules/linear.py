"""`BlockSparseLinear`: `torch.nn.Linear` with a block-sparse weight."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..._core.arguments import need
from ...layout import Layout
from .. import convert
from ..arguments import need_sizes, need_tensor, need_tensors
from ..functional.linear import apply_linear
from .layer import BlockSparseLayer
from .leaf import as_leaf


class BlockSparseLinear(BlockSparseLayer):
    """y = x W^T + bias with W [out_features, in_features] zero outside of the blocks of a layout.

    `weight` [blocks, b, b] is an ordinary dense parameter, so optimizers, clipping, weight averages, DDP and FSDP work
    as ever and cost what the blocks cost. `pattern` is a small buffer that saves the layout with the weights: loading
    weights of another layout is refused.

    Args:
        in_features: columns of W.
        out_features: rows of W.
        layout: which blocks there are; of that size.
        bias: whether to add one.
        gates: whether to have a parameter `gates` [blocks], all 1 at first: block i counts gates[i] times.
        activation: "none" (or None), "relu", "gelu", "gelu_tanh" or "silu", applied to the result.
        device: of the parameters.
        dtype: of the parameters: float32, float64, bfloat16 or float16. Gates are float32 (float64 for float64).

    Raises:
        ValueError: the layout has another size, or there is no such activation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout,
        bias: bool = True,
        *,
        gates: bool = False,
        activation: str | None = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        need_sizes("BlockSparseLinear", layout, out_features, in_features)
        options: Any = {"bias": bias, "gates": gates, "activation": activation, "device": device, "dtype": dtype}
        self._make_parameters(layout, layout.values_shape, **options)
        self.in_features, self.out_features = in_features, out_features
        self.reset_parameters()

    @torch.no_grad()
    def identity_init_(self) -> BlockSparseLinear:
        """Block (out, in) becomes the identity where in mod out_blocks == out mod in_blocks, all else 0.

        A square layer with a full diagonal then passes x on. Source: openai/blocksparse, `identity_init`.
        """
        out, in_ = self.layout.coordinates()
        out_blocks, in_blocks = self.layout.grid
        chosen = torch.from_numpy(in_ % out_blocks == out % in_blocks).to(self.weight.device)
        self.weight.zero_().diagonal(0, 1, 2).copy_(chosen.unsqueeze(1))
        if self.bias is not None:
            self.bias.zero_()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]; see `blocksparse.torch.linear`."""
        if not isinstance(x, Tensor):
            if (node := as_leaf(self, x)) is not None:
                return cast(Tensor, node)
            need_tensor("BlockSparseLinear", "x", x)
        index = self.tables(x.device)
        sizes = (self.out_features, self.in_features)
        gates = self.gates_now() if self._gated else None  # reading a parameter costs 0.4 us, even one that is None
        return apply_linear(x, self.weight, index, sizes, self._transposed, self.bias, gates, None, self.activation)

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
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
        if (density is None) == (layout is None):
            raise ValueError("[from_dense] needs density or layout, one of them")
        need("from_dense", "linear", linear, nn.Linear, "a torch.nn.Linear")
        if layout is None:
            assert density is not None
            layout = convert.select_blocks(linear.weight, density, block_size)
        weight, bias = linear.weight, linear.bias is not None
        options: Any = {"activation": activation, "device": weight.device, "dtype": weight.dtype}
        layer = cls(linear.in_features, linear.out_features, layout, bias, **options)
        with torch.no_grad():
            layer.weight.copy_(convert.from_dense(weight, layout))
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    @classmethod
    def from_bsr(cls, tensor: Tensor, bias: Tensor | None = None) -> BlockSparseLinear:
        """A layer whose weight shares the memory of a `torch.sparse_bsr` tensor [out, in]."""
        values, layout = convert.from_bsr(tensor)
        need_tensors("from_bsr", bias=bias)
        layer = cls(
            layout.in_features, layout.out_features, layout, bias is not None, device="meta", dtype=values.dtype
        )
        layer.weight = nn.Parameter(values)
        if bias is not None:
            layer.bias = nn.Parameter(bias)
        layer.place(values.device)
        return layer

    def to_dense(self) -> nn.Linear:
        """The same layer as nn.Linear; gates are multiplied into the weight, an activation is left to the caller."""
        weight = self._gated_weight()
        dense = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            dense.weight.copy_(convert.to_dense(weight, self.layout))
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def to_bsr(self) -> Tensor:
        """The weight as a `torch.sparse_bsr` tensor that shares its memory; see `blocksparse.torch.to_bsr`."""
        return convert.to_bsr(self.weight.detach(), self.layout)

    def extra_repr(self) -> str:
        """The size, the blocks and what else there is."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._describe()}"
