"""Between dense weights, BSR tensors and blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from .._core.arguments import need, to_int, to_list
from ..layout import Layout, need_layout
from .arguments import need_tensor


def grid_of(weight: Tensor, b: int) -> Tensor:
    """[out, in] as blocks [out_blocks, in_blocks, b, b], ragged edges filled with zeros."""
    out, in_ = weight.shape
    out_blocks, in_blocks = -(-out // b), -(-in_ // b)
    if out_blocks * b != out or in_blocks * b != in_:
        weight = torch.nn.functional.pad(weight, (0, in_blocks * b - in_, 0, out_blocks * b - out))
    return weight.view(out_blocks, b, in_blocks, b).transpose(1, 2)


def _places(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    out, in_ = layout.coordinates()
    return torch.from_numpy(out).to(device, torch.int64), torch.from_numpy(in_).to(device, torch.int64)


def select_blocks(weight: Tensor, density: float, block_size: int) -> Layout:
    """The layout of the blocks of a dense weight with the largest Frobenius norms.

    Args:
        weight: [out, in], or a filter [out, in, size...].
        density: share of blocks to keep: floor(density * blocks + 0.5) of them; of equal norms, the first.
        block_size: edge of a block.

    Raises:
        ValueError: weight has less than 2 dimensions, or no real values; or density is outside of [0, 1].
    """
    need_tensor("select_blocks", "weight", weight)
    if weight.is_meta or weight.dtype.is_complex:
        what = "on meta" if weight.is_meta else str(weight.dtype)
        raise ValueError(f"[select_blocks] weight is {what}, needs real numbers that have values")
    need("select_blocks", "density", density, Real, "a number")
    block_size = to_int("block_size", block_size, op="select_blocks")
    if block_size < 1:
        raise ValueError(f"[select_blocks] block_size is {block_size}, needs 8, 16, 32, 64 or 128")
    if weight.dim() > 2:
        weight = weight.detach().float().flatten(2).norm(dim=2)
    if weight.dim() != 2:
        raise ValueError(f"[select_blocks] weight is {list(weight.shape)}, needs [out, in]")
    if not 0 <= density <= 1:
        raise ValueError(f"[select_blocks] density is {density}, needs 0 to 1")
    norms = grid_of(weight.detach().float(), block_size).square().sum((2, 3))
    keep = math.floor(density * norms.numel() + 0.5)
    best = torch.sort(norms.flatten(), descending=True, stable=True).indices[:keep]
    mask = torch.zeros(norms.numel(), dtype=torch.bool, device=norms.device)
    mask[best] = True
    out, in_ = weight.shape
    return Layout.from_mask(mask.view(norms.shape).cpu().numpy(), block_size, out_features=out, in_features=in_)


def from_dense(weight: Tensor, layout: Layout) -> Tensor:
    """The blocks of a dense weight [out, in] that a layout names: [blocks, b, b]. Differentiable.

    A filter [out, in, size...] gives [blocks, taps, b, b]; that of a dense transposed convolution, [in, out, size...],
    needs its first two dimensions exchanged.

    Raises:
        ValueError: the weight does not have the layout's size.
    """
    need_tensor("from_dense", "weight", weight)
    need_layout("from_dense", layout)
    if tuple(weight.shape[:2]) != (layout.out_features, layout.in_features):
        raise ValueError(
            f"[from_dense] weight is {list(weight.shape)}, needs {[layout.out_features, layout.in_features]}"
        )
    if weight.dim() > 2:
        return torch.stack([from_dense(tap, layout) for tap in weight.flatten(2).unbind(2)], 1)
    blocks = grid_of(weight, layout.block_size)[_places(layout, weight.device)]
    return blocks.transpose(1, 2).contiguous() if layout.transposed else blocks


def to_dense(values: Tensor, layout: Layout, kernel_size: Sequence[int] | None = None) -> Tensor:
    """The weight [out, in] with these blocks [blocks, b, b], zero elsewhere. Differentiable.

    With a kernel_size, values are those of a filter, [blocks, taps, b, b], which gives a filter [out, in, size...].

    Raises:
        ValueError: values do not have the layout's shape.
        TypeError: the kernel_size is no sequence of integers.
    """
    need_tensor("to_dense", "values", values)
    need_layout("to_dense", layout)
    if kernel_size is not None:
        sizes = to_list("to_dense", "kernel_size", kernel_size, "a number for each size")
        kernel_size = tuple(to_int("kernel_size", size, op="to_dense") for size in sizes)
        count, edge, _ = layout.values_shape
        if tuple(values.shape) != (needed := (count, math.prod(kernel_size), edge, edge)):
            raise ValueError(f"[to_dense] values are {list(values.shape)}, needs {list(needed)}")
        return torch.stack([to_dense(tap, layout) for tap in values.unbind(1)], -1).unflatten(-1, kernel_size)
    if tuple(values.shape) != layout.values_shape:
        raise ValueError(f"[to_dense] values are {list(values.shape)}, needs {list(layout.values_shape)}")
    b, (out_blocks, in_blocks) = layout.block_size, layout.grid
    blocks = values.transpose(1, 2) if layout.transposed else values
    grid = values.new_zeros(out_blocks, in_blocks, b, b).index_put(_places(layout, values.device), blocks)
    return grid.transpose(1, 2).reshape(out_blocks * b, in_blocks * b)[: layout.out_features, : layout.in_features]


def from_bsr(tensor: Tensor) -> tuple[Tensor, Layout]:
    """(values, layout) of a `torch.sparse_bsr` tensor; values share its memory.

    Raises:
        ValueError: the tensor is not 2-D, or its blocks are not square.
    """
    layout = Layout.from_torch(tensor)
    return tensor.values(), layout


def to_bsr(values: Tensor, layout: Layout) -> Tensor:
    """The weight as a `torch.sparse_bsr` tensor that shares the memory of `values`.

    Raises:
        ValueError: values do not have the layout's shape, the layout is a transposed view, or its features are not
            multiples of the block size, which BSR cannot say.
    """
    need_tensor("to_bsr", "values", values)
    need_layout("to_bsr", layout)
    if tuple(values.shape) != layout.values_shape:
        raise ValueError(f"[to_bsr] values are {list(values.shape)}, needs {list(layout.values_shape)}")
    size, b = (layout.out_features, layout.in_features), layout.block_size
    if layout.transposed or size[0] % b or size[1] % b:
        raise ValueError(f"[to_bsr] {layout!r}: needs feature counts that are multiples of {b}, and no transposed view")
    crow, col = (torch.from_numpy(a).to(values.device) for a in layout.csr())
    return torch.sparse_bsr_tensor(crow, col, values, size=size)
