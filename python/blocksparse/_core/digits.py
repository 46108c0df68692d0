"""Integers as digits in floating point, which averages leave alone.

Programs average the entries of state dicts one by one, and cast them to other types. An average of equal small numbers
rounds to the same number, and every floating point type holds whole numbers from -128 to 127: so a pattern is saved as
its bytes, each a number of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_WHOLE = 13  # words at the beginning that take all of their 4 bytes, by this format: sizes and hash are not small


def to_digits(words: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """What is saved of a pattern [words]: how many bytes a step takes, the first words, and the steps between others.

    Rows and columns of a layout rise, so most steps take one byte or two.
    """
    head, steps = words[:_WHOLE], np.diff(words[_WHOLE:].astype(np.int64), prepend=0)
    most = int(np.abs(steps).max(initial=0))
    width = next(width for width in range(1, 6) if most < 1 << (8 * width - 1))
    parts = (np.array([width], np.int8), _bytes_of(head, 4), _bytes_of(steps, width))
    return np.concatenate(parts).astype(np.float32)


def from_digits(digits: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """The pattern again, from digits that were rounded in any way by less than a half.

    Raises:
        ValueError: they are none.
    """
    rounded = np.rint(digits.astype(np.float64)).flatten()
    if rounded.size <= 4 * _WHOLE or not (np.abs(rounded) <= 128).all():
        raise ValueError("[layout] saved layout is damaged: it holds no digits")
    digits = rounded.astype(np.int64).astype(np.int8)
    width, head, rest = int(digits[0]), digits[1 : 1 + 4 * _WHOLE], digits[1 + 4 * _WHOLE :]
    if not 1 <= width <= 5 or rest.size % width != 0:
        raise ValueError(f"[layout] saved layout is damaged: {rest.size} digits in steps of {width}")
    steps = np.where(rest.reshape(-1, width)[:, -1:] < 0, -1, 0).astype(np.int8).repeat(8, 1)  # the sign goes on
    steps[:, :width] = rest.reshape(-1, width)
    words = steps.reshape(-1).view("<i8").cumsum()
    if (words != words.astype(np.int32)).any():
        raise ValueError("[layout] saved layout is damaged: a word has more than 32 bits")
    return np.concatenate([head.view("<i4"), words]).astype(np.int32)


def _bytes_of(integers: npt.NDArray[Any], width: int) -> npt.NDArray[np.int8]:
    """The lowest bytes of each, signed."""
    wide: npt.NDArray[np.int8] = integers.astype("<i8").view(np.int8).reshape(-1, 8)
    return wide[:, :width].reshape(-1)
