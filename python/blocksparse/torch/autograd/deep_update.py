"""All steps of a deep-update LSTM: an op of the core."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ..._core import structs
from ..blocks import Blocks
from ..ops.calls import lengths_pointer, pointer_to
from .sequence import Given, Network

NORMS, WEIGHTS = slice(4, 6), slice(6, None)


class DeepUpdate(Network):
    """Its tensors are h0, c0, factor, term, norms of the matrices [inner, 2, H], of the gates [2, 4, H], and weights.

    Args:
        layers: matrices, and last the gates'.
        epsilon: of the norms.
    """

    op = "deep_update"

    def __init__(self, layers: Sequence[Blocks], epsilon: float) -> None:
        super().__init__(layers)
        self.epsilon = epsilon

    def inputs(self, given: Given, lengths: Tensor | None) -> ctypes.Structure:
        """See `Network`."""
        h0, c0, factor, term = given[:4]
        matrices = (structs.DeepUpdateMatrix * len(self.layers))()
        of_layers = zip(given[WEIGHTS], norms(*given[NORMS]), strict=True)
        for i, (weight, (gain, shift)) in enumerate(of_layers):
            matrices[i].layout = self.view(i, weight)
            matrices[i].w, matrices[i].gain, matrices[i].shift = (pointer_to(t, self.op) for t in (weight, gain, shift))
        pointers = (pointer_to(t, self.op) for t in (factor, term, h0, c0))
        of_lengths = lengths_pointer(lengths, factor.size(1), self.op)
        return structs.DeepUpdateInputs(matrices, len(self.layers), *pointers, of_lengths, self.epsilon)

    def grads(self, grads: Sequence[Tensor | None]) -> ctypes.Structure:
        """See `Network`."""
        matrices = (structs.DeepUpdateMatrixGrads * len(self.layers))()
        of_norms = norms(*(t for t in grads[NORMS] if t is not None))
        for matrix, dw, (dgain, dshift) in zip(matrices, grads[WEIGHTS], of_norms, strict=True):
            matrix.w, matrix.gain, matrix.shift = (pointer_to(t, self.op) for t in (dw, dgain, dshift))
        dh0, dc0, dfactor, dterm = grads[:4]
        return structs.DeepUpdateGrads(matrices, *(pointer_to(t, self.op) for t in (dfactor, dterm, dh0, dc0)))

    def optional(self, i: int) -> bool:
        """See `Network`."""
        return i < 2 or i >= WEIGHTS.start


def norms(of_matrices: Tensor, of_gates: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(gain, shift) of each matrix, as parts of these."""
    gain, shift = of_gates.view(2, -1).unbind()
    return [*((pair[0], pair[1]) for pair in of_matrices), (gain, shift)]
