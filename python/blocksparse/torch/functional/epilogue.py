"""What follows a product where gradients are wanted: autograd has to see it. Elsewhere the core does it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.nn.Identity(),
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


def finish(op: str, y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """activation(y + residual).

    Raises:
        ValueError: the residual is not like y.
    """
    if residual is not None:
        if residual.shape != y.shape or residual.dtype != y.dtype:
            raise ValueError(
                f"[{op}] residual is {residual.dtype} {list(residual.shape)}, needs {y.dtype} {list(y.shape)}"
            )
        y = y + residual
    return y if activation == "none" else ACTIVATE[activation](y)
