"""What the ops cost, for `torch.utils.flop_counter.FlopCounterMode`: two a weight of a block and token or pixel.

Blocks count whole, those that stick out of a ragged edge and those of closed gates too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]
_ops = torch.ops.blocksparse


@register_flop_formula([_ops.linear, _ops.linear_fprop, _ops.linear_dgrad])
def linear_flops(x: Shape, values: Shape, *_: Any, **__: Any) -> int:
    """Of y or dx."""
    return 2 * math.prod(x[:-1]) * math.prod(values)


@register_flop_formula(_ops.linear_glu)
def linear_glu_flops(x: Shape, values: Shape, *_: Any, **__: Any) -> int:
    """Of gate and up; what follows them counts nothing."""
    return linear_flops(x, values)


@register_flop_formula(_ops.linear_wgrad)
def wgrad_flops(x: Shape, dy: Shape, index: Shape, blocks: int, block_size: int, *_: Any, **__: Any) -> int:
    """Of dW."""
    return 2 * math.prod(x[:-1]) * blocks * block_size**2


@register_flop_formula(_ops.linear_wgrad_list)
def wgrad_list_flops(
    x: Sequence[Shape], dy: Sequence[Shape], index: Shape, blocks: int, block_size: int, *_: Any, **__: Any
) -> int:
    """Of dW, summed over a list."""
    return sum(wgrad_flops(one, other, index, blocks, block_size) for one, other in zip(x, dy, strict=True))


def _pixels(x: Shape, y: Sequence[int], geometry: Sequence[int]) -> int:
    """Those that all taps are multiplied at: a convolution's results, the inputs of a transposed one."""
    return x[0] * math.prod(x[2:] if geometry[0] else y)


@register_flop_formula(_ops.conv_fprop)
def conv_flops(
    x: Shape, values: Shape, index: Shape, geometry: Sequence[int], *_: Any, out_shape: Shape, **__: Any
) -> int:
    """Of y."""
    return 2 * _pixels(x, out_shape[2:], geometry) * math.prod(values)


@register_flop_formula(_ops.conv_dgrad)
def conv_dgrad_flops(
    dy: Shape, values: Shape, index: Shape, geometry: Sequence[int], *_: Any, out_shape: Shape, **__: Any
) -> int:
    """Of dx."""
    return 2 * _pixels(out_shape, dy[2:], geometry) * math.prod(values)


@register_flop_formula(_ops.conv_wgrad)
def conv_wgrad_flops(
    x: Shape, dy: Shape, index: Shape, geometry: Sequence[int], blocks: int, block_size: int, *_: Any, **__: Any
) -> int:
    """Of dW."""
    rank = len(geometry) // 6
    return 2 * _pixels(x, dy[2:], geometry) * blocks * math.prod(geometry[1 : 1 + rank]) * block_size**2


@register_flop_formula(_ops.lstm_forward)
def lstm_flops(pre: Shape, values: Shape, index: Shape, h0: Shape | None, *_: Any, **__: Any) -> int:
    """Of all steps that have a state before them; the cells themselves count nothing."""
    return 2 * max(pre[0] - (h0 is None), 0) * pre[1] * math.prod(values)


@register_flop_formula(_ops.lstm_backward)
def lstm_backward_flops(
    values: Shape,
    index: Shape,
    y: Shape,
    gates: Shape,
    cells: Shape,
    h0: Shape | None,
    *more: Any,
    weight_gradient: bool = True,
    **_: Any,
) -> int:
    """Of the gradients of states, and of dW."""
    wants = more[6] if len(more) > 6 else weight_gradient  # c0, lengths, dy, dh, dc and wide come before it
    return 2 * max(y[0] - (h0 is None), 0) * y[1] * math.prod(values) * (1 + bool(wants))
