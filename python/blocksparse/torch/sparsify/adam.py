"""Adam's step by a block's own age: u(t) - u(a), see `moments`, is added to young blocks.

On a card PyTorch compiles it to one kernel for each parameter. Without Triton or where that fails it is PyTorch's
operations, about 40 small kernels for each parameter.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

COMPILES = True  # on a card; False: PyTorch's operations, to compare with
BACKEND = "inductor"  # of torch.compile


def bias(count: Any, log: float) -> Any:
    """1 / (1 - beta^count), from the logarithm of beta."""
    return -1 / (torch.expm1(count * log) if isinstance(count, Tensor) else math.expm1(count * log))


def logs_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """Logarithms of the betas."""
    first, second = (math.log(beta) if (beta := float(b)) > 0 else -math.inf for b in group["betas"])
    return first, second


# ---- Blocks of several ages ------------------------------------------------------------------------------------------


def add_lack(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    rows: Tensor,
    births: Tensor,
    t: Tensor,
    step: Tensor,
    lr: Tensor,
    logs: tuple[float, float],
    eps: float,
) -> None:
    """p[rows] += u(t) - u(a) with a = step - births; where a birth is less than 0, it adds a 0.

    Args:
        p: [blocks, ...], changed in place.
        m: the first moment, of p's shape.
        v: the second.
        rows: int64 [n], none twice.
        births: float32 [n].
        t: [], steps of the parameter, with this one.
        step: int64 [], steps by which births are counted, with this one.
        lr: [].
        logs: logarithms of the betas.
        eps: Adam's, more than 0.
    """
    m, v = m.index_select(0, rows), v.index_select(0, rows)
    root = (v if v.dtype.itemsize >= 4 else v.float()).sqrt()
    births = births.view(-1, *(1,) * (root.dim() - 1))
    t, age, lr = (number.to(root.dtype) for number in (t, torch.minimum(step - births, t), lr))
    lack = _update(m, root, t, lr, logs, eps) - _update(m, root, age, lr, logs, eps)
    # A compiler may round both of an old block's u(t) in another way.
    p.index_add_(0, rows, torch.where(births < 0, 0, lack).to(p.dtype))


def _update(m: Tensor, root: Tensor, count: Tensor, lr: Tensor, logs: tuple[float, float], eps: float) -> Tensor:
    """u(count) = lr m / (1 - beta1^count) / (sqrt(v / (1 - beta2^count)) + eps), from the root of v."""
    count = count.clamp_min(1)  # 0 where a scaler has left the first step out
    first, second = (-torch.expm1(count * log) for log in logs)
    spread = second.sqrt()
    return m * (lr * spread / first) / (root + eps * spread)


def compiles(p: Tensor) -> bool:
    """Whether `add_lack` of p is to be compiled."""
    return p.is_cuda and COMPILES and _has_triton()


def add_lack_compiled(p: Tensor, *given: Any) -> None:
    """`add_lack` in one kernel. The first call of a shape takes seconds and waits for the card: it cannot be captured.

    Where PyTorch cannot compile it, a warning says so once, and its operations run then and from now on.
    """
    global COMPILES
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - takes a second

    try:
        return _compiled(BACKEND, p.shape[1:], p.dtype)(p, *given)
    except TorchDynamoException as error:
        COMPILES = False
        why = " ".join(str(error).split("\n")[:2])
    warnings.warn(
        f"[sparsify] PyTorch cannot compile the bias correction of young blocks, which takes longer now: {why}",
        RuntimeWarning,
        stacklevel=2,
    )
    return add_lack(p, *given)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _compiled(backend: str, shape: torch.Size, dtype: torch.dtype) -> Callable[..., None]:
    """For blocks of a shape, whatever their number: by the second number that comes, PyTorch compiles it for all."""
    code = add_lack.__code__.replace()  # PyTorch compiles 8 variants of a function at most, and counts by code objects
    made: Callable[..., None] = torch.compile(types.FunctionType(code, add_lack.__globals__), backend=backend)
    return made


# ---- Blocks of one age -----------------------------------------------------------------------------------------------


def add_lack_of_one_age(
    p: Tensor, m: Tensor, v: Tensor, rows: Tensor, t: float, age: float, lr: Any, logs: tuple[float, float], eps: float
) -> None:
    """`add_lack` where the host knows t and a, and all rows share them: on the CPU two thirds of the time."""
    m, v = m.index_select(0, rows), v.index_select(0, rows)
    spread, own_spread = (bias(count, logs[1]) ** -0.5 for count in (t, age))
    rate, own_rate = (s * bias(count, logs[0]) for s, count in zip((spread, own_spread), (t, age), strict=True))
    root = (v if v.dtype.itemsize >= 4 else v.float()).sqrt_()
    lack = torch.div(m, root + eps * spread)
    lack = lack.addcdiv_(m, root.add_(eps * own_spread), value=-own_rate / rate).mul_(rate * lr)
    p.index_add_(0, rows, lack.to(p.dtype))
