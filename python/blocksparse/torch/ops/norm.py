"""The layer norm between the matrices of a recurrent network, with what follows it there, as PyTorch sees it.

layer_norm(x, gain, shift, factor, term, relu, epsilon) -> (y, stats)
layer_norm_backward(dy, x, gain, shift, factor, y, stats, relu, has_term) -> (dx, dgain, dshift, dfactor, dterm)
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..._core import library, structs
from .calls import check_devices, pointer_to, stream_of, sum_dtype
from .registry import OPS

OPS.define(
    "layer_norm(Tensor x, Tensor gain, Tensor shift, Tensor? factor, Tensor? term, bool relu, float epsilon) "
    "-> (Tensor, Tensor)"
)
OPS.define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor gain, Tensor shift, Tensor? factor, Tensor y, Tensor stats, "
    "bool relu, bool has_term) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("blocksparse::layer_norm", lib=OPS)
def _empty_forward(
    x: Tensor, gain: Tensor, shift: Tensor, factor: Tensor | None, term: Tensor | None, relu: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    check_devices(x, gain, shift, factor, term, op="layer_norm")
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 2, dtype=sum_dtype(x.dtype))


@torch.library.register_fake("blocksparse::layer_norm_backward", lib=OPS)
def _empty_backward(
    dy: Tensor,
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    factor: Tensor | None,
    y: Tensor,
    stats: Tensor,
    relu: bool,
    has_term: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_devices(x, dy, gain, shift, factor, y, stats, op="layer_norm")
    nothing = x.new_empty(0)
    dfactor = nothing if factor is None else torch.empty_like(x)
    dterm = torch.empty_like(x) if has_term else x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(gain), torch.empty_like(shift), dfactor, dterm


def _pointer(x: Tensor | None) -> Any:
    return pointer_to(x, "layer_norm")


def _forward(
    x: Tensor, gain: Tensor, shift: Tensor, factor: Tensor | None, term: Tensor | None, relu: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    y, stats = _empty_forward(x, gain, shift, factor, term, relu, epsilon)
    given = (_pointer(t) for t in (x, gain, shift, factor, term))
    inputs = structs.LayerNormInputs(*given, int(relu), epsilon)
    library.call("bs_layer_norm_forward", ctypes.byref(inputs), _pointer(y), _pointer(stats), stream_of(x))
    return y, stats


def _backward(
    dy: Tensor,
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    factor: Tensor | None,
    y: Tensor,
    stats: Tensor,
    relu: bool,
    has_term: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    made = dx, dgain, dshift, dfactor, dterm = _empty_backward(dy, x, gain, shift, factor, y, stats, relu, has_term)
    saved = structs.LayerNormSaved(*(_pointer(t) for t in (x, gain, shift, factor, y, stats)), int(relu))
    wanted = (dx, dgain, dshift, None if factor is None else dfactor, dterm if has_term else None)
    grads = structs.LayerNormGrads(*(_pointer(t) for t in wanted))
    library.call("bs_layer_norm_backward", ctypes.byref(saved), _pointer(dy), ctypes.byref(grads), stream_of(x))
    return made


for _device in ("CPU", "CUDA"):
    OPS.impl("layer_norm", _forward, _device)
    OPS.impl("layer_norm_backward", _backward, _device)

forward = torch.ops.blocksparse.layer_norm.default
backward = torch.ops.blocksparse.layer_norm_backward.default
