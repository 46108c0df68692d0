"""What lies between convolutions: biases, concat-ELU, dropout and the gate, all bound by memory.

On a card, training has each as one kernel that PyTorch compiles: concat-ELU of one tensor or of two behind one
another, in the order in which the next convolution reads its channels; the same of a sum of convolutions with their
biases, with dropout; the gate. What goes to a dense convolution lies inside of the zeros that it needs around.
Everywhere else they are PyTorch's operations, and biases and orders are left to the convolutions.
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

from ...torch.autograd.bias import sum_of_tokens

COMPILES = True  # on a card; False: PyTorch's operations, to compare with
BACKEND = "inductor"  # of torch.compile
OPTIONS = {"assert_indirect_indexing": False}  # orders are checked once, when they are made


def concat_elu(x: Tensor) -> Tensor:
    """elu([x, -x]) over channels: [n, C, h, w] -> [n, 2 C, h, w]."""
    return functional.elu(torch.cat((x, -x), 1))


def gate(x: Tensor, both: Tensor) -> Tensor:
    """x + p sigmoid(q) with [p, q] = both [n, 2 C, h, w]."""
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
    options: Any = OPTIONS if backend == "inductor" else None
    return torch.compile(own, backend=backend, dynamic=False, fullgraph=True, options=options)


# ---- Channels in an order --------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where channels go: output j is elu(sign[j] x[source[j]]); x[c] has become plus[c], -x[c] minus[c]."""

    source: Tensor
    sign: Tensor
    plus: Tensor
    minus: Tensor


def places_of(channels: int, order: Tensor | None) -> Places:
    """Those of concat-ELU of so many channels, read in an order of 2 `channels`."""
    read = torch.arange(2 * channels) if order is None else order.long().cpu()
    inverse = read.argsort().int()
    sign = torch.where(read < channels, 1.0, -1.0)
    return Places((read % channels).int(), sign, inverse[:channels], inverse[channels:])


Pads = tuple[int, int, int, int]


# ---- With gradients --------------------------------------------------------------------------------------------------
# Images inside of functions are [n, h, w, channels], contiguous. Sums and powers are of float32, whatever their type.


def ordered_concat_elu(parts: tuple[Tensor, ...], places: Places, pads: Pads) -> tuple[Tensor, Tensor, Tensor]:
    """concat_elu of one or two tensors [n, C, h, w] behind one another, channels-last, in an order.

    Args:
        parts: see above.
        places: of the channels of all parts.
        pads: zeros around the result: left, right, above, below.

    Returns:
        The result, the same for a second reader, and the first part. Gradients that come back to the second and the
        third are added on the way.
    """
    made: tuple[Tensor, Tensor, Tensor] = _Ordered.apply(places, pads, *parts)
    return made


def inner_concat_elu(
    terms: tuple[Tensor, ...], biases: tuple[Tensor, ...], places: Places, keep: float, pads: Pads
) -> Tensor:
    """concat_elu of a sum of one or two tensors [n, C, h, w] and their biases [C], with dropout.

    Args:
        terms: see above.
        biases: one for each term.
        places: as for `ordered_concat_elu`.
        keep: the share that dropout leaves; what it leaves is divided by it.
        pads: as for `ordered_concat_elu`.
    """
    made: Tensor = _Inner.apply(places, keep, pads, len(terms), *terms, *biases)
    return made


def biased_gate(x: Tensor, both: Tensor, bias: Tensor) -> Tensor:
    """`gate` of both + bias [2 C], channels-last."""
    made: Tensor = _Gate.apply(x, both, bias)
    return made


def _last(x: Tensor) -> Tensor:
    """As functions take it. Detached: what needs a gradient and what does not would be compiled apart."""
    return x.detach().permute(0, 2, 3, 1).contiguous()


def _first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Places, pads: Pads, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        last = [_last(part) for part in parts]
        y = _compiled(_forward, pads, places.source, places.sign, *last)
        ctx.save_for_backward(*last)
        ctx.places, ctx.pads = places, pads
        ctx.set_materialize_grads(False)
        return _first(y), _first(y), parts[0].view_as(parts[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, second, more = (None if grad is None else _last(grad) for grad in grads)
        last = ctx.saved_tensors
        if dy is None:
            dy, second = second, None
        if dy is None:
            return None, None, grads[2], *(None,) * (len(last) - 1)
        dx = _compiled(_backward, ctx.pads, ctx.places.plus, ctx.places.minus, dy, second, more, *last)
        return None, None, *(_first(part) for part in dx)


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Places, keep: float, pads: Pads, count: int, *given: Tensor) -> Tensor:
        terms = [_last(term) for term in given[:count]]
        terms += [bias.detach() for bias in given[count:]]
        seeds = None
        if keep < 1:
            seeds = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=terms[0].device)
        ctx.save_for_backward(seeds, *terms)
        ctx.places, ctx.keep, ctx.pads, ctx.count = places, keep, pads, count
        return _first(_compiled(_inner, keep, pads, seeds, places.source, places.sign, *terms))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        seeds, *terms = ctx.saved_tensors
        fixed = (ctx.keep, ctx.pads, seeds, ctx.places.plus, ctx.places.minus)
        dx = _compiled(_inner_backward, *fixed, _last(dy), *terms)
        dbias = sum_of_tokens(dx)
        return None, None, None, None, *(_first(dx),) * ctx.count, *(dbias,) * ctx.count


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, both: Tensor, bias: Tensor) -> Tensor:
        last, bias = _last(both), bias.detach()
        ctx.save_for_backward(last, bias)
        return _first(_compiled(_gate, _last(x), last, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dboth = _compiled(_gate_backward, _last(dy), *ctx.saved_tensors)
        return dy, _first(dboth), sum_of_tokens(dboth)


# ---- What is compiled ------------------------------------------------------------------------------------------------


def _pad(y: Tensor, pads: Pads, dtype: torch.dtype) -> Tensor:
    return functional.pad(y.to(dtype), (0, 0, *pads)) if any(pads) else y.to(dtype)


def _crop(dy: Tensor, like: Tensor, pads: Pads) -> Tensor:
    left, _, above, _ = pads
    return dy[:, above : above + like.size(1), left : left + like.size(2)].float()


def _elu(v: Tensor, dtype: torch.dtype) -> Tensor:
    """elu(v) for a result of `dtype`.

    Without expm1 a concat-ELU takes 24 instructions for a number instead of 40. It is off by 4e-5 of the result at
    most, which 16 bits do not show.
    """
    if dtype.itemsize > 2:
        return torch.where(v > 0, v, torch.expm1(v))
    return torch.where(v > 0, v, torch.where(v > -1 / 64, v + 0.5 * v * v, torch.exp(v) - 1))


def _slopes(dplus: Tensor, dminus: Tensor, v: Tensor) -> Tensor:
    """The gradient of v from those of elu(v) and elu(-v)."""
    small = torch.exp(-v.abs())
    return torch.where(v > 0, dplus - dminus * small, dplus * small - dminus)


def _forward(pads: Pads, source: Tensor, sign: Tensor, *parts: Tensor) -> Tensor:
    a = parts[0]
    if len(parts) == 1:
        v = a[..., source]
    else:
        c = a.size(-1)
        v = torch.where(source < c, a[..., source.clamp(max=c - 1)], parts[1][..., (source - c).clamp(min=0)])
    return _pad(_elu(v.float() * sign, a.dtype), pads, a.dtype)


def _backward(
    pads: Pads, plus: Tensor, minus: Tensor, dy: Tensor, second: Tensor | None, more: Tensor | None, *parts: Tensor
) -> tuple[Tensor, ...]:
    dy, made, begin = _crop(dy, parts[0], pads), [], 0
    dy = dy if second is None else dy + _crop(second, parts[0], pads)
    for part in parts:
        end = begin + part.size(-1)
        dx = _slopes(dy[..., plus[begin:end]], dy[..., minus[begin:end]], part.float())
        made.append((dx if more is None or begin > 0 else dx + more.float()).to(part.dtype))
        begin = end
    return tuple(made)


def _sum(terms: tuple[Tensor, ...]) -> Tensor:
    """Of tensors and then as many biases, rounded as a convolution would do it."""
    count = len(terms) // 2
    v = terms[0].float() + terms[count].float()
    for term, bias in zip(terms[1:count], terms[count + 1 :], strict=True):
        v = v + (term.float() + bias.float())
    return v.to(terms[0].dtype).float()


def _inner(keep: float, pads: Pads, seeds: Tensor | None, source: Tensor, sign: Tensor, *terms: Tensor) -> Tensor:
    dtype = terms[0].dtype
    y = _elu(_sum(terms)[..., source] * sign, dtype)
    return _pad(y if seeds is None else _drop(y, keep, seeds), pads, dtype)


def _inner_backward(
    keep: float, pads: Pads, seeds: Tensor | None, plus: Tensor, minus: Tensor, dy: Tensor, *terms: Tensor
) -> Tensor:
    dy = _crop(dy, terms[0], pads)
    if seeds is not None:  # drawn again: a mask of a byte for each place takes longer to write and to read
        dy = _drop(dy, keep, seeds)
    return _slopes(dy[..., plus], dy[..., minus], _sum(terms)).to(terms[0].dtype)


def _drop(y: Tensor, keep: float, seeds: Tensor) -> Tensor:
    return torch.where(_random(y.shape, seeds) < round(keep * 2**31), y * (1 / keep), 0.0)


def _random(shape: torch.Size, seeds: Tensor) -> Tensor:
    """Whole numbers below 2^31, for each place another one.

    Philox, PyTorch's generator, takes 58 instructions for a number, more than all else here. This is Wellons' hash
    "lowbias32" of a place times an odd number, which takes 16.
    """
    number = shape.numel() // shape[-1]
    row = torch.arange(number, dtype=torch.int32, device=seeds.device).view(*shape[:-1], 1)
    place = row * shape[-1] + torch.arange(shape[-1], dtype=torch.int32, device=seeds.device)
    x = place * (seeds[0] | 1) + seeds[1]  # wraps around, as all of this does
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return (x ^ (x >> 16 & 0xFFFF)) & 0x7FFFFFFF


def _gate(x: Tensor, both: Tensor, bias: Tensor) -> Tensor:
    p, q = (both.float() + bias.float()).chunk(2, -1)
    return (x.float() + p * q.sigmoid()).to(x.dtype)


def _gate_backward(dy: Tensor, both: Tensor, bias: Tensor) -> Tensor:
    p, q = (both.float() + bias.float()).chunk(2, -1)
    dy, s = dy.float(), q.sigmoid()
    return torch.cat((dy * s, dy * p * s * (1 - s)), -1).to(both.dtype)
