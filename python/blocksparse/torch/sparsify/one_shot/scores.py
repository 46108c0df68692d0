"""Scores of blocks that look at what a layer is fed, and the refit of what stays: pure functions of tensors.

A weight is [out, in], of blocks of b x b; that of a convolution is [out, in * taps], of blocks of b x (b * taps). The
Gram matrix H = X^T X [in, in] is that of the layer's inputs X [n, in].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...._core.arguments import need, to_int, to_number
from ...arguments import need_tensor

DAMP = 0.01  # of the mean of H's diagonal, as SparseGPT has it

Edges = int | tuple[int, int]


def damped(gram: Tensor, share: float = DAMP) -> Tensor:
    """H + share * mean(diag H) * I, in float64, which is positive definite. If H is 0, the identity.

    Args:
        gram: H [in, in], symmetric.
        share: of the mean of the diagonal.

    Raises:
        ValueError: H is not square, or holds NaN or Inf; or the share is not above 0.
    """
    h = _square("damped", gram)
    if not to_number("damped", "share", share) > 0:
        raise ValueError(f"[damped] share is {share}, needs a number above 0")
    if not bool(torch.isfinite(h).all()):
        raise ValueError("[damped] the Gram matrix holds NaN or Inf: what was the layer fed?")
    mean = float(h.diagonal().mean()) if h.numel() else 0.0
    return h + (share * mean if mean > 0 else 1.0) * torch.eye(h.size(0), dtype=h.dtype, device=h.device)


def wanda_scores(weight: Tensor, input_norms: Tensor, block_size: Edges) -> Tensor:
    """Sum over each block of (|W_oi| |x_i|_2)^2: Wanda's score of a weight, squared, added up over blocks.

    Args:
        weight: [out, in].
        input_norms: |x_i|_2 [in], over all tokens: the root of H's diagonal.
        block_size: edge b, or (rows, columns) of a block.

    Returns:
        float32 (float64 for float64) [out_blocks, in_blocks].

    Raises:
        ValueError: the shapes do not fit each other.

    Source: Sun et al., A simple and effective pruning approach for large language models, arXiv 2306.11695.
    """
    rows, columns = _edges("wanda_scores", weight, block_size)
    need_tensor("wanda_scores", "input_norms", input_norms)
    if tuple(input_norms.shape) != (weight.size(1),):
        raise ValueError(f"[wanda_scores] input_norms are {list(input_norms.shape)}, needs [{weight.size(1)}]")
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scaled = weight.detach().to(dtype) * input_norms.to(weight.device, dtype)
    return grid_of_edges(scaled, rows, columns).square().sum((2, 3))


def obs_scores(weight: Tensor, hessian: Tensor, block_size: Edges) -> Tensor:
    """tr(W_B [(H^-1)_QQ]^-1 W_B^T), Q the inputs of block B: what dropping B costs if the rest of its rows is refitted.

    Args:
        weight: [out, in].
        hessian: H [in, in], positive definite: see `damped`.
        block_size: edge b, or (rows, columns) of a block.

    Returns:
        float64 [out_blocks, in_blocks].

    Raises:
        ValueError: the shapes do not fit each other, or H is not positive definite.

    Source: Hassibi and Stork, NIPS 1992; blocks as in Kurtic et al. (oBERT), arXiv 2203.07259.
    """
    rows, columns = _edges("obs_scores", weight, block_size)
    inverse = torch.cholesky_inverse(_factor("obs_scores", hessian, weight.size(1)))
    w = weight.detach().to(inverse.device, torch.float64)
    scores = []
    for i in range(0, w.size(1), columns):
        part = torch.linalg.cholesky(inverse[i : i + columns, i : i + columns])
        solved = torch.linalg.solve_triangular(part, w[:, i : i + columns].t(), upper=False)  # L^-1 W_B^T
        scores.append(_by_rows(solved.square().sum(0), rows))
    return torch.stack(scores, 1)


@torch.no_grad()
def refit(weight: Tensor, hessian: Tensor, mask: Tensor, block_size: Edges) -> Tensor:
    """The weight W' with the blocks of the mask alone that has the least tr((W - W') H (W - W')^T).

    For each row of blocks with the live inputs S: W'_S = W H_:S (H_SS)^-1, one solve of float64. Rounding to the dtype
    of W could undo what little is gained: rows of blocks for which it does keep the values of W.

    Args:
        weight: W [out, in].
        hessian: H [in, in], positive definite: see `damped`.
        mask: booleans [out_blocks, in_blocks], of the blocks that stay.
        block_size: edge b, or (rows, columns) of a block.

    Returns:
        W' like W: never worse than W with the other blocks zeroed.

    Raises:
        ValueError: the shapes do not fit each other, or H is not positive definite.

    Source: the exact form of what Frantar and Alistarh (SparseGPT), arXiv 2301.00774, solve column by column.
    """
    rows, columns = _edges("refit", weight, block_size)
    need_tensor("refit", "mask", mask)
    grid = (-(-weight.size(0) // rows), -(-weight.size(1) // columns))
    if tuple(mask.shape) != grid or mask.dtype != torch.bool:
        raise ValueError(f"[refit] mask is {mask.dtype} {list(mask.shape)}, needs torch.bool {list(grid)}")
    _factor("refit", hessian, weight.size(1))  # refuses what is not positive definite
    h = hessian.double()
    w, mask = weight.detach().to(h.device, torch.float64), mask.to(h.device)
    kept = mask.repeat_interleave(columns, 1)[:, : w.size(1)]
    result = torch.zeros_like(weight, device=h.device)
    for i, live in enumerate(kept):
        old = w[i * rows : (i + 1) * rows]
        plain = (old * live).to(weight.dtype)
        s = live.nonzero().flatten()
        if s.numel() == 0:
            continue
        factor = torch.linalg.cholesky(h[s][:, s])
        fitted = torch.zeros_like(old)
        fitted[:, s] = torch.cholesky_solve((old @ h[:, s]).t(), factor).t()
        fitted = fitted.to(weight.dtype)
        better = _loss(old, fitted, h) <= _loss(old, plain, h)  # false where rounding gave Inf
        result[i * rows : (i + 1) * rows] = torch.where(better, fitted, plain)
    return result.to(weight.device)


def grid_of_edges(weight: Tensor, rows: int, columns: int) -> Tensor:
    """[out, in] as blocks [out_blocks, in_blocks, rows, columns], ragged edges filled with zeros."""
    down, right = -weight.size(0) % rows, -weight.size(1) % columns
    padded = torch.nn.functional.pad(weight, (0, right, 0, down))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)


def _loss(weight: Tensor, other: Tensor, h: Tensor) -> Tensor:
    difference = weight - other.double()
    return (difference @ h).mul_(difference).sum()


def _by_rows(values: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % rows)).view(-1, rows).sum(1)


def _edges(op: str, weight: Tensor, block_size: Edges) -> tuple[int, int]:
    need_tensor(op, "weight", weight)
    if weight.dim() != 2 or not weight.is_floating_point() or weight.is_meta:
        raise ValueError(f"[{op}] weight is {weight.dtype} {list(weight.shape)}, needs real numbers [out, in]")
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    need(op, "block_size", pair if len(pair) == 2 else None, tuple, "an edge, or (rows, columns)")
    rows, columns = (to_int("block_size", edge, 31, op) for edge in pair)
    if min(rows, columns) < 1:
        raise ValueError(f"[{op}] block_size is {block_size}, needs 1 or more")
    return rows, columns


def _square(op: str, h: Tensor) -> Tensor:
    need_tensor(op, "the Gram matrix", h)
    if h.dim() != 2 or h.size(0) != h.size(1):
        raise ValueError(f"[{op}] the Gram matrix is {list(h.shape)}, needs [in, in]")
    return h.double()


def _factor(op: str, hessian: Tensor, size: int) -> Tensor:
    h = _square(op, hessian)
    if h.size(0) != size:
        raise ValueError(f"[{op}] the Gram matrix is {list(h.shape)}, needs [{size}, {size}], as the weight has inputs")
    factor, info = torch.linalg.cholesky_ex(h)
    if bool(info) or not bool(torch.isfinite(factor).all()):
        raise ValueError(f"[{op}] the Gram matrix is not positive definite: see damped()")
    return factor
