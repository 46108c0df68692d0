"""How much a block counts: pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...._core.arguments import to_int
from ...arguments import need_strided, need_tensor


def block_views(matrix: Tensor, block_size: int) -> Iterator[tuple[Tensor, tuple[slice, slice]]]:
    """Views of a matrix [out, in, ...] by blocks: [rows, b, columns, b, ...], and which blocks of the grid they are.

    One view holds the whole blocks; ragged edges give up to three more, of blocks less high or less wide. What is
    written to the views is written to the matrix.
    """
    out, in_ = matrix.shape[:2]
    for row, height in _pieces(out, block_size):
        for column, width in _pieces(in_, block_size):
            part = matrix[row.start * block_size : row.start * block_size + (row.stop - row.start) * height]
            part = part[:, column.start * block_size : column.start * block_size + (column.stop - column.start) * width]
            rows, columns = row.stop - row.start, column.stop - column.start
            yield part.unflatten(0, (rows, height)).unflatten(2, (columns, width)), (row, column)


def _pieces(size: int, b: int) -> list[tuple[slice, int]]:
    """Which blocks along a side are whole, and which one is not, with their edges."""
    whole, rest = divmod(size, b)
    pieces = [(slice(0, whole), b)] if whole else []
    return [*pieces, (slice(whole, whole + 1), rest)] if rest else pieces


def block_norms(matrix: Tensor, block_size: int, p: float = 2) -> Tensor:
    """The p-norm of each block of a matrix: [out, in] -> [out_blocks, in_blocks].

    Args:
        matrix: [out, in], or a filter [out, in, size...], whose blocks have all taps. The last block of a side may be
            ragged.
        block_size: edge b of a block.
        p: 1, 2 (the Frobenius norm) or math.inf (the largest |w|).

    Returns:
        float32 (float64 for float64), summed in that type.

    Raises:
        ValueError: the matrix has less than 2 dimensions or no real numbers, the block size is less than 1, or p is
            another number.
    """
    need_tensor("block_norms", "matrix", matrix)
    need_strided("block_norms", matrix=matrix)
    block_size = to_int("block_size", block_size, op="block_norms")
    if matrix.dim() < 2 or not matrix.dtype.is_floating_point:
        raise ValueError(f"[block_norms] matrix is {matrix.dtype} {list(matrix.shape)}, needs real numbers [out, in]")
    if block_size < 1:
        raise ValueError(f"[block_norms] block_size is {block_size}, needs 1 or more")
    if p not in (1, 2, math.inf):
        raise ValueError(f"[block_norms] p is {p}, needs 1, 2 or math.inf")
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    grid = [-(-size // block_size) for size in matrix.shape[:2]]
    norms = torch.zeros(grid, dtype=dtype, device=matrix.device)
    for blocks, place in block_views(matrix.detach(), block_size):
        dims = (1, *range(3, blocks.dim()))
        norms[place] = torch.linalg.vector_norm(blocks, ord=p, dim=dims, dtype=dtype)
    return norms
