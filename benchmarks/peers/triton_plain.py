"""The kernels that anyone can write in Triton, as an opponent: block-sparse products and gradients of 20 lines each.

Features-last, bf16 and f16, sums in f32, blocks of 16 to 128. Every problem is tried with each of a handful of shapes;
`gpu.py` times them and keeps the fastest. Needs the package triton; where TRITON_INTERPRET=1 is set before it is
imported, the kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from common import Contender, Data, copies_of
from torch import Tensor


@triton.jit
def row_of_blocks(
    source,
    values,
    result,
    begin,
    feature,
    place,
    tokens,
    source_width,
    result_width,
    TILE: tl.constexpr,
    B: tl.constexpr,
    TURNED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """result [TILE, B] of one row of blocks: the sum of source [TILE, B] times each block, as it is where TURNED.

    Blocks are [out, in]. fprop walks the rows of W and multiplies by W^T, dgrad its columns and multiplies by W.
    """
    # `GROUP` tiles of tokens do a row together, so that its blocks are read from L2 by all but one of them.
    rows, tiles = tl.num_programs(0), tl.num_programs(1)
    tile, row = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tiles, rows, GROUP)
    token, lane = tile * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, B)
    total = tl.zeros((TILE, B), tl.float32)
    for i in range(tl.load(begin + row), tl.load(begin + row + 1)):
        x_at = source + token * source_width + tl.load(feature + i) * B + lane[None, :]
        x = tl.load(x_at, mask=token < tokens, other=0.0)  # [TILE, B]
        w = tl.load(values + tl.load(place + i) * B * B + lane[:, None] * B + lane[None, :])  # [B of out, B of in]
        total = tl.dot(x, w if TURNED else tl.trans(w), total)
    at = result + token * result_width + row * B + lane[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=token < tokens)


@triton.jit
def gradient_of_block(x, dy, dw, out_block, in_block, tokens, in_width, out_width, TILE: tl.constexpr, B: tl.constexpr):
    """dw [B, B] of one block: dy^T x over all tokens, TILE of them at a time."""
    block, lane = tl.program_id(0), tl.arange(0, B)
    # dy^T is loaded as such: transposed afterwards, blocks of 32 are not copied ahead (Triton 3.6, sm_90).
    dy_at = dy + tl.load(out_block + block) * B + lane[:, None]
    x_at = x + tl.load(in_block + block) * B + lane[None, :]
    total = tl.zeros((B, B), tl.float32)
    for first in range(0, tokens, TILE):
        token = first + tl.arange(0, TILE)
        left = tl.load(dy_at + token[None, :] * out_width, mask=token[None, :] < tokens, other=0.0)  # [B of out, TILE]
        right = tl.load(x_at + token[:, None] * in_width, mask=token[:, None] < tokens, other=0.0)  # [TILE, B of in]
        total = tl.dot(left, right, total)
    at = dw + block * B * B + lane[:, None] * B + lane[None, :]
    tl.store(at, total.to(dw.dtype.element_ty))


@dataclass(frozen=True)
class Shape:
    """What a kernel is tuned by."""

    tile: int  # tokens of a program, or of a step of it
    warps: int
    stages: int
    group: int = 8  # tiles of tokens side by side


PRODUCT_SHAPES = (
    Shape(16, 4, 5),
    Shape(32, 4, 3),
    Shape(32, 4, 5),
    Shape(64, 4, 3),
    Shape(64, 4, 5),
    Shape(64, 8, 3),
    Shape(128, 4, 3),
    Shape(128, 4, 5),
    Shape(128, 8, 3),
    Shape(128, 8, 5),
    Shape(256, 8, 3),
    Shape(128, 8, 3, group=32),
    Shape(256, 8, 3, group=32),
)
GRADIENT_SHAPES = (
    Shape(32, 4, 4),
    Shape(32, 4, 5),
    Shape(64, 4, 3),
    Shape(64, 4, 5),
    Shape(64, 8, 3),
    Shape(64, 8, 5),
    Shape(128, 4, 3),
    Shape(128, 4, 4),
    Shape(128, 8, 3),
    Shape(128, 8, 4),
)
MANY_TOKENS = 1024  # from so many on no tile below 64 is tried, below it no group of 32


def shapes_of(data: Data) -> Iterator[Shape]:
    """Those worth a trial: a tile has no more tokens than there are, except the smallest."""
    n = data.problem.n
    if data.problem.direction == "wgrad":
        yield from (shape for shape in GRADIENT_SHAPES if shape.tile <= max(n, 32))
        return
    for shape in PRODUCT_SHAPES:
        fits = shape.tile >= 64 if n >= MANY_TOKENS else shape.group == 8
        if fits and shape.tile <= max(n, 16):
            yield shape


def checked(data: Data) -> None:
    """Raises ValueError for a problem that the kernels cannot do."""
    p, layout = data.problem, data.layout
    if p.dtype not in ("bf16", "f16") or p.block not in (16, 32, 64, 128) or p.x_first or p.y_first:
        raise ValueError("bf16 and f16, blocks of 16, 32, 64 and 128, features-last only")
    most = max(p.n * layout.in_features, p.n * layout.out_features, layout.blocks * p.block**2)
    if p.n == 0 or layout.blocks == 0 or most >= 2**31:
        raise ValueError(f"1 to 2^31 - 1 elements a tensor, not {most}")


def candidates(data: Data, rotate: int) -> list[Contender]:
    """A contender for each shape, all of the same operands.

    Raises:
        ValueError: the kernels cannot do the problem.
    """
    checked(data)
    launch_of, copies = (gradients if data.problem.direction == "wgrad" else products)(data, rotate)
    return [Contender(launch_of(shape), copies, f"{shape}") for shape in shapes_of(data)]


def on_device(array: Any, data: Data) -> Tensor:
    """Numbers of a layout as int32."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(data.device, torch.int32)


Launch = Callable[[int], Tensor]  # with the i-th copy of the weights


def products(data: Data, rotate: int) -> tuple[Callable[[Shape], Launch], int]:
    """fprop and dgrad: how to launch a shape, and how many copies of the weights there are.

    dgrad walks the transposed pattern and reads the blocks of W where they are.
    """
    p, layout = data.problem, data.layout
    turned = p.direction == "dgrad"
    rows, features = layout.coordinates()[::-1] if turned else layout.coordinates()
    height = layout.grid[1 if turned else 0]
    order = np.lexsort((features, rows))
    begin = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=height))])
    lists = [on_device(array, data) for array in (begin, features[order], order)]
    source, values = data.tensor(data.input), copies_of(data.tensor(data.values), rotate)
    result = source.new_empty(p.n, height * p.block)

    def launch_of(shape: Shape) -> Launch:
        grid = (height, triton.cdiv(p.n, shape.tile))
        sizes = (p.n, source.shape[1], result.shape[1], shape.tile, p.block, turned, shape.group)

        def launch(i: int) -> Tensor:
            row_of_blocks[grid](
                source, values[i], result, *lists, *sizes, num_warps=shape.warps, num_stages=shape.stages
            )
            return result

        return launch

    return launch_of, len(values)


def gradients(data: Data, rotate: int) -> tuple[Callable[[Shape], Launch], int]:
    """wgrad, whose result has the dtype of x."""
    p, layout = data.problem, data.layout
    lists = [on_device(array, data) for array in layout.coordinates()]
    x, dy = data.tensor(data.x), data.tensor(data.dy)
    dw = x.new_empty(layout.values_shape)

    def launch_of(shape: Shape) -> Launch:
        sizes = (p.n, x.shape[1], dy.shape[1], shape.tile, p.block)

        def launch(i: int) -> Tensor:
            gradient_of_block[layout.blocks,](x, dy, dw, *lists, *sizes, num_warps=shape.warps, num_stages=shape.stages)
            return dw

        return launch

    return launch_of, 1
