"""What callers give: an object of the wrong kind is refused, saying what it is and what is needed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

_LONGEST = 40  # letters of a value in a message


def shown(value: object) -> str:
    """A number or text as it is, the kind of anything else."""
    if value is None or isinstance(value, str | int | float | complex | np.generic):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"a {type(value).__name__}"


def need(op: str, name: str, value: object, kind: type | tuple[type, ...], needed: str) -> None:
    """Raises TypeError if the value is of another kind."""
    if not isinstance(value, kind):
        raise TypeError(f"[{op}] {name} is {shown(value)}, needs {needed}")


def to_int(name: str, value: Any, bits: int = 63, op: str = "layout") -> int:
    """An integer of any type, of so many bits beside the sign."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"[{op}] {name} is {shown(value)}, needs an integer") from None
    if not -(1 << bits) <= number < 1 << bits:
        raise ValueError(f"[{op}] {name} is {shown(number)}, which does not fit into {bits + 1} bits")
    return number


def to_features(name: str, value: Any) -> int:
    """A count of features."""
    number = to_int(name, value)
    if number < 1:
        raise ValueError(f"[layout] {name} is {number}, needs 1 or more")
    return number


def to_threads(op: str, value: Any) -> int:
    """How many threads; 0: all."""
    number = to_int("threads", value, 31, op)
    if number < 0:
        raise ValueError(f"[{op}] threads is {number}, needs 0 (all) or more")
    return number


def to_count(name: str, value: Any, op: str, least: int = 0) -> int:
    """An integer that is not less than `least`."""
    number = to_int(name, value, 31, op)
    if number < least:
        raise ValueError(f"[{op}] {name} is {number}, needs {least} or more")
    return number


def to_number(op: str, name: str, value: Any) -> float:
    """A real number, of any type that has one, as a float; NaN and Inf are some."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"[{op}] {name} is {shown(value)}, needs a number")
    return float(value)


def to_flag(op: str, name: str, value: Any) -> int:
    """0 or 1."""
    need(op, name, value, (bool, np.bool_, int), "True or False")
    return int(value)


def to_number_text(op: str, value: Any) -> str:
    """A whole number as one, whatever type it has; else all digits of a float."""
    try:
        return str(operator.index(value))
    except TypeError:
        pass
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"[{op}] {shown(value)} is no number")
    try:
        return repr(float(value))
    except (TypeError, ValueError):
        raise TypeError(f"[{op}] {shown(value)} is no number") from None


def to_list(op: str, name: str, value: Any, needed: str) -> list[Any]:
    """What can be gone through, as a list."""
    if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"[{op}] {name} is {shown(value)}, needs {needed}")
    return list(value)


def to_indices(name: str, values: npt.ArrayLike, dtype: type[Any]) -> npt.NDArray[Any]:
    """A row of integers, of a dtype that holds them all."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"[layout] {name} has shape {array.shape} and dtype {array.dtype}, needs a row of integers")
    narrow = np.ascontiguousarray(array, dtype)
    if array.size and (array != narrow).any():
        raise ValueError(
            f"[layout] {name} holds {array[array != narrow][0]}, which does not fit into {np.dtype(dtype)}"
        )
    return narrow
