"""What a convolution is asked for: its geometry, the same for arrays of any library."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import library, structs
from .arguments import to_flag

Sizes = int | Sequence[int]
Padding = int | Sequence[int | tuple[int, int]]


def conv_geometry(
    kernel: Sequence[int],
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    transposed: bool = False,
    output_padding: Sizes = 0,
) -> structs.ConvGeometry:
    """What the C library takes: one number for all axes, or one for each; a padding may be (before, after).

    Raises:
        ValueError: there are more or fewer numbers than sizes of the kernel, or something is no integer.
    """
    sizes_of_kernel = _integers(kernel)
    if sizes_of_kernel is None or not 1 <= len(sizes_of_kernel) <= structs.MAX_SIZES:
        raise ValueError(f"[conv] kernel is {kernel!r}, needs 1 to {structs.MAX_SIZES} sizes, integers")
    rank = len(sizes_of_kernel)

    def each(name: str, value: Sizes) -> list[int]:
        one = _integer(value)
        values = _integers(value) if one is None else [one] * rank
        if values is None or len(values) != rank:
            raise ValueError(f"[conv] {name} is {value!r}, needs one number or {rank}, integers")
        return values

    pairs = _paddings(padding, rank)
    before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    sizes = (sizes_of_kernel, each("stride", stride), each("dilation", dilation), before, after)
    fields = [structs.Sizes(*values) for values in (*sizes, each("output_padding", output_padding))]
    return structs.ConvGeometry(rank, to_flag("conv", "transposed", transposed), *fields)


def _integer(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _integers(values: Any) -> list[int] | None:
    """None if they are no sequence of integers."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        return None


def _paddings(padding: Any, rank: int) -> list[list[int]]:
    """(before, after) for each size."""
    one = _integer(padding)
    if one is not None:
        return [[one, one]] * rank
    pairs: list[list[int] | None] = []
    for given in padding if isinstance(padding, Sequence | np.ndarray) else ():
        one = _integer(given)
        pairs.append(_integers(given) if one is None else [one, one])
    if len(pairs) != rank or any(pair is None or len(pair) != 2 for pair in pairs):
        raise ValueError(f"[conv] padding is {padding!r}, needs one number or {rank} numbers or pairs (before, after)")
    return [pair for pair in pairs if pair is not None]


def conv_output_size(geometry: structs.ConvGeometry, size: Sequence[int]) -> tuple[int, ...]:
    """The sizes of y for those of x.

    Raises:
        ValueError: the geometry makes no sense, or does not fit the sizes.
        TypeError: the geometry is none.
    """
    check_geometry(geometry)
    sizes, rank = _integers(size), geometry.rank
    if sizes is None or len(sizes) != rank:
        raise ValueError(f"[conv_output_size] size is {size!r}, needs {rank} integers, as many as the geometry has")
    output = structs.Sizes()
    library.call("bs_conv_output_size", ctypes.byref(geometry), structs.Sizes(*sizes), output)
    return tuple(output[:rank])


def check_geometry(geometry: Any) -> None:
    """Raises TypeError if it is none."""
    if not isinstance(geometry, structs.ConvGeometry):
        raise TypeError(f"[conv] geometry is a {type(geometry).__name__}, needs what conv_geometry makes")
