"""Adam's step by blocks' own ages: adds what young blocks lack, u(t) - u(a), see `moments`.

On a card PyTorch compiles it to one kernel for each parameter; bfloat16, which it adds nothing to in place, takes some
more. Elsewhere, and where it cannot be compiled, all parameters whose blocks have one shape are corrected at once by
PyTorch's operations.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMPILES = True  # on a card; False: PyTorch's operations, to compare with
BACKEND = "inductor"  # of torch.compile


class Blocks(NamedTuple):
    """Some blocks of a parameter [blocks, ...]."""

    p: Tensor
    """The parameter, which is changed in place."""
    m: Tensor
    """Its first moment."""
    v: Tensor
    """Its second moment."""
    rows: Tensor
    """int64 [n], which blocks, none twice."""


def bias(count: Any, log: float) -> Any:
    """1 / (1 - beta^count), from the logarithm of beta."""
    return -1 / (torch.expm1(count * log) if isinstance(count, Tensor) else math.expm1(count * log))


def logs_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """Logarithms of the betas."""
    first, second = (math.log(beta) if (beta := float(b)) > 0 else -math.inf for b in group["betas"])
    return first, second


# ---- Blocks of several ages ------------------------------------------------------------------------------------------
# u(c) = rate(c) m / (sqrt(v) + spread(c) eps) for a count of steps c; spread(c) = sqrt(1 - beta2^c).


def add_lack(
    members: Sequence[Blocks],
    births: Sequence[Tensor],
    ts: Sequence[Tensor],
    step: Tensor,
    lr: Tensor,
    logs: tuple[float, float],
    eps: float,
) -> None:
    """p[rows] += u(t) - u(a), for all parameters at once; their blocks have one shape and dtype.

    Args:
        members: blocks of each parameter.
        births: of each parameter float32 [n]: a = step - birth. Less than 0: a 0 is added.
        ts: of each parameter [], its count of steps with this one.
        step: int64 [], with this one.
        lr: [].
        logs: logarithms of the betas.
        eps: Adam's, more than 0.
    """
    m, root = _moment_and_root(members)
    born = _joined(births)
    t = _joined([count.expand(len(b)) for count, b in zip(ts, births, strict=True)])
    lr = torch.where(born < 0, 0, lr)  # however a compiler rounds u(t) and u(a) of old blocks
    factors = [*_factors(t, lr, logs, root.dtype), *_factors(torch.minimum(step - born, t), lr, logs, root.dtype)]
    rate, spread, own_rate, own_spread = (factor.view(-1, *(1,) * (root.dim() - 1)) for factor in factors)
    _add(members, (rate / (root + eps * spread) - own_rate / (root + eps * own_spread)) * m)


def _factors(count: Tensor, lr: Tensor, logs: tuple[float, float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rate and spread."""
    count = count.to(dtype).clamp_min(1)  # 0 where a scaler has left the first step out
    first, second = (-torch.expm1(count * log) for log in logs)
    spread = second.sqrt()
    return lr.to(dtype) * spread / first, spread


def _moment_and_root(members: Sequence[Blocks]) -> tuple[Tensor, Tensor]:
    """M and sqrt(v) of the blocks of all parameters, the latter in float32 at least."""
    m = _joined([b.m.index_select(0, b.rows) for b in members])
    v = _joined([b.v.index_select(0, b.rows) for b in members])
    return m, (v if v.dtype.itemsize >= 4 else v.float()).sqrt_()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _add(members: Sequence[Blocks], lack: Tensor) -> None:
    for b, part in zip(members, lack.split([len(b.rows) for b in members]), strict=True):
        b.p.index_add_(0, b.rows, part.to(b.p.dtype))


# ---- Compiled --------------------------------------------------------------------------------------------------------


def compiles(p: Tensor) -> bool:
    """Whether `add_lack` of p is to be compiled."""
    return p.is_cuda and COMPILES and _has_triton()


def add_lack_compiled(blocks: Blocks, births: Tensor, t: Tensor, *given: Any) -> None:
    """`add_lack` of one parameter in one kernel.

    The first call for a shape takes seconds and waits for the card, so it cannot be captured. Where PyTorch cannot
    compile it, a warning says so once, and its operations run then and from now on.
    """
    global COMPILES
    from torch._dynamo.exc import TorchDynamoException  # takes a second

    try:
        return _compiled(BACKEND, blocks.p.shape[1:], blocks.p.dtype)([blocks], [births], [t], *given)
    except TorchDynamoException as error:
        COMPILES = False
        why = " ".join(str(error).split("\n")[:2])
    warnings.warn(
        f"[sparsify] PyTorch cannot compile the bias correction of young blocks, which takes longer now: {why}",
        RuntimeWarning,
        stacklevel=2,
    )
    return add_lack([blocks], [births], [t], *given)


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
    members: Sequence[Blocks], t: float, age: float, lr: Any, logs: tuple[float, float], eps: float
) -> None:
    """`add_lack` where the host knows t and a, and all blocks share them: on the CPU two thirds of the time."""
    m, root = _moment_and_root(members)
    spread, own_spread = (bias(count, logs[1]) ** -0.5 for count in (t, age))
    rate, own_rate = (s * bias(count, logs[0]) for s, count in zip((spread, own_spread), (t, age), strict=True))
    lack = torch.div(m, root + eps * spread)
    _add(members, lack.addcdiv_(m, root.add_(eps * own_spread), value=-own_rate / rate).mul_(rate * lr))
