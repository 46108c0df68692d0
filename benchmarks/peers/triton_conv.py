"""Block-sparse convolutions that anyone can write in Triton, as an opponent: implicit GEMM over the blocks there are.

Channels-last, bf16 and f16, sums in f32, blocks of 16 to 128, square kernels. Every pass comes with a handful of
shapes; `benchmarks/conv.py` checks and times them and keeps the fastest. A 1 x 1 convolution of stride 1 is the linear
product of `triton_plain.py` over pixels. Needs the package triton; where TRITON_INTERPRET=1 is set before it is
imported, the kernels run on the CPU, one program after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_plain import row_of_blocks

from blocksparse import Layout


@triton.jit
def row_of_taps(
    source,
    values,
    result,
    begin,
    feature,
    place,
    pixels,
    height,
    width,
    result_height,
    result_width,
    source_channels,
    result_channels,
    TILE: tl.constexpr,
    B: tl.constexpr,
    TURNED: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
):
    """result [TILE pixels, B] of one row of blocks: the sum of gathered source times each block at each tap.

    Blocks are [taps, out, in]. TURNED is dgrad, which walks the columns of W and gathers dy the other way round. A step
    of the loop is `TOGETHER` taps of a block; those beyond the last are zeros.
    """
    TAPS: tl.constexpr = KERNEL * KERNEL
    STEPS: tl.constexpr = (TAPS + TOGETHER - 1) // TOGETHER  # of a block
    rows, tiles = tl.num_programs(0), tl.num_programs(1)
    tile, row = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tiles, rows, GROUP)
    pixel, lane, k = tile * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, B), tl.arange(0, TOGETHER * B)
    image, i, j = pixel // (result_height * result_width), pixel // result_width % result_height, pixel % result_width
    total = tl.zeros((TILE, B), tl.float32)
    for step in range(tl.load(begin + row) * STEPS, tl.load(begin + row + 1) * STEPS):
        block, first = step // STEPS, step % STEPS * TOGETHER
        tap = first + k[None, :] // B
        live = (pixel < pixels) & (tap < TAPS)
        if TURNED:
            up, left = i + PADDING - tap // KERNEL, j + PADDING - tap % KERNEL
            live = live & (up % STRIDE == 0) & (left % STRIDE == 0)
            h, w = up // STRIDE, left // STRIDE
        else:
            h, w = i * STRIDE - PADDING + tap // KERNEL, j * STRIDE - PADDING + tap % KERNEL
        live = live & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        channel = tl.load(feature + block) * B + k[None, :] % B
        x = tl.load(source + ((image * height + h) * width + w) * source_channels + channel, mask=live, other=0.0)
        w_at = values + (tl.load(place + block) * TAPS + first) * B * B
        if TURNED:  # [TOGETHER * B of out, B of in], which lie one after the other
            blocks = tl.load(w_at + k[:, None] * B + lane[None, :], mask=k[:, None] // B < TAPS - first, other=0.0)
            total = tl.dot(x, blocks, total)
        else:  # [B of out, TOGETHER * B of in]
            w_at = w_at + k[None, :] // B * B * B + lane[:, None] * B + k[None, :] % B
            blocks = tl.load(w_at, mask=k[None, :] // B < TAPS - first, other=0.0)
            total = tl.dot(x, tl.trans(blocks), total)
    at = result + pixel * result_channels + row * B + lane[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=pixel < pixels)


@triton.jit(do_not_specialize=["steps"])
def gradient_of_taps(
    x,
    dy,
    dw,
    out_block,
    in_block,
    pixels,
    x_channels,
    dy_channels,
    blocks,
    steps,
    TILE: tl.constexpr,
    B: tl.constexpr,
    TOGETHER: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DY_HEIGHT: tl.constexpr,
    DY_WIDTH: tl.constexpr,
):
    """dw [TOGETHER taps, B, B] of one block: dy^T times gathered x, over `steps` times TILE pixels.

    Programs are (block, taps; part of the pixels). Each part has a dw [blocks, taps, B, B] of its own.
    """
    TAPS: tl.constexpr = KERNEL * KERNEL
    TURNS: tl.constexpr = (TAPS + TOGETHER - 1) // TOGETHER
    block, part = tl.program_id(0) // TURNS, tl.program_id(1)
    k, lane = tl.arange(0, TOGETHER * B)[:, None], tl.arange(0, B)[None, :]
    tap = tl.program_id(0) % TURNS * TOGETHER + k // B
    x_at = x + tl.load(in_block + block) * B + k % B
    dy_at = dy + tl.load(out_block + block) * B + lane
    total = tl.zeros((TOGETHER * B, B), tl.float32)
    for step in range(part * steps, min((part + 1) * steps, tl.cdiv(pixels, TILE))):
        pixel = step * TILE + tl.arange(0, TILE)
        image, i, j = pixel // (DY_HEIGHT * DY_WIDTH), pixel // DY_WIDTH % DY_HEIGHT, pixel % DY_WIDTH
        h = i[None, :] * STRIDE - PADDING + tap // KERNEL
        w = j[None, :] * STRIDE - PADDING + tap % KERNEL
        live = (pixel[None, :] < pixels) & (tap < TAPS) & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
        # x^T is loaded as such and has the rows: its taps together fill those of the tensor cores.
        left = tl.load(x_at + ((image[None, :] * HEIGHT + h) * WIDTH + w) * x_channels, mask=live, other=0.0)
        right = tl.load(dy_at + pixel[:, None] * dy_channels, mask=pixel[:, None] < pixels, other=0.0)
        total = tl.dot(left, right, total)  # [TOGETHER * B of in, TILE] times [TILE, B of out]
    at = dw + ((part * blocks + block) * TAPS + tap) * B * B + lane * B + k % B
    tl.store(at, total.to(dw.dtype.element_ty), mask=tap < TAPS)


@triton.jit
def sum_of_parts(parts, result, count, some, SIZE: tl.constexpr):
    """result [count]: the sum of `some` parts, in their order."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for part in range(some):
        total += tl.load(parts + part * count + at, mask=at < count, other=0.0)
    tl.store(result + at, total.to(result.dtype.element_ty), mask=at < count)


@dataclass(frozen=True)
class Convolution:
    """What is convolved: x [n, channels, height, width] and dy, channels-last, values [blocks, taps, b, b]."""

    x: Tensor
    dy: Tensor
    values: Tensor
    layout: Layout
    kernel: int
    stride: int
    padding: int

    @property
    def pointwise(self) -> bool:
        """Whether it is a product of pixels."""
        return (self.kernel, self.stride, self.padding) == (1, 1, 0)

    def check(self) -> None:
        """Raises ValueError for one that the kernels cannot do."""
        if self.x.dtype not in (torch.bfloat16, torch.float16) or self.layout.block_size not in (16, 32, 64, 128):
            raise ValueError("plain Triton kernels do bf16 and f16, blocks of 16, 32, 64 and 128")
        most = max(self.x.numel(), self.dy.numel(), self.values.numel())
        if min(self.x.numel(), self.dy.numel(), self.values.numel()) == 0 or most >= 2**31:
            raise ValueError(f"plain Triton kernels do 1 to 2^31 - 1 elements a tensor, not {most}")


@dataclass(frozen=True)
class Launch:
    """A kernel and all that it is called with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, int]

    def run(self) -> None:
        """Queues it."""
        self.kernel[self.grid](*self.arguments, **self.options)

    def compile(self) -> None:
        """Only that."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


@dataclass(frozen=True)
class Candidate:
    """A pass by one shape; all of a pass write to one result."""

    note: str
    launches: tuple[Launch, ...]
    result: Tensor

    def run(self) -> Tensor:
        """Queues the launches."""
        for launch in self.launches:
            launch.run()
        return self.result

    def compile(self) -> None:
        """Only that, into Triton's cache."""
        for launch in self.launches:
            launch.compile()


@dataclass(frozen=True)
class Shape:
    """What a kernel is tuned by."""

    tile: int  # pixels of a program, or of a step of it
    columns: int  # of a step: as many taps as fit, at least one
    warps: int
    stages: int
    waves: int = 0  # of a gradient: programs an SM that its pixels are divided for


PRODUCT_SHAPES = (
    Shape(64, 16, 4, 5),
    Shape(64, 64, 4, 3),
    Shape(64, 64, 4, 5),
    Shape(64, 128, 4, 3),
    Shape(128, 16, 4, 5),
    Shape(128, 64, 4, 3),
    Shape(128, 64, 4, 5),
    Shape(128, 64, 8, 4),
    Shape(128, 128, 8, 3),
    Shape(256, 64, 8, 3),
)
GRADIENT_SHAPES = (
    Shape(32, 64, 4, 5),
    Shape(64, 64, 4, 4),
    Shape(64, 128, 4, 4),
    Shape(64, 256, 8, 3),
    Shape(128, 64, 4, 3),
    Shape(128, 128, 8, 3),
)
WAVES = (1, 2, 4)
GROUP = 8  # tiles of pixels side by side
SUMMED = 1024  # elements a program of the sum


def taps_of(shape: Shape, conv: Convolution) -> int:
    """How many a step has, a power of two."""
    most = 1 << (conv.kernel**2 - 1).bit_length()
    return min(max(shape.columns // conv.layout.block_size, 1), most)


def candidates(which: str, conv: Convolution) -> list[Candidate]:
    """fprop, dgrad or wgrad by every shape.

    Raises:
        ValueError: the kernels cannot do it.
    """
    conv.check()
    found = gradients(conv) if which == "wgrad" else products(which == "dgrad", conv)
    return list({candidate.note: candidate for candidate in found}.values())  # some shapes are one for large blocks


def on_device(array: Any, conv: Convolution) -> Tensor:
    """Numbers of a layout as int32."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(conv.x.device, torch.int32)


def pixels_of(images: Tensor) -> int:
    """Of all images."""
    return images.shape[0] * images.shape[2] * images.shape[3]


def products(turned: bool, conv: Convolution) -> Iterator[Candidate]:
    """fprop, and dgrad over the transposed pattern, which reads the blocks of W where they are."""
    layout, b = conv.layout, conv.layout.block_size
    rows, features = layout.coordinates()[::-1] if turned else layout.coordinates()
    height = layout.grid[1 if turned else 0]
    order = np.lexsort((features, rows))
    begin = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=height))])
    lists = [on_device(array, conv) for array in (begin, features[order], order)]
    source, like = (conv.dy, conv.x) if turned else (conv.x, conv.dy)
    result = torch.empty_like(like)
    tensors = (source, conv.values, result, *lists, pixels_of(like))
    channels = source.shape[1], result.shape[1]
    for shape in PRODUCT_SHAPES:
        grid, options = (height, triton.cdiv(pixels_of(like), shape.tile)), launch_options(shape)
        tuned, together = (shape.tile, b, turned, GROUP), taps_of(shape, conv)
        note = f"tile={shape.tile} taps={together} warps={shape.warps} stages={shape.stages}"
        if conv.pointwise:
            launch = Launch(row_of_blocks, grid, (*tensors, *channels, *tuned), options)
        else:
            sizes = (*source.shape[2:], *result.shape[2:], *channels)
            geometry = (together, conv.kernel, conv.stride, conv.padding)
            launch = Launch(row_of_taps, grid, (*tensors, *sizes, *tuned, *geometry), options)
        yield Candidate(note, (launch,), result)


def gradients(conv: Convolution) -> Iterator[Candidate]:
    """wgrad, whose result has the dtype of x. Few blocks have their pixels in parts, which a second kernel sums."""
    layout, b = conv.layout, conv.layout.block_size
    lists = [on_device(array, conv) for array in layout.coordinates()]
    pixels, dw = pixels_of(conv.dy), torch.empty_like(conv.values)
    processors = torch.cuda.get_device_properties(dw.device).multi_processor_count if dw.is_cuda else 2
    buffers: dict[int, Tensor] = {}
    for shape in GRADIENT_SHAPES:
        together = taps_of(shape, conv)
        programs = layout.blocks * triton.cdiv(conv.kernel**2, together)
        for waves in WAVES:
            tiles = triton.cdiv(pixels, shape.tile)
            steps = triton.cdiv(tiles, max(waves * processors // programs, 1))
            parts = triton.cdiv(tiles, steps)
            if parts > 1 and parts not in buffers:
                buffers[parts] = torch.empty(parts, *dw.shape, dtype=torch.float32, device=dw.device)
            sums = buffers.get(parts, dw)
            sizes = (pixels, conv.x.shape[1], conv.dy.shape[1], layout.blocks, steps)
            geometry = (shape.tile, b, together, conv.kernel, conv.stride, conv.padding)
            images = (*conv.x.shape[2:], *conv.dy.shape[2:])
            arguments = (conv.x, conv.dy, sums, *lists, *sizes, *geometry, *images)
            launches = [Launch(gradient_of_taps, (programs, parts), arguments, launch_options(shape))]
            if parts > 1:
                grid, count = (triton.cdiv(dw.numel(), SUMMED),), dw.numel()
                launches.append(Launch(sum_of_parts, grid, (sums, dw, count, parts, SUMMED), {}))
            note = f"tile={shape.tile} taps={together} warps={shape.warps} stages={shape.stages} parts={parts}"
            yield Candidate(note, tuple(launches), dw)


def launch_options(shape: Shape) -> dict[str, int]:
    """As Triton names them."""
    return {"num_warps": shape.warps, "num_stages": shape.stages}
