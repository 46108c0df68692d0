"""Integers in state dicts as digits in floating point: see `blocksparse._core.digits`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core.digits import from_digits, to_digits
from ...layout import Layout
from ..autograd.transforms import is_wrapped

_NEAR = 0.25  # what averages may add to a whole number
_version_of: Any = Tensor._version.__get__  # type: ignore[attr-defined]  # counts what is written into a tensor


def pattern_of(layout: Layout, device: torch.device) -> Tensor:
    """What is saved of a layout, which `Layout.from_pattern` takes again."""
    return torch.from_numpy(to_digits(layout.pattern())).to(device)


def digits_of(integers: Tensor, most: int) -> Tensor:
    """Integers [n] from 0 to `most` as float32 [n, width]: bytes, the lowest first."""
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4
    return integers.long().contiguous().view(torch.int8).view(-1, 8)[:, :width].float()


def to_integers(digits: Tensor) -> Tensor:
    """The integers, int64 [n], of such digits in any type. Waits for no device."""
    places = 8 * torch.arange(digits.size(-1), device=digits.device)
    return ((digits.round().to(torch.int64) & 255) << places).sum(-1)


def saved_integers(saved: Tensor) -> Tensor:
    """int64 [n] from an entry of a state dict: digits, or integers as version 0.1 wrote them.

    Raises:
        ValueError: it is neither.
    """
    if saved.dtype.is_floating_point and saved.dim() == 2:
        wide = saved.double()
        if bool(((wide - wide.round()).abs() < _NEAR).all()):
            return to_integers(saved)
        raise ValueError("no whole numbers, as those of an average of different ones")
    if saved.dtype.is_floating_point or saved.dtype.is_complex or saved.dtype == torch.bool:
        raise ValueError(f"{saved.dtype}, needs integers")
    return saved.long()


def same_integers(saved: Tensor, own: Tensor) -> bool:
    """Whether two entries of state dicts, of layouts or of `digits_of`, say the same, in any version."""
    try:
        return torch.equal(_any_integers(saved), _any_integers(own))
    except ValueError:
        return False


def _any_integers(saved: Tensor) -> Tensor:
    saved = saved.cpu()
    if saved.dtype.is_floating_point and saved.dim() == 1:  # of a layout
        return torch.from_numpy(from_digits(saved.double().numpy())).long()
    return saved_integers(saved)


class Integers:
    """What a buffer of digits says, as integers, made anew where something was written into the buffer.

    The buffer is what counts: programs load into it, and DistributedDataParallel's first process tells the others.

    Args:
        dtype: of the integers.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._last: tuple[Tensor, int, Tensor] | None = None  # digits, their version, and what they say

    def of(self, digits: Tensor) -> Tensor:
        """The integers [n], where the digits [n, width] are."""
        if torch.compiler.is_compiling() or is_wrapped(digits) or digits.is_inference():
            return to_integers(digits).to(self.dtype)
        version, last = _version_of(digits), self._last
        if last is not None and last[0] is digits and last[1] == version and last[2].device == digits.device:
            return last[2]
        with torch.inference_mode(False), torch.no_grad():
            made = to_integers(digits).to(self.dtype)
        captured = digits.is_cuda and torch.cuda.is_current_stream_capturing()  # what a graph makes is its own
        if type(made) is Tensor and not captured:
            self._last = (digits, version, made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Integers, (self.dtype,)
