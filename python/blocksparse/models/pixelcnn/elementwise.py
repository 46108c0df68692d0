"""What lies between convolutions: concat-ELU and the gate. Bound by memory: on a card each is one kernel, compiled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def concat_elu(x: Tensor) -> Tensor:
    """elu([x, -x]) over channels: [n, C, h, w] -> [n, 2 C, h, w]."""
    return functional.elu(torch.cat((x, -x), 1))


def gate(x: Tensor, both: Tensor) -> Tensor:
    """x + p sigmoid(q) with [p, q] = both [n, 2 C, h, w]."""
    p, q = both.chunk(2, 1)
    return x + p * q.sigmoid()
