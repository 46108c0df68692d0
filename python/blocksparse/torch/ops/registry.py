"""The library of ops that PyTorch sees, and where their kernels come from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._core import library

OPS = torch.library.Library("blocksparse", "DEF")


def register(family: str, kernels: dict[str, Callable[..., Any]]) -> tuple[str, str]:
    """Gives the ops of a family kernels for the CPU and for CUDA; what they are. Those given stand in for C++ ones."""

    def for_device(key: str, device: int) -> str:
        asked = os.environ.get("BLOCKSPARSE_TORCH_KERNELS") == "python"
        why_not = "BLOCKSPARSE_TORCH_KERNELS is python" if asked else library.torch_register(family, device)
        if not why_not:
            return "C++"
        for name, kernel in kernels.items():
            OPS.impl(name, kernel, key)
        return f"Python over ctypes ({why_not})"

    def refuse_sparse(*arguments: Any) -> None:
        sparse = (a for a in arguments if isinstance(a, Tensor) and a.layout is not torch.strided)
        raise ValueError(f"[{family}] a tensor is {next(sparse).layout}, needs torch.strided (x.to_dense())")

    for key, name in itertools.product(("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"), kernels):
        OPS.impl(name, refuse_sparse, key)
    return for_device("CPU", library.CPU), for_device("CUDA", library.CUDA)
