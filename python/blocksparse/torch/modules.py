"""`BlockSparseLinear`: `torch.nn.Linear` with a block-sparse weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _lib
from ..layout import Layout
from . import convert
from .functional import apply_linear, index_of


class BlockSparseLinear(nn.Module):
    """y = x W^T + bias with W [out_features, in_features] zero outside of the blocks of a layout.

    `weight` [blocks, b, b] is an ordinary dense parameter, so optimizers, clipping, weight averages, DDP and FSDP work
    as ever and cost what the blocks cost. `pattern` is a small integer buffer that saves the layout with the weights:
    loading weights of another layout is refused.

    Args:
        in_features: columns of W.
        out_features: rows of W.
        layout: which blocks there are; of that size.
        bias: whether to add one.
        gates: whether to have a parameter `gates` [blocks], all 1 at first: block i counts gates[i] times.
        activation: "none", "relu", "gelu" or "silu", applied to the result.
        device: of the parameters.
        dtype: of the parameters: float32, float64, bfloat16 or float16. Gates are float32 (float64 for float64).

    Raises:
        ValueError: the layout has another size, or there is no such activation.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    gates: nn.Parameter | None
    pattern: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout,
        bias: bool = True,
        *,
        gates: bool = False,
        activation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if (layout.out_features, layout.in_features) != (out_features, in_features):
            raise ValueError(
                f"[BlockSparseLinear] layout is {layout.out_features} x {layout.in_features} (out x in), "
                f"needs {out_features} x {in_features}"
            )
        if activation not in _lib.ACTIVATIONS:
            raise ValueError(
                f"[BlockSparseLinear] activation is {activation!r}, needs one of {', '.join(_lib.ACTIVATIONS)}"
            )
        self.in_features, self.out_features = in_features, out_features
        self.layout, self.activation = layout, activation
        weight = torch.empty(layout.values_shape, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", nn.Parameter(weight.new_empty(out_features)) if bias else None)
        gate_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        gate = nn.Parameter(weight.new_ones(layout.blocks, dtype=gate_dtype)) if gates else None
        self.register_parameter("gates", gate)
        self.register_buffer("pattern", torch.from_numpy(layout.pattern()).to(weight.device))
        self._gated = gates
        self._index, self._transposed = index_of(layout, weight.device), layout.transposed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as nn.Linear, with the fan-in of the connections that each output really has."""
        if self.weight.is_meta:
            return
        bound = 1 / self._fan_in().clamp(min=1).sqrt()
        out = torch.from_numpy(self.layout.coordinates()[0]).to(self.weight.device, torch.int64)
        by_block = bound.view(-1, 1, 1)[out]
        self.weight.uniform_(-1, 1).mul_(by_block.to(self.weight.dtype))
        if self.bias is not None:
            by_output = bound.repeat_interleave(self.layout.block_size)[: self.out_features]
            self.bias.uniform_(-1, 1).mul_(by_output.to(self.bias.dtype))
        if self.gates is not None:
            self.gates.fill_(1)

    @torch.no_grad()
    def identity_init_(self) -> BlockSparseLinear:
        """Block (out, in) becomes the identity where in mod out_blocks == out mod in_blocks, all else 0.

        A square layer with a full diagonal then passes x on. Source: openai/blocksparse, `identity_init`.
        """
        out, in_ = self.layout.coordinates()
        out_blocks, in_blocks = self.layout.grid
        chosen = torch.from_numpy(in_ % out_blocks == out % in_blocks).to(self.weight.device)
        eye = torch.eye(self.layout.block_size, dtype=self.weight.dtype, device=self.weight.device)
        self.weight.copy_(chosen.view(-1, 1, 1) * eye)
        if self.bias is not None:
            self.bias.zero_()
        return self

    def _fan_in(self) -> Tensor:
        """Inputs of each block of outputs."""
        out, in_ = self.layout.coordinates()
        b = self.layout.block_size
        width = torch.from_numpy(in_).to(torch.float32).mul_(-b).add_(self.in_features).clamp_(max=b)
        fan_in = torch.zeros(self.layout.grid[0], device="cpu").index_add_(
            0, torch.from_numpy(out).to(torch.int64), width
        )
        return fan_in.to(self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]; see `blocksparse.torch.linear`."""
        index = self.tables(x.device)
        sizes = (self.out_features, self.in_features)
        gates = self.gates if self._gated else None  # reading a parameter costs 0.4 us, even one that is None
        return apply_linear(x, self.weight, index, sizes, self._transposed, self.bias, gates, None, self.activation)

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        activation: str = "none",
    ) -> BlockSparseLinear:
        """A layer with the blocks of a dense one that have the largest norms, or with those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, or the sizes do not fit.
        """
        if (density is None) == (layout is None):
            raise ValueError("[from_dense] needs density or layout, one of them")
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
        layer = cls(
            layout.in_features, layout.out_features, layout, bias is not None, device="meta", dtype=values.dtype
        )
        layer.weight = nn.Parameter(values)
        if bias is not None:
            layer.bias = nn.Parameter(bias)
        layer._place(values.device)
        return layer

    def to_dense(self) -> nn.Linear:
        """The same layer as nn.Linear; gates are multiplied into the weight, an activation is left to the caller."""
        weight = self.weight if self.gates is None else self.weight * self.gates.view(-1, 1, 1).to(self.weight.dtype)
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

    # ---- Where the tables are ---------------------------------------------------------------------------------------

    def tables(self, device: torch.device) -> Tensor:
        """`index_of` the layout, without a look-up."""
        if self._index.device != device:  # weights were assigned from elsewhere
            self._index = index_of(self.layout, device)
        return self._index

    def _place(self, device: torch.device) -> None:
        self._index = index_of(self.layout, device)
        self.pattern = torch.from_numpy(self.layout.pattern()).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSparseLinear:
        gates = self.gates
        spared = () if gates is None else (gates, gates.grad)

        def but_gates(tensor: Tensor) -> Tensor:
            """.half() and the like spare the gates."""
            moved = fn(tensor)
            narrowed = moved.dtype.itemsize < 4 and any(tensor is gate for gate in spared)
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        super()._apply(but_gates, recurse)
        self._place(self.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_index"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._index = index_of(self.layout, self.weight.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        pattern = state_dict.get(prefix + "pattern")
        if pattern is not None and not pattern.is_meta:
            errors: list[str] = arguments[-1]
            try:
                saved = Layout.from_pattern(pattern.cpu().numpy())
            except ValueError as error:
                errors.append(f"{prefix}pattern: {error}")
                return
            if saved != self.layout:
                errors.append(
                    f"{prefix}weight was saved with {saved!r} (hash {hash(saved):016x}), "
                    f"this layer has {self.layout!r} (hash {hash(self.layout):016x})"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """The size, the blocks and what else there is."""
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, block_size={self.layout.block_size}, "
            f"blocks={self.layout.blocks} ({self.layout.density:.2%}), bias={self.bias is not None}"
        )
        if self.gates is not None:
            text += ", gates=True"
        return text if self.activation == "none" else f"{text}, activation={self.activation}"
