"""All steps of a multiplicative LSTM: an op of the core."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ..._core import structs
from ..ops.calls import lengths_pointer, pointer_to
from .sequence import Given, Network


class Multiplicative(Network):
    """Its tensors are h0, c0, factor [steps, n, H], pre [steps, n, 4, H], and the weights W_m and W."""

    op = "multiplicative"

    def inputs(self, given: Given, lengths: Tensor | None) -> ctypes.Structure:
        """See `Network`."""
        h0, c0, factor, pre, w_m, w = given
        pointers = (pointer_to(t, self.op) for t in (w_m, w, factor, pre, h0, c0))
        of_lengths = lengths_pointer(lengths, factor.size(1), self.op)
        return structs.MultiplicativeInputs(self.view(0, w_m), self.view(1, w), *pointers, of_lengths)

    def grads(self, grads: Sequence[Tensor | None]) -> ctypes.Structure:
        """See `Network`."""
        dh0, dc0, dfactor, dpre, dw_m, dw = grads
        return structs.MultiplicativeGrads(*(pointer_to(t, self.op) for t in (dw_m, dw, dfactor, dpre, dh0, dc0)))

    def optional(self, i: int) -> bool:
        """See `Network`."""
        return i not in (2, 3)
