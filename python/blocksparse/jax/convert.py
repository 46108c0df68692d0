"""Between dense weights, block-sparse matrices of JAX and SciPy, and blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arguments import need, to_int
from ..layout import Layout, need_layout
from .arguments import need_array


def _grid(weight: Any, b: int) -> Any:
    """[out, in] as blocks [out_blocks, in_blocks, b, b], ragged edges filled with zeros."""
    out, in_ = weight.shape
    rows, columns = -(-out // b), -(-in_ // b)
    padded = jnp.pad(weight, ((0, rows * b - out), (0, columns * b - in_)))
    return padded.reshape(rows, b, columns, b).swapaxes(1, 2)


def select_blocks(weight: Any, density: float, block_size: int) -> Layout:
    """The layout of the blocks of a dense weight with the largest Frobenius norms.

    Args:
        weight: [out, in], or a filter [out, in, size...]; its values are looked at, so outside of compiled functions.
        density: share of blocks to keep: floor(density * blocks + 0.5) of them; of equal norms, the first.
        block_size: edge of a block.

    Raises:
        ValueError: weight has less than 2 dimensions, or density is outside of [0, 1].
    """
    weight = need_array("select_blocks", "weight", weight)
    need("select_blocks", "density", density, Real, "a number")
    block_size = to_int("block_size", block_size, op="select_blocks")
    if block_size < 1:
        raise ValueError(f"[select_blocks] block_size is {block_size}, needs 8, 16, 32, 64 or 128")
    if weight.ndim < 2:
        raise ValueError(f"[select_blocks] weight is {list(weight.shape)}, needs [out, in]")
    if not 0 <= density <= 1:
        raise ValueError(f"[select_blocks] density is {density}, needs 0 to 1")
    squares = jnp.square(weight.astype(jnp.promote_types(weight.dtype, jnp.float32)))
    sums = _grid(squares.reshape(*weight.shape[:2], -1).sum(-1), block_size).sum((2, 3))
    norms = np.asarray(sums)
    best = np.argsort(-norms, axis=None, kind="stable")[: math.floor(density * norms.size + 0.5)]
    mask = np.zeros(norms.size, np.bool_)
    mask[best] = True
    out, in_ = weight.shape[:2]
    return Layout.from_mask(mask.reshape(norms.shape), block_size, out_features=out, in_features=in_)


def from_dense(weight: Any, layout: Layout) -> jax.Array:
    """The blocks of a dense weight [out, in] that a layout names: [blocks, b, b]. Differentiable.

    A filter [out, in, size...] gives [blocks, taps, b, b]. Kernels of flax are [in, out] and [size..., in, out]: give
    their transpose, or let the `from_dense` of a module do so.

    Raises:
        ValueError: the weight does not have the layout's size.
    """
    weight, layout = need_array("from_dense", "weight", weight), need_layout("from_dense", layout)
    if weight.shape[:2] != layout.sizes:
        raise ValueError(f"[from_dense] weight is {list(weight.shape)}, needs {list(layout.sizes)}")
    if weight.ndim > 2:
        taps = weight.reshape(*layout.sizes, -1)
        return jnp.stack([from_dense(taps[..., i], layout) for i in range(taps.shape[-1])], 1)
    blocks = _grid(weight, layout.block_size)[layout.coordinates()]
    return blocks.swapaxes(1, 2) if layout.transposed else blocks


def to_dense(values: Any, layout: Layout, kernel_size: Sequence[int] | None = None) -> jax.Array:
    """The weight [out, in] with these blocks [blocks, b, b], zero elsewhere. Differentiable.

    With a kernel_size, values are those of a filter, [blocks, taps, b, b], which gives a filter [out, in, size...].

    Raises:
        ValueError: values do not have the layout's shape.
    """
    values, layout = need_array("to_dense", "values", values), need_layout("to_dense", layout)
    count, b, _ = layout.values_shape
    if kernel_size is not None:
        needed: tuple[int, ...] = (count, math.prod(kernel_size), b, b)
        if values.shape == needed:
            taps = [to_dense(values[:, i], layout) for i in range(values.shape[1])]
            return jnp.stack(taps, -1).reshape(*layout.sizes, *kernel_size)
    else:
        needed = (count, b, b)
    if values.shape != needed:
        raise ValueError(f"[to_dense] values are {list(values.shape)}, needs {list(needed)}")
    rows, columns = layout.grid
    blocks = values.swapaxes(1, 2) if layout.transposed else values
    grid = jnp.zeros((rows, columns, b, b), values.dtype).at[layout.coordinates()].set(blocks)
    return grid.swapaxes(1, 2).reshape(rows * b, columns * b)[: layout.out_features, : layout.in_features]


def _need_whole(op: str, values: Any, layout: Layout) -> jax.Array:
    values, layout = need_array(op, "values", values), need_layout(op, layout)
    if values.shape != layout.values_shape:
        raise ValueError(f"[{op}] values are {list(values.shape)}, needs {list(layout.values_shape)}")
    b = layout.block_size
    if layout.transposed or layout.out_features % b or layout.in_features % b:
        raise ValueError(f"[{op}] {layout!r}: needs feature counts that are multiples of {b}, and no transposed view")
    return values


def to_bcsr(values: Any, layout: Layout) -> Any:
    """The weight as a `jax.experimental.sparse.BCSR` [out_blocks, in_blocks, b, b] with two dense dimensions.

    Its data are `values`, without a copy.

    Raises:
        ValueError: values do not have the layout's shape, the layout is a transposed view, or its features are not
            multiples of the block size.
    """
    from jax.experimental import sparse

    values = _need_whole("to_bcsr", values, layout)
    crow, col = layout.csr()
    b = layout.block_size
    return sparse.BCSR((values, jnp.asarray(col), jnp.asarray(crow)), shape=(*layout.grid, b, b))


def from_bcsr(matrix: Any) -> tuple[jax.Array, Layout]:
    """(values, layout) of a `jax.experimental.sparse.BCSR` as `to_bcsr` makes them; values share its memory.

    Raises:
        ValueError: it has other dimensions, its blocks are not square, or its indices do not rise.
        TypeError: it is no BCSR.
    """
    from jax.experimental import sparse

    need("from_bcsr", "matrix", matrix, sparse.BCSR, "a jax.experimental.sparse.BCSR")
    shape = matrix.shape
    if (matrix.n_batch, matrix.n_sparse, matrix.n_dense) != (0, 2, 2) or shape[2] != shape[3]:
        raise ValueError(
            f"[from_bcsr] a matrix of {list(shape)} with {matrix.n_batch} batch and {matrix.n_dense} dense dimensions, "
            "needs [out_blocks, in_blocks, b, b], the last two dense"
        )
    return matrix.data, Layout.from_csr(np.asarray(matrix.indptr), np.asarray(matrix.indices), shape[1], shape[3])


def to_bsr(values: Any, layout: Layout) -> Any:
    """The weight as a SciPy `bsr_array`, on the host.

    Raises:
        ValueError: as `to_bcsr`.
    """
    from scipy.sparse import bsr_array

    values = _need_whole("to_bsr", values, layout)
    crow, col = layout.csr()
    return bsr_array((np.asarray(values), col, crow), shape=layout.sizes)


def from_bsr(matrix: Any) -> tuple[jax.Array, Layout]:
    """(values, layout) of a SciPy BSR array or matrix with square blocks and sorted indices.

    Raises:
        ValueError: the blocks are not square, or the indices are not sorted.
        TypeError: it is no BSR array or matrix.
    """
    layout = Layout.from_scipy(matrix)
    return need_array("from_bsr", "matrix", matrix.data), layout
