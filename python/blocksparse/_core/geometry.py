"""The geometry of a convolution as a row of numbers, which the ops of PyTorch and JAX take.

Whether the convolution is transposed, then kernel, stride, dilation, padding before, padding after and output padding,
each with a number for every size of an image.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from typing import Any

from . import library, structs

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int | str | Sequence[int]]
_FIELDS = ("kernel", "stride", "dilation", "padding_before", "padding_after", "output_padding")


# ---- From what users give ------------------------------------------------------------------------------------------


def per_size(name: str, given: Sizes, rank: int) -> tuple[int, ...]:
    """One number for each size, of one for all or a sequence.

    Raises:
        ValueError: there are more or fewer than `rank`, or something is no integer.
    """
    numbers = _integers(given if isinstance(given, Sequence) else (given,) * rank)
    if numbers is None or len(numbers) != rank:
        raise ValueError(f"[conv] {name} is {given!r}, needs an integer, or {rank} of them")
    return numbers


def _integers(given: Any) -> tuple[int, ...] | None:
    """None if something is no integer of 64 bits; those of NumPy are."""
    try:
        numbers = tuple(number if isinstance(number, int) else operator.index(number) for number in given)
        return numbers if all(-(1 << 63) <= number < 1 << 63 for number in numbers) else None
    except TypeError:
        return None


def _pads(given: Any, extent: int, stride: int, transposed: bool) -> tuple[int, int]:
    """(before, after) along one size; `extent` is that of the kernel less 1."""
    if (one := _integers((given,))) is not None:
        return one[0], one[0]
    if isinstance(given, str) and given == "valid":
        return 0, 0
    if isinstance(given, str) and given in ("same", "causal"):
        if transposed or stride != 1:
            kind = "a transposed convolution" if transposed else f"stride {stride}"
            raise ValueError(f"[conv] padding is {given!r}, which {kind} does not have: needs numbers")
        before = extent if given == "causal" else extent // 2
        return before, extent - before
    pair = _integers(given) if isinstance(given, Sequence) else None
    if pair is not None and len(pair) == 2:
        return pair[0], pair[1]
    raise ValueError(f"[conv] padding is {given!r}, needs a number, (before, after), 'same', 'causal' or 'valid'")


def make_geometry(
    rank: int,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    output_padding: Sizes = 0,
    transposed: bool = False,
) -> tuple[int, ...]:
    """What the ops take. Whether the numbers make sense is checked by the core.

    Raises:
        ValueError: there are more or fewer numbers than sizes.
    """
    kernel, strides = per_size("kernel_size", kernel_size, rank), per_size("stride", stride, rank)
    dilations, more = per_size("dilation", dilation, rank), per_size("output_padding", output_padding, rank)
    several = isinstance(padding, Sequence) and not isinstance(padding, str)
    given: Any = padding if several else (padding,) * rank
    if len(given) != rank:
        raise ValueError(f"[conv] padding is {padding!r}, needs one for all sizes, or {rank} of them")
    extents = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    pads = [_pads(pad, extent, s, transposed) for pad, extent, s in zip(given, extents, strides, strict=True)]
    before, after = zip(*pads, strict=True)
    return (int(transposed), *kernel, *strides, *dilations, *before, *after, *more)


# ---- What it says --------------------------------------------------------------------------------------------------


def rank_of(geometry: Sequence[int]) -> int:
    """How many sizes an image has.

    Raises:
        ValueError: they are no geometry.
    """
    rank, rest = divmod(len(geometry) - 1, len(_FIELDS))
    if rest or not 1 <= rank <= structs.MAX_SIZES:
        raise ValueError(f"[conv] geometry has {len(geometry)} numbers, needs 7, 13 or 19 (1 to 3 sizes)")
    return rank


def fields_of(geometry: Sequence[int]) -> list[Sequence[int]]:
    """Kernel, stride, dilation, padding before and after, output padding: a number for each size."""
    rank = rank_of(geometry)
    return [geometry[1 + i * rank : 1 + (i + 1) * rank] for i in range(len(_FIELDS))]


def output_size(geometry: Sequence[int], size: Sequence[int]) -> list[int]:
    """Sizes of y for those of x, which may be symbols: the formulas of conv.h. The core checks what they need."""
    if len(size) != rank_of(geometry):
        raise ValueError(f"[conv] x has {len(size)} sizes, the geometry {rank_of(geometry)}")
    sizes = []
    for n, kernel, stride, dilation, before, after, more in zip(size, *fields_of(geometry), strict=True):
        extent = dilation * (kernel - 1)
        if geometry[0]:
            sizes.append((n - 1) * stride - before - after + extent + more + 1)
        else:
            sizes.append((n + before + after - extent - 1) // stride + 1)
    return sizes


@functools.lru_cache(maxsize=4096)  # with it, a call takes half as long
def to_core(geometry: tuple[int, ...], size: tuple[int, ...]) -> tuple[structs.ConvGeometry, tuple[int, ...]]:
    """What the core takes, and the sizes of y. Raises what is wrong, before a result is shaped by it."""
    rank = rank_of(geometry)
    if len(size) != rank:
        raise ValueError(f"[conv] x has {len(size)} sizes, the geometry {rank}")
    fields = [structs.Sizes(*numbers) for numbers in fields_of(geometry)]
    made, out = structs.ConvGeometry(rank, geometry[0], *fields), structs.Sizes()
    library.call("bs_conv_output_size", ctypes.byref(made), ctypes.byref(structs.Sizes(*size)), ctypes.byref(out))
    return made, tuple(out[:rank])


def check_geometry(geometry: tuple[int, ...]) -> None:
    """Asks the core about images that are large enough.

    Raises:
        ValueError: the numbers make no sense.
    """
    kernel, _, dilation, before, after, _ = fields_of(geometry)
    if geometry[0]:
        size = [1 + b + a for b, a in zip(before, after, strict=True)]
    else:
        size = [1 + d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    to_core(geometry, tuple(size))
