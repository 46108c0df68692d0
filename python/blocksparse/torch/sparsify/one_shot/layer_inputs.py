"""What layers multiply with their weights: rows of features, as the columns of `matrix_of` count them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...._core.geometry import fields_of, make_geometry
from ... import convert
from ...modules.conv import DENSE, DENSE_TRANSPOSED, BlockSparseConv
from ..weights.targets import Target

_ROWS = 1 << 16  # of unfolded pixels at once


def matrix_of(target: Target) -> Tensor:
    """A target's weight as a dense [out, in], a filter's as [out, in * taps]. A copy or a view."""
    if target.layout is None:
        return target.matrix().flatten(1)
    kernel = getattr(target.module, "kernel_size", None)
    return convert.to_dense(target.blocks(), target.layout, kernel).flatten(1)


def edges_of(target: Target) -> tuple[int, int]:
    """(rows, columns) of a block of `matrix_of`: columns of a filter have all taps."""
    out, in_ = target.sizes
    taps = target.parameter.numel() // (out * in_) if target.layout is None else target.blocks().shape[1:-2].numel()
    return target.block_size, target.block_size * taps


@torch.no_grad()
def set_matrix_(target: Target, matrix: Tensor) -> None:
    """Writes what `matrix_of` would then return into the weight."""
    if target.layout is None:
        target.matrix().copy_(matrix.view(target.matrix().shape))
        return
    kernel = getattr(target.module, "kernel_size", ())
    target.blocks().copy_(convert.from_dense(matrix.view(*target.sizes, *kernel), target.layout))


def rows_of(target: Target, inputs: tuple[Any, ...], output: Any) -> Iterator[Tensor]:
    """The rows X [n, in] that one call of the target's module has multiplied with the weight, in parts.

    Raises:
        ValueError: it is an LSTM whose states are not seen: bidirectional, with projections, or fed a PackedSequence.
    """
    module = target.module
    if isinstance(module, nn.LSTM):
        yield _states(target, inputs, output)
        return
    x = inputs[0].detach()
    if isinstance(module, (*DENSE, *DENSE_TRANSPOSED, BlockSparseConv)):
        yield from _unfolded(module, x)
    else:
        yield x.reshape(-1, x.size(-1))


# ---- Convolutions --------------------------------------------------------------------------------------------------


def _unfolded(conv: Any, x: Tensor) -> Iterator[Tensor]:
    """[n, in, size...] -> rows [pixels of the result, in * taps], a few images at a time."""
    rank = len(conv.kernel_size)
    x = x if x.dim() == rank + 2 else x.unsqueeze(0)
    if (order := getattr(conv, "channel_order", None)) is not None:
        x = x[:, order.long()]
    transposed = isinstance(conv, DENSE_TRANSPOSED) or bool(getattr(conv, "transposed", False))
    sizes = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.output_padding)
    kernel, stride, dilation, before, after, more = fields_of(make_geometry(rank, *sizes, transposed=transposed))
    if transposed:  # a convolution of stride 1 with the kernel turned, over pixels with zeros between them
        spaced = x.new_zeros(*x.shape[:2], *((n - 1) * step + 1 for n, step in zip(x.shape[2:], stride, strict=True)))
        places: Any = (..., *(slice(None, None, step) for step in stride))
        spaced[places] = x
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before = [r - pad for r, pad in zip(reach, before, strict=True)]
        after = [r - pad + m for r, pad, m in zip(reach, after, more, strict=True)]
        x, stride = spaced, [1] * rank
    pads = [pad for pair in zip(reversed(before), reversed(after), strict=True) for pad in pair]
    mode = getattr(conv, "padding_mode", "zeros")
    x = nn.functional.pad(x, pads, mode="constant" if mode == "zeros" else mode)
    for i, (k, step, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + i, d * (k - 1) + 1, step)[..., ::d]
    if transposed:
        x = x.flip(list(range(2 + rank, 2 + 2 * rank)))
    x = x.movedim(1, 1 + rank)  # [n, pixels..., in, taps...]
    for part in x.split(max(1, _ROWS // max(1, x.shape[1 : 1 + rank].numel()))):
        yield part.reshape(-1, x.shape[1 + rank :].numel())


# ---- LSTMs ---------------------------------------------------------------------------------------------------------


def _states(target: Target, inputs: tuple[Any, ...], output: Any) -> Tensor:
    """The states that the layer of a recurrent weight was in before each step."""
    lstm = cast(nn.LSTM, target.module)
    if lstm.bidirectional or lstm.proj_size or not isinstance(inputs[0], Tensor):
        raise ValueError(
            f"[sparsify_] {target.name} is of an LSTM that is bidirectional, projects, or is fed a PackedSequence, "
            'whose states are not seen: take "magnitude"'
        )
    x, layer = inputs[0].detach(), int(target.parameter_name.removeprefix("weight_hh_l"))
    x = x if x.dim() == 3 else x.unsqueeze(0 if lstm.batch_first else 1)
    x = x.transpose(0, 1) if lstm.batch_first else x
    zeros = x.new_zeros(lstm.num_layers, x.size(1), lstm.hidden_size)
    given = inputs[1] if len(inputs) > 1 and inputs[1] is not None else (zeros, zeros)
    h, c = (state.detach().view_as(zeros) for state in given)
    with torch.no_grad():
        for i in range(layer + 1):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if lstm.bias else 2]
            weights = [getattr(lstm, f"{name}_l{i}") for name in names]
            state = (h[i : i + 1].contiguous(), c[i : i + 1].contiguous())
            x = torch.lstm(x.contiguous(), state, weights, lstm.bias, 1, 0.0, False, False, False)[0]
    return torch.cat([h[layer : layer + 1], x[:-1]]).reshape(-1, lstm.hidden_size)
