"""The kernels that anyone can write in Triton, as an opponent: block-sparse products and gradients of 20 lines each.

Features-last, bf16 and f16, sums in f32, blocks of 16 to 128. Every problem is tried with each of a handful of shapes;
`gpu.py` times them and keeps the fastest. Needs the package triton; where TRITON_INTERPRET=1 is set before it is
imported, the kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    dy_at = dy + tl.load(out_block + block) * B + lane[None, :]
    x_at = x + tl.load(in_block + block) * B + lane[None, :]
    total = tl.zeros((B, B), tl.float32)
    for first in range(0, tokens, TILE):
        token = first + tl.arange(0, TILE)[:, None]
        left = tl.load(dy_at + token * out_width, mask=token < tokens, other=0.0)  # [TILE, B of out]
        right = tl.load(x_at + token * in_width, mask=token < tokens, other=0.0)  # [TILE, B of in]
        total = tl.dot(tl.trans(left), right, total)
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
    Shape(128, 8, 3),
)
FEW_TILES = 1024  # from so many tokens on, tiles of fewer than 64 are not tried, and before it no groups of 32


def shapes_of(data: Data) -> Iterator[Shape]:
    """Those worth a trial: a tile has no more tokens than there are, except the smallest."""
    n = data.problem.n
    if data.problem.direction == "wgrad":
        yield from (shape for shape in GRADIENT_SHAPES if shape.tile <= max(n, 32))
        return
    for shape in PRODUCT_SHAPES:
        fits_many = n < FEW_TILES or shape.tile >= 64
        if shape.tile <= max(n, 16) and fits_many and (shape.group == 8 or n >= FEW_TILES):
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
    launches, copies = (gradients if data.problem.direction == "wgrad" else products)(data, rotate)
    shapes = list(shapes_of(data))
    if os.environ.get("TRITON_INTERPRET") != "1":
        compile_all([launches(shape) for shape in shapes])
    return [Contender(launches(shape), copies, f"{shape}") for shape in shapes]


@dataclass
class Launch:
    """A kernel with all that it is given, but for the i-th copy of the weights."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Callable[[int], tuple[Any, ...]]
    result: Tensor
    options: dict[str, Any]

    def __call__(self, i: int) -> Tensor:
        """Queues it."""
        self.kernel[self.grid](*self.arguments(i), **self.options)
        return self.result

    def compile(self) -> None:
        """Only that."""
        self.kernel.warmup(*self.arguments(0), grid=self.grid, **self.options)


def compile_all(launches: list[Launch]) -> None:
    """On all processors: it takes a second each. What does not compile fails again when it is called."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for launch in launches:
            launch.compile()


def on_device(array: Any, data: Data) -> Tensor:
    """Numbers of a layout as int32."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(data.device, torch.int32)


def products(data: Data, rotate: int) -> tuple[Callable[[Shape], Launch], int]:
    """fprop and dgrad. dgrad walks the transposed pattern and reads the blocks of W where they are."""
    p, layout = data.problem, data.layout
    turned = p.direction == "dgrad"
    rows, features = layout.coordinates()[::-1] if turned else layout.coordinates()
    height = layout.grid[1 if turned else 0]
    order = np.lexsort((features, rows))
    begin = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=height))])
    lists = [on_device(array, data) for array in (begin, features[order], order)]
    source, values = data.tensor(data.input), copies_of(data.tensor(data.values), rotate)
    result = source.new_empty(p.n, height * p.block)

    def arguments(i: int) -> tuple[Any, ...]:
        return (source, values[i], result, *lists, p.n, source.shape[1], result.shape[1])

    def launch(shape: Shape) -> Launch:
        constants = {"TILE": shape.tile, "B": p.block, "TURNED": turned, "GROUP": shape.group}
        options = {**constants, "num_warps": shape.warps, "num_stages": shape.stages}
        return Launch(row_of_blocks, (height, triton.cdiv(p.n, shape.tile)), arguments, result, options)

    return launch, len(values)


def gradients(data: Data, rotate: int) -> tuple[Callable[[Shape], Launch], int]:
    """wgrad, whose result has the dtype of x."""
    p, layout = data.problem, data.layout
    lists = [on_device(array, data) for array in layout.coordinates()]
    x, dy = data.tensor(data.x), data.tensor(data.dy)
    dw = x.new_empty(layout.values_shape)

    def arguments(i: int) -> tuple[Any, ...]:
        return (x, dy, dw, *lists, p.n, x.shape[1], dy.shape[1])

    def launch(shape: Shape) -> Launch:
        options = {"TILE": shape.tile, "B": p.block, "num_warps": shape.warps, "num_stages": shape.stages}
        return Launch(gradient_of_block, (layout.blocks,), arguments, dw, options)

    return launch, 1
