"""What callers of the PyTorch front end give: see `blocksparse._core.arguments`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core import library
from .._core.arguments import shown, to_int
from ..layout import Layout, need_layout

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # bs_dtype


def need_tensors(op: str, **given: object) -> None:
    """Raises TypeError if one is neither a tensor nor None."""
    for name, value in given.items():
        if value is not None:
            need_tensor(op, name, value)


def need_tensor(op: str, name: str, value: object) -> None:
    """Raises TypeError if it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"[{op}] {name} is {shown(value)}, needs a torch.Tensor")


def need_strided(op: str, **given: Tensor | None) -> None:
    """Raises ValueError if one is sparse in PyTorch's way, whose memory no op takes."""
    for name, value in given.items():
        if value is not None and value.layout is not torch.strided:
            raise ValueError(f"[{op}] {name} is {value.layout}, needs torch.strided (x.to_dense())")


def need_dtype(op: str, dtype: torch.dtype) -> None:
    """Raises ValueError if parameters are of a dtype that no op takes."""
    if dtype not in DTYPES:
        raise ValueError(f"[{op}] dtype is {dtype}, needs one of {', '.join(map(str, DTYPES))}")


def need_same_dtype(op: str, x: Tensor, values: Tensor) -> None:
    """Raises ValueError if x and the values are not of one dtype, or x is of none that ops take."""
    if x.dtype not in DTYPES:
        raise ValueError(f"[{op}] x is {x.dtype}, needs one of {', '.join(map(str, DTYPES))}")
    if values.dtype != x.dtype:
        raise ValueError(f"[{op}] values are {values.dtype}, needs {x.dtype}, the dtype of x (or autocast)")


def need_activation(op: str, value: object) -> str:
    """Its name; None is "none", as elsewhere in Python. Raises ValueError if there is none of that name."""
    if value is None:
        return "none"
    if not isinstance(value, str) or value not in library.ACTIVATIONS:
        raise ValueError(f"[{op}] activation is {shown(value)}, needs one of {', '.join(library.ACTIVATIONS)}")
    return value


def need_sizes(op: str, layout: Layout, out: int, in_: int) -> None:
    """Raises if it is no layout of a weight [out, in]."""
    need_layout(op, layout)
    sizes = to_int("a size", out, op=op), to_int("a size", in_, op=op)
    if layout.sizes != sizes:
        raise ValueError(
            f"[{op}] layout is {layout.out_features} x {layout.in_features} (out x in), needs {out} x {in_}"
        )


def state_of(op: str, state: Any) -> tuple[Tensor, Tensor] | None:
    """(h, c), or None."""
    if state is None:
        return None
    if not isinstance(state, tuple | list) or len(state) != 2:
        size = f" of {len(state)}" if isinstance(state, tuple | list) else ""
        raise TypeError(f"[{op}] state is {shown(state)}{size}, needs a pair (h, c)")
    for name, part in zip("hc", state, strict=True):
        need_tensor(op, name, part)
    return state[0], state[1]


def need_lengths(op: str, lengths: object, n: int) -> None:
    """Raises unless they are None or integers [n]."""
    if lengths is None:
        return
    need_tensors(op, lengths=lengths)
    assert isinstance(lengths, Tensor)
    wrong = lengths.dtype == torch.bool or lengths.dtype.is_floating_point or lengths.dtype.is_complex
    if wrong or tuple(lengths.shape) != (n,):
        raise ValueError(f"[{op}] lengths are {lengths.dtype} {list(lengths.shape)}, needs int64 [{n}]")
