"""`BlockSparseLayer`: what layers with block-sparse weights share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._core.text import percentage
from ...layout import HostLayout, Layout
from ..arguments import need_activation, need_dtype
from ..tables import index_of
from .digits import pattern_of

Self = TypeVar("Self", bound="BlockSparseLayer")


class BlockSparseLayer(nn.Module):
    """Parameters over the blocks of a layout, and the tables that the ops read, wherever the layer is moved.

    `weight` [blocks, ..., b, b] is an ordinary dense parameter. `pattern` saves the layout with it, as digits in
    floating point, which averages of state dicts leave as they are and `Layout.from_pattern` takes.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    gates: nn.Parameter | None
    pattern: Tensor
    layout: Layout
    activation: str
    _lent: Tensor | None = None
    takes_layout: Callable[[Layout], bool] | None = None
    """Asked where weights of another layout are loaded: whether the layer has taken that layout, by `relayout`."""

    def _make_parameters(
        self,
        layout: Layout,
        shape: tuple[int, ...],
        *,
        bias: bool,
        gates: bool,
        activation: str | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.layout, self.activation = layout, need_activation(type(self).__name__, activation)
        weight = torch.empty(shape, device=device, dtype=dtype)
        need_dtype(type(self).__name__, weight.dtype)
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", nn.Parameter(weight.new_empty(layout.out_features)) if bias else None)
        gate_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        gate = nn.Parameter(weight.new_ones(layout.blocks, dtype=gate_dtype)) if gates else None
        self.register_parameter("gates", gate)
        self.register_buffer("pattern", pattern_of(layout, weight.device))
        self._gated = gates
        self._index, self._transposed = index_of(layout, weight.device), layout.transposed

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as dense layers, with the fan-in of the connections that each output has."""
        if self.weight.is_meta:
            return
        taps = math.prod(self.weight.shape[1:-2])
        bound = 1 / (self._fan_in() * taps).clamp(min=1).sqrt()
        out = torch.from_numpy(self.layout.coordinates()[0]).to(self.weight.device, torch.int64)
        by_block = bound[out].view(-1, *(1,) * (self.weight.dim() - 1))
        self.weight.uniform_(-1, 1).mul_(by_block.to(self.weight.dtype))
        if self.bias is not None:
            by_output = bound.repeat_interleave(self.layout.block_size)[: self.layout.out_features]
            self.bias.uniform_(-1, 1).mul_(by_output.to(self.bias.dtype))
        if self.gates is not None:
            self.gates.fill_(1)

    def _fan_in(self) -> Tensor:
        """Inputs of each block of outputs."""
        out, in_ = self.layout.coordinates()
        b = self.layout.block_size
        width = torch.from_numpy(in_).to(torch.float32).mul_(-b).add_(self.layout.in_features).clamp_(max=b)
        fan_in = torch.zeros(self.layout.grid[0], dtype=torch.float32, device="cpu").index_add_(
            0, torch.from_numpy(out).to(torch.int64), width
        )
        return fan_in.to(self.weight.device)

    def _gated_weight(self) -> Tensor:
        if self.gates is None:
            return self.weight
        return self.weight * self.gates.view(-1, *(1,) * (self.weight.dim() - 1)).to(self.weight.dtype)

    def lend_gates(self, gates: Tensor | None) -> None:
        """Has forward multiply the blocks by gates [blocks], beside the layer's own, until None is lent.

        For methods that learn which blocks to keep: gates get gradients, and are no parameters of the layer.
        """
        self._lent = gates
        self._gated = gates is not None or self.gates is not None

    def gates_now(self) -> Tensor | None:
        """Those that forward reads: the layer's own, times those that it was lent."""
        own, lent = self.gates, self._lent
        return own if lent is None else lent if own is None else own * lent

    def _describe(self) -> str:
        """What `extra_repr` says of all layers."""
        text = (
            f"block_size={self.layout.block_size}, blocks={self.layout.blocks} ({percentage(self.layout.density)}), "
            f"bias={self.bias is not None}"
        )
        if self.gates is not None:
            text += ", gates=True"
        return text if self.activation == "none" else f"{text}, activation={self.activation}"

    # ---- Where the tables are ---------------------------------------------------------------------------------------

    def tables(self, device: torch.device) -> Tensor:
        """`index_of` the layout, without a look-up."""
        if self._index.device != device:  # weights were assigned from elsewhere
            self._index = index_of(self.layout, device)
        return self._index

    def relayout(self, layout: Layout) -> None:
        """Takes another layout of the same sizes and as many blocks, in whose places the blocks of `weight` are then.

        The parameter stays as it is. Of a layout whose tables a card has made, `pattern` is read when it is saved.

        Raises:
            ValueError: the layout has other sizes, another block size or another number of blocks.
        """
        own = self.layout
        if (layout.sizes, layout.values_shape, layout.transposed) != (own.sizes, own.values_shape, own.transposed):
            raise ValueError(f"[{type(self).__name__}] cannot take {layout!r} in the place of {own!r}")
        self.layout, self._index = layout, index_of(layout, self.weight.device)
        if isinstance(layout, HostLayout):
            self.pattern = pattern_of(layout, self.pattern.device)

    def place(self, device: torch.device) -> None:
        """Brings the tables and the pattern to a device, where the weight is now."""
        if not isinstance(self.layout, HostLayout) and device != self._index.device:
            self.layout = self.layout.host()  # its tables are of use where they are alone, if they change
        self._index = index_of(self.layout, device)
        self.pattern = pattern_of(self.layout, device)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        gates = self.gates
        spared = () if gates is None else (gates, gates.grad)

        def but_gates(tensor: Tensor) -> Tensor:
            """.half() and the like spare the gates, .to(memory_format=...) the blocks of filters."""
            moved = fn(tensor)
            moved = moved.contiguous() if tensor.is_contiguous() else moved
            narrowed = moved.dtype.itemsize < 4 and any(tensor is gate for gate in spared)
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        super()._apply(but_gates, recurse)
        self.place(self.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_index"]
        state.pop("takes_layout", None)
        if not isinstance(self.layout, HostLayout):  # tables that change would change the copy's
            state["layout"] = self.layout.host()
            state["_buffers"] = {**self._buffers, "pattern": pattern_of(self.layout, self.pattern.device)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._index = index_of(self.layout, self.weight.device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not isinstance(self.layout, HostLayout):  # the buffer stays: it may be one process of several that saves
            destination[prefix + "pattern"] = pattern_of(self.layout, self.pattern.device)

    def _is_average_of_own(self, pattern: Tensor) -> bool:
        """Whether it is this layout's, averaged in types as coarse as bfloat16, where digits drift by half a unit.

        Those of another layout differ in its hash.
        """
        own = pattern_of(self.layout, torch.device("cpu"))
        if pattern.is_meta or not pattern.is_floating_point() or pattern.shape != own.shape:
            return False
        return bool(((pattern.cpu().double() - own.double()).abs() < 1).all())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        pattern = state_dict.get(prefix + "pattern")
        if pattern is not None and self._is_average_of_own(pattern):
            state_dict[prefix + "pattern"] = pattern_of(self.layout, pattern.device)
        elif pattern is not None and not pattern.is_meta:
            errors: list[str] = arguments[-1]
            try:
                saved = Layout.from_pattern(
                    (pattern.double() if pattern.is_floating_point() else pattern).cpu().numpy()
                )
            except ValueError as error:
                errors.append(f"{prefix}pattern: {error}")
                return
            if saved != self.layout and (self.takes_layout is None or not self.takes_layout(saved)):
                errors.append(
                    f"{prefix}weight was saved with {saved!r} (hash {hash(saved):016x}), "
                    f"this layer has {self.layout!r} (hash {hash(self.layout):016x})"
                )
                return
            state_dict[prefix + "pattern"] = pattern_of(self.layout, pattern.device)  # which another form may stand for
        if not isinstance(self.layout, HostLayout):  # the buffer may be an old one, of another length
            self.pattern = pattern_of(self.layout, self.pattern.device)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
