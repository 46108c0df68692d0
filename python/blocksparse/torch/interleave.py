"""Gate and up of a gated linear unit as one weight, on PyTorch's tensors: see `blocksparse.interleave`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..interleave import GROUP, interleaved_features, interleaved_order
from ..layout import Layout, need_layout
from .arguments import need_tensor


def _places(layout: Layout, device: torch.device) -> Tensor:
    return torch.from_numpy(interleaved_order(layout)).to(device)


def interleave(gate: Tensor, up: Tensor, layout: Layout) -> Tensor:
    """The values of `interleaved_layout(layout)` from those of gate and of up, [blocks, b, b]. Differentiable.

    Raises:
        ValueError: values do not have the layout's shape.
    """
    need_layout("interleave", layout)
    for name, values in (("gate", gate), ("up", up)):
        need_tensor("interleave", name, values)
        if tuple(values.shape) != layout.values_shape:
            raise ValueError(f"[interleave] {name} is {list(values.shape)}, needs {list(layout.values_shape)}")
    if layout.transposed:
        gate, up = gate.transpose(1, 2), up.transpose(1, 2)
    b = layout.block_size
    both = torch.stack([part.unflatten(1, (-1, GROUP)) for part in (gate, up)], 2)  # [blocks, b / 8, 2, 8, b]
    return both.reshape(-1, b, b)[_places(layout, gate.device)]


def separate(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Values of gate and of up, [blocks, b, b] each, from those of `interleaved_layout(layout)`. Differentiable.

    Raises:
        ValueError: there are not as many values as that layout has blocks.
    """
    need_layout("separate", layout)
    need_tensor("separate", "values", values)
    b, order = layout.block_size, _places(layout, values.device)
    if tuple(values.shape) != (order.numel(), b, b):
        raise ValueError(f"[separate] values are {list(values.shape)}, needs {[order.numel(), b, b]}")
    both = values.new_zeros(2 * layout.blocks, b, b).index_put((order,), values)
    both = both.view(layout.blocks, b // GROUP, 2, GROUP, b)
    gate, up = (both[:, :, part].flatten(1, 2) for part in range(2))
    return (gate.transpose(1, 2), up.transpose(1, 2)) if layout.transposed else (gate, up)


def interleave_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Dense weights or biases [hidden, ...] as one [2 round_up(hidden, 8), ...], zeros where there is nothing."""
    need_tensor("interleave_rows", "gate", gate)
    need_tensor("interleave_rows", "up", up)
    if gate.shape != up.shape:
        raise ValueError(f"[interleave_rows] gate is {list(gate.shape)} and up {list(up.shape)}, needs one shape")
    features = interleaved_features(gate.size(0))
    both = gate.new_zeros(features // (2 * GROUP), 2, GROUP, *gate.shape[1:])
    for part, rows in enumerate((gate, up)):
        padded = torch.cat([rows, rows.new_zeros(features // 2 - rows.size(0), *rows.shape[1:])])
        both[:, part] = padded.unflatten(0, (-1, GROUP))
    return both.flatten(0, 2)


def separate_rows(both: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """The other way: (gate, up) [hidden, ...]."""
    parts = both.unflatten(0, (-1, 2, GROUP))
    return parts[:, 0].flatten(0, 1)[:hidden], parts[:, 1].flatten(0, 1)[:hidden]
