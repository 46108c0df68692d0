"""What lies between convolutions: concat-ELU, dropout and the gate, all bound by memory.

On a card, training has each as one kernel that PyTorch compiles: concat-ELU of one tensor or of two behind one
another, in the order in which the next convolution reads its channels, with dropout, inside of the zeros that a dense
convolution needs around. Everywhere else they are PyTorch's operations, and orders are left to the convolution.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

COMPILES = True  # on a card; False: PyTorch's operations, to compare with
BACKEND = "inductor"  # of torch.compile


def concat_elu(x: Tensor) -> Tensor:
    """elu([x, -x]) over channels: [n, C, h, w] -> [n, 2 C, h, w]."""
    return functional.elu(torch.cat((x, -x), 1))


def gate(x: Tensor, both: Tensor) -> Tensor:
    """x + p sigmoid(q) with [p, q] = both [n, 2 C, h, w]."""
    if is_fused(x):
        made: Tensor = _compiled(_gate, x, both)
        return made
    return _gate(x, both)


def _gate(x: Tensor, both: Tensor) -> Tensor:
    p, q = both.chunk(2, 1)
    return x + p * q.sigmoid()


def is_fused(x: Tensor) -> bool:
    """Whether these operations are compiled for x, a part of a training on a card."""
    return x.is_cuda and COMPILES and torch.is_grad_enabled() and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _compiled(function: Callable[..., Any], *given: Any) -> Any:
    """function(*given), compiled for tensors that lie as these do and for all else that is given, as it is.

    A dense network needs nine variants of a function: three levels with three kinds of pads. Batches, sizes, widths and
    types of other trainings in the same process need theirs. PyTorch compiles a function 8 times and then refuses, so
    each variant is a function of its own.
    """
    key = tuple((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in given)
    return _compiled_for(function, BACKEND, key)(*given)


@functools.cache
def _compiled_for(function: Callable[..., Any], backend: str, key: tuple[Any, ...]) -> Callable[..., Any]:
    code = function.__code__.replace()  # PyTorch counts by code objects
    own = types.FunctionType(code, function.__globals__, function.__name__)
    return torch.compile(own, backend=backend, dynamic=False, fullgraph=True)


# ---- Concat-ELU in an order ------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where channels go: output j is elu(sign[j] x[source[j]]); x[c] has become plus[c], -x[c] minus[c]."""

    source: Tensor
    sign: Tensor
    plus: Tensor
    minus: Tensor


def places_of(channels: int, order: Tensor | None) -> Places:
    """Those of concat-ELU of so many channels, read in an order of 2 `channels`."""
    read = torch.arange(2 * channels) if order is None else order.long().cpu()
    inverse = read.argsort()
    sign = torch.where(read < channels, 1.0, -1.0)
    return Places(read % channels, sign, inverse[:channels], inverse[channels:])


def ordered_concat_elu(
    parts: tuple[Tensor, ...], places: Places, keep: float, pads: tuple[int, int, int, int]
) -> Tensor:
    """concat_elu of one or two tensors [n, C, h, w] behind one another, channels-last, in an order.

    Args:
        parts: see above.
        places: of the channels of all parts.
        keep: the share that dropout leaves; what it leaves is divided by it.
        pads: zeros around the result: left, right, above, below.
    """
    made: Tensor = _Ordered.apply(places, keep, pads, *parts)
    return made


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Places, keep: float, pads: tuple[int, int, int, int], *parts: Tensor) -> Tensor:
        # Detached: what needs a gradient and what does not would be compiled apart.
        last = [part.detach().permute(0, 2, 3, 1).contiguous() for part in parts]
        source, sign, *_ = places
        mask = None
        if keep < 1:
            assert len(last) == 1
            y, mask = _compiled(_forward_dropout, last[0], source, sign, keep, pads)
        elif len(last) == 1:
            y = _compiled(_forward, last[0], source, sign, pads)
        else:
            y = _compiled(_forward_two, *last, source, sign, pads)
        ctx.save_for_backward(mask, *last)
        ctx.places, ctx.keep, ctx.pads = places, keep, pads
        made: Tensor = y.permute(0, 3, 1, 2)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mask, *last = ctx.saved_tensors
        _, _, plus, minus = ctx.places
        dy = dy.permute(0, 2, 3, 1).contiguous()
        if mask is not None:
            dx = [_compiled(_backward_dropout, dy, last[0], mask, plus, minus, ctx.keep, ctx.pads)]
        elif len(last) == 1:
            dx = [_compiled(_backward, dy, last[0], plus, minus, ctx.pads)]
        else:
            dx = _compiled(_backward_two, dy, *last, plus, minus, ctx.pads)
        return None, None, None, *(part.permute(0, 3, 1, 2) for part in dx)


# Images here are [n, h, w, channels], contiguous. Sums and powers are of float32, whatever the type of the images.


def _pad(y: Tensor, pads: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    return functional.pad(y.to(dtype), (0, 0, *pads)) if any(pads) else y.to(dtype)


def _crop(dy: Tensor, like: Tensor, pads: tuple[int, int, int, int]) -> Tensor:
    left, _, above, _ = pads
    return dy[:, above : above + like.size(1), left : left + like.size(2)].float()


def _elu(v: Tensor) -> Tensor:
    return torch.where(v > 0, v, torch.expm1(v))


def _slopes(dplus: Tensor, dminus: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from those of elu(x) and elu(-x)."""
    v = x.float()
    small = torch.exp(-v.abs())
    return torch.where(v > 0, dplus - dminus * small, dplus * small - dminus).to(x.dtype)


def _forward(x: Tensor, source: Tensor, sign: Tensor, pads: tuple[int, int, int, int]) -> Tensor:
    return _pad(_elu(x[..., source].float() * sign), pads, x.dtype)


def _forward_dropout(
    x: Tensor, source: Tensor, sign: Tensor, keep: float, pads: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor]:
    v = x[..., source].float() * sign
    mask = torch.rand_like(v) < keep
    return _pad(torch.where(mask, _elu(v) / keep, 0.0), pads, x.dtype), mask


def _forward_two(a: Tensor, b: Tensor, source: Tensor, sign: Tensor, pads: tuple[int, int, int, int]) -> Tensor:
    c = a.size(-1)
    v = torch.where(source < c, a[..., source.clamp(max=c - 1)], b[..., (source - c).clamp(min=0)])
    return _pad(_elu(v.float() * sign), pads, a.dtype)


def _backward(dy: Tensor, x: Tensor, plus: Tensor, minus: Tensor, pads: tuple[int, int, int, int]) -> Tensor:
    dy = _crop(dy, x, pads)
    return _slopes(dy[..., plus], dy[..., minus], x)


def _backward_dropout(
    dy: Tensor, x: Tensor, mask: Tensor, plus: Tensor, minus: Tensor, keep: float, pads: tuple[int, int, int, int]
) -> Tensor:
    dy = torch.where(mask, _crop(dy, x, pads) / keep, 0.0)
    return _slopes(dy[..., plus], dy[..., minus], x)


def _backward_two(
    dy: Tensor, a: Tensor, b: Tensor, plus: Tensor, minus: Tensor, pads: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor]:
    dy, c = _crop(dy, a, pads), a.size(-1)
    first = _slopes(dy[..., plus[:c]], dy[..., minus[:c]], a)
    return first, _slopes(dy[..., plus[c:]], dy[..., minus[c:]], b)
