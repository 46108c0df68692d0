"""How much the loss would change with blocks that are not there: grow scores from x and dy alone, without dW.

With dW = dy^T x the gradient of a dense weight, a block B = (out, in) has the score |dW_B|_F (exact), or a bound on it
that costs 1 / b^2 as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...._core.arguments import to_int
from ...._core.geometry import fields_of, rank_of
from ...arguments import need_strided, need_tensor

STRIP = 1 << 22  # numbers of dW that are in memory at a time
SCORES = 1 << 20  # scores, where they are not in memory all at once

_NORMS = ("l2", "max")


@torch.no_grad()
def grow_scores(x: Tensor, dy: Tensor, block_size: int, *, strip: int = STRIP) -> Tensor:
    """Frobenius norms of the blocks of dW = dy^T x, which is computed in strips of rows and never stored.

    Sums over tokens are in the dtype of x (float16: in float32, for dW may be out of its range), norms in float32
    (float64 for float64).

    Args:
        x: [..., in], what the layer was given.
        dy: [..., out], the gradient of what it gave, with as many tokens.
        block_size: edge b of a block. The last block of a row or column may stick out.
        strip: numbers of dW in memory at a time; a strip has one row of blocks at least.

    Returns:
        [out_blocks, in_blocks].

    Raises:
        ValueError: x and dy have different counts of tokens or dtypes, or the block size is less than 1.

    Source: Evci et al., "Rigging the lottery", arXiv:1911.11134 (2019): RigL's score, by blocks.
    """
    x, dy, b = _tokens("grow_scores", x, dy, block_size)
    wide = _wide(x.dtype)
    inputs, rows = x.size(1), max(b, to_int("strip", strip, op="grow_scores") // max(1, x.size(1)) // b * b)
    in_blocks, out_blocks = -(-inputs // b), -(-dy.size(1) // b)
    if x.dtype == torch.float16:
        x = x.float()
    if inputs % b:
        x = F.pad(x, (0, in_blocks * b - inputs))
    norms = x.new_zeros(out_blocks, in_blocks, dtype=wide)
    for i in range(0, dy.size(1), rows):
        part = dy[:, i : i + rows].to(x.dtype)
        if part.size(1) % b:
            part = F.pad(part, (0, b - part.size(1) % b))
        squares = (part.t() @ x).to(wide).square_()
        sums = squares.view(-1, in_blocks, b).sum(2)  # along rows first, as they lie
        norms[i // b : i // b + sums.size(0) // b] = sums.view(-1, b, in_blocks).sum(1)
    return norms.sqrt_()


@torch.no_grad()
def grow_bound(x: Tensor, dy: Tensor, block_size: int, *, norm: str = "l2") -> Tensor:
    """sum over tokens of v(dy_out) v(x_in), with v the norm of a token's b features of a block: one small product.

    With "l2" it is never smaller than `grow_scores`: |sum dy_out^T x_in|_F <= sum |dy_out|_2 |x_in|_2. It does not see
    that gradients of tokens cancel.

    Args:
        x: [..., in], what the layer was given.
        dy: [..., out], the gradient of what it gave, with as many tokens.
        block_size: edge b of a block. The last block of a row or column may stick out.
        norm: "l2", or "max" (the largest magnitude).

    Returns:
        [out_blocks, in_blocks], float32 (float64 for float64).

    Raises:
        ValueError: x and dy have different counts of tokens or dtypes, the block size is less than 1, or there is no
            such norm.

    Source: openai/blocksparse, `block_reduced_full_dw`.
    """
    if norm not in _NORMS:
        raise ValueError(f"[grow_bound] norm is {norm!r}, needs one of {', '.join(_NORMS)}")
    x, dy, b = _tokens("grow_bound", x, dy, block_size)
    return _block_sizes(dy, b, norm, 1).t() @ _block_sizes(x, b, norm, 1)


@torch.no_grad()
def score_strips(x: Tensor, dy: Tensor, block_size: int, grow: str, strip: int = SCORES) -> Iterator[Tensor]:
    """`grow_scores` ("exact") or `grow_bound` ("bound"), flattened, in strips of about so many blocks.

    Memory is that of a strip beside x and dy: for layers whose blocks are too many to have a score each.
    """
    x, dy, b = _tokens("score_strips", x, dy, block_size)
    rows = max(1, strip // max(1, -(-x.size(1) // b)))
    if grow == "exact":
        for i in range(0, dy.size(1), rows * b):
            yield grow_scores(x, dy[:, i : i + rows * b], b).flatten()
        return
    outs, ins = _block_sizes(dy, b, "l2", 1), _block_sizes(x, b, "l2", 1)
    for i in range(0, outs.size(1), rows):
        yield (outs[:, i : i + rows].t() @ ins).flatten()


def _block_sizes(x: Tensor, b: int, norm: str, dim: int) -> Tensor:
    """The norms of the blocks of b features along a dimension, in the dtype of sums."""
    rest = x.size(dim) % b
    if rest:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, b - rest))
    order = float("inf") if norm == "max" else 2
    return torch.linalg.vector_norm(x.unflatten(dim, (-1, b)), order, dim + 1, dtype=_wide(x.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _block_size(op: str, block_size: int) -> int:
    if (b := to_int("block_size", block_size, op=op)) < 1:
        raise ValueError(f"[{op}] block_size is {b}, needs 1 or more")
    return b


def _pair(op: str, x: Tensor, dy: Tensor) -> None:
    need_tensor(op, "x", x)
    need_tensor(op, "dy", dy)
    need_strided(op, x=x, dy=dy)
    if x.dtype != dy.dtype or not x.dtype.is_floating_point:
        raise ValueError(f"[{op}] x is {x.dtype} and dy {dy.dtype}, needs real numbers of one dtype")


def _tokens(op: str, x: Tensor, dy: Tensor, block_size: int) -> tuple[Tensor, Tensor, int]:
    """X [N, in] and dy [N, out]."""
    _pair(op, x, dy)
    if x.dim() == 0 or dy.dim() == 0 or x.shape[:-1].numel() != dy.shape[:-1].numel():
        raise ValueError(f"[{op}] x is {list(x.shape)} and dy {list(dy.shape)}, needs [..., in] and as many [..., out]")
    return x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1)), _block_size(op, block_size)


# ---- Convolutions --------------------------------------------------------------------------------------------------


@torch.no_grad()
def conv_grow_scores(
    x: Tensor, dy: Tensor, geometry: tuple[int, ...], block_size: int, *, grow: str = "exact", strip: int = STRIP
) -> Tensor:
    """`grow_scores` ("exact") or `grow_bound` ("bound") of a convolution's filter, over all of its taps.

    Args:
        x: [n, in, size...], its channels in the order of the filter.
        dy: [n, out, size'...].
        geometry: of the convolution; see `blocksparse._core.geometry`.
        block_size: edge b of a block of channels.
        grow: "exact": |dW_B|_F of a block with all taps; "bound": the root of the squares of each tap's bound.
        strip: numbers of dW in memory at a time.

    Returns:
        [out_blocks, in_blocks].

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    _pair("conv_grow_scores", x, dy)
    rank = rank_of(geometry)
    if x.dim() != rank + 2 or dy.dim() != rank + 2 or x.size(0) != dy.size(0):
        raise ValueError(
            f"[conv_grow_scores] x is {list(x.shape)} and dy {list(dy.shape)}, needs [n, in, size...] and "
            f"[n, out, size'...] of {rank} sizes"
        )
    b, wide = _block_size("conv_grow_scores", block_size), _wide(x.dtype)
    x, dy = (x.float(), dy.float()) if x.dtype == torch.float16 else (x, dy)
    if grow == "bound":
        taps = _filter_gradient(_block_sizes(x, b, "l2", 1), _block_sizes(dy, b, "l2", 1), geometry)
        return taps.flatten(2).norm(dim=2)
    taps_count = max(1, torch.Size(fields_of(geometry)[0]).numel())
    rows = max(b, strip // max(1, x.size(1) * taps_count) // b * b)
    parts = []
    for i in range(0, dy.size(1), rows):
        squares = _filter_gradient(x, dy[:, i : i + rows], geometry).to(wide).square_().flatten(2).sum(2)
        down, across = -squares.size(0) % b, -squares.size(1) % b
        squares = F.pad(squares, (0, across, 0, down))
        parts.append(squares.view(squares.size(0) // b, b, -1, b).sum((1, 3)))
    return torch.cat(parts).sqrt_() if parts else x.new_zeros(0, -(-x.size(1) // b), dtype=wide)


def _filter_gradient(x: Tensor, dy: Tensor, geometry: tuple[int, ...]) -> Tensor:
    """dW [out, in, kernel...], by PyTorch's own convolutions, which pad as much before as after."""
    kernel, stride, dilation, before, after, _ = (list(field) for field in fields_of(geometry))
    rank, image = rank_of(geometry), dy if geometry[0] else x
    pads = [pad for pair in zip(reversed(before), reversed(after), strict=True) for pad in pair]
    image = F.pad(image, pads)  # a transposed one is the other way round: dy plays the part of the image
    other = x if geometry[0] else dy
    # Pixels at the end that no window reaches.
    sizes = [
        (n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(other.shape[2:], stride, dilation, kernel, strict=True)
    ]
    image = F.pad(
        image, [p for n, m in zip(reversed(image.shape[2:]), reversed(sizes), strict=True) for p in (0, m - n)]
    )
    shape: Any = (other.size(1), image.size(1), *kernel)
    made = torch.ops.aten.convolution_backward(
        other.contiguous(),
        image.contiguous(),
        other.new_empty(1).expand(shape),
        None,
        stride,
        [0] * rank,
        dilation,
        False,
        [0] * rank,
        1,
        [False, True, False],
    )[1]
    return made.transpose(0, 1) if geometry[0] else made
