"""The layer norm between the matrices of a recurrent network, with what follows it there, as one op.

layer_norm(x, gain, shift, factor, term, relu, epsilon) -> (y, stats)
layer_norm_backward(dy, x, gain, shift, factor, y, stats, relu, has_term) -> (dx, dgain, dshift, dfactor, dterm)
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._core import library, structs
from ..autograd.transforms import refuse_tangents
from ..ops import linear as _ops

_lib_def = _ops._ops
_lib_def.define(
    "layer_norm(Tensor x, Tensor gain, Tensor shift, Tensor? factor, Tensor? term, bool relu, float epsilon) "
    "-> (Tensor, Tensor)"
)
_lib_def.define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor gain, Tensor shift, Tensor? factor, Tensor y, Tensor stats, "
    "bool relu, bool has_term) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("blocksparse::layer_norm", lib=_lib_def)
def _empty_forward(
    x: Tensor, gain: Tensor, shift: Tensor, factor: Tensor | None, term: Tensor | None, relu: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    _ops._check_devices(x, gain, shift, factor, term, op="layer_norm")
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 2, dtype=_ops.sum_dtype(x.dtype))


@torch.library.register_fake("blocksparse::layer_norm_backward", lib=_lib_def)
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
    _ops._check_devices(x, dy, gain, shift, factor, y, stats, op="layer_norm")
    nothing = x.new_empty(0)
    dfactor = nothing if factor is None else torch.empty_like(x)
    dterm = torch.empty_like(x) if has_term else x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(gain), torch.empty_like(shift), dfactor, dterm


def _pointer(x: Tensor | None) -> Any:
    return _ops._pointer(x, "layer_norm")


def _forward(
    x: Tensor, gain: Tensor, shift: Tensor, factor: Tensor | None, term: Tensor | None, relu: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    y, stats = _empty_forward(x, gain, shift, factor, term, relu, epsilon)
    given = (_pointer(t) for t in (x, gain, shift, factor, term))
    inputs = structs.LayerNormInputs(*given, int(relu), epsilon)
    library.call("bs_layer_norm_forward", ctypes.byref(inputs), _pointer(y), _pointer(stats), _ops._stream(x))
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
    library.call("bs_layer_norm_backward", ctypes.byref(saved), _pointer(dy), ctypes.byref(grads), _ops._stream(x))
    return made


for _device in ("CPU", "CUDA"):
    _lib_def.impl("layer_norm", _forward, _device)
    _lib_def.impl("layer_norm_backward", _backward, _device)

forward = torch.ops.blocksparse.layer_norm.default
backward = torch.ops.blocksparse.layer_norm_backward.default


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        shift: Tensor,
        factor: Tensor | None,
        term: Tensor | None,
        relu: bool,
        epsilon: float,
    ) -> Tensor:
        y, stats = forward(x, gain, shift, factor, term, relu, epsilon)
        ctx.save_for_backward(x, gain, shift, factor, y, stats)
        ctx.relu, ctx.has_term = relu, term is not None
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_tangents("layer_norm", dy)
        factor = ctx.saved_tensors[3]
        made = backward(dy.contiguous(), *ctx.saved_tensors, ctx.relu, ctx.has_term)
        dx, dgain, dshift, dfactor, dterm = made
        of_inputs = (None if factor is None else dfactor, dterm if ctx.has_term else None)
        return dx, dgain, dshift, *of_inputs, None, None


def layer_norm(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    factor: Tensor | None = None,
    term: Tensor | None = None,
    relu: bool = False,
    epsilon: float = 1e-5,
) -> Tensor:
    """y = f((x^ gain + shift) factor + term): x^ is x normalised over its last dimension, f is relu or nothing.

    Differentiable once, and backward.

    Args:
        x: [n, groups, features], contiguous. Each group has a norm of its own.
        gain: [groups, features], float32 (float64 for float64); and so is shift.
        shift: see gain.
        factor: like x; 1 if not given.
        term: like x; 0 if not given.
        relu: whether negative results become 0.
        epsilon: added to the variance.

    Returns:
        y, like x.

    Raises:
        ValueError: a shape or dtype is wrong.
        NotImplementedError: a tensor has a tangent (forward-mode differentiation).
    """
    refuse_tangents("layer_norm", x, gain, shift, factor, term)
    gain, shift = gain.contiguous(), shift.contiguous()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gain, shift, factor, term)):
        y: Tensor = _LayerNorm.apply(x, gain, shift, factor, term, relu, epsilon)
        return y
    result: Tensor = forward(x, gain, shift, factor, term, relu, epsilon)[0]
    return result
