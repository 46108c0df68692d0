"""Forward-mode differentiation and the transforms of `torch.func`.

The ops are kernels of devices and nothing more, through which a tangent would be lost without a word. So the passes of
linear and convolution have twins that know tangents, and everything else refuses them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # a tensor of a level of torch.func


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward-mode differentiation may go through one of them. 0.1 us where none is under way."""
    if forward_ad._current_level < 0:
        return False
    given = [t for t in tensors if t is not None]
    return any(is_wrapped(t) or forward_ad.unpack_dual(t).tangent is not None for t in given)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether one of them does, if gradients are wanted at all."""
    return any(t is not None and t.requires_grad for t in tensors)


def refuse_tangents(op: str, *tensors: Tensor | None) -> None:
    """For what has no forward-mode derivative.

    Raises:
        NotImplementedError: a tensor has a tangent.
    """
    if has_tangent(*tensors):
        raise NotImplementedError(
            f"[{op}] a tensor has a tangent, and this has no forward-mode derivative, as linear and conv have: "
            "take the backward pass, torch.autograd.grad"
        )


def refuse_compiled_transforms(op: str) -> None:
    """Inside of a compiled `torch.func` transform an op does not see that gradients are wanted, which would be zeros.

    Raises:
        NotImplementedError: so `torch.compile` leaves the transform uncompiled, or says so where it has to take all.
    """
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"[{op}] torch.compile does not know torch.func's transforms of this: compile inside")


def refuse_second(op: str, grads: Sequence[Tensor | None], output: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of what is differentiable once. Where they are to have gradients themselves, asking for these raises.

    PyTorch's `once_differentiable` does so only where the gradient of the output needs one, and cuts the graph: the
    second derivative of a sum is then None, or zeros.

    Args:
        op: for the message.
        grads: of the inputs.
        output: what the node gave in the forward pass; it leads to all inputs.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tuple(grads)
    given = [g for g in grads if g is not None]
    refused = iter(_NoSecond.apply(op, len(given), *given, output))
    return tuple(None if g is None else next(refused) for g in grads)


class _NoSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            f"[{ctx.op}] has no second derivative: take BlockSparseLSTM, which has derivatives of all orders"
        )


class Pass(torch.autograd.Function):
    """One pass of a product, linear in each of its tensors. Its twin does the same where PyTorch transforms functions.

    A subclass's `forward` saves its tensors without the bias, and has the other arguments in `ctx.fixed`; `tangent` is
    its derivative along tangents of its arguments. `torch.compile` takes no function with such a derivative, and a
    twin's call costs 10 us more.
    """

    tensors: int  # how many arguments are tensors, or None: the first
    bias: int | None = None  # the place of a bias among them
    twin: type[torch.autograd.Function]

    def __init_subclass__(cls) -> None:
        def forward(*arguments: Any) -> Any:
            *tensors, fixed = arguments
            return cls.forward(_Unrecorded(), *tensors, *fixed.arguments)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *given, fixed = inputs
            tensors = [t for i, t in enumerate(given) if i != cls.bias]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.fixed = fixed.arguments

        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return (*cls.backward(ctx, *grads)[: cls.tensors], None)

        def jvp(ctx: Any, *tangents: Any) -> Any:
            levels = torch._C._functorch.get_interpreter_stack() or []
            if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels) > 1:
                # PyTorch switches forward mode off while it runs this, so outer tangents would be lost.
                raise NotImplementedError(
                    "[linear, conv] forward mode has no forward mode through it: take torch.func.hessian"
                )
            return cls.tangent(ctx, *tangents)

        methods = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp}
        body = {name: staticmethod(method) for name, method in methods.items()}
        name = f"{cls.__name__}Twin"
        cls.twin = type(name, (torch.autograd.Function,), {**body, "generate_vmap_rule": True})

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Any:
        """Of what forward gives; None: an argument has none."""
        raise NotImplementedError


class _Fixed:
    """Arguments that PyTorch is not to look into."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class _Unrecorded:
    """Stands in for autograd's context where nothing is recorded."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps nothing."""


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a transform of `torch.func` is under way. Not for `torch.compile`."""
    active: bool = torch._C._are_functorch_transforms_active()
    return forward_ad._current_level >= 0 or active


def apply(function: type[Pass], *arguments: Any) -> Any:
    """function.apply, by its twin where that is needed."""
    compiles = torch.compiler.is_compiling()
    if forward_ad._current_level >= 0 or (not compiles and torch._C._are_functorch_transforms_active()):
        return function.twin.apply(*arguments[: function.tensors], _Fixed(*arguments[function.tensors :]))
    return function.apply(*arguments)


def run(function: type[Pass], *arguments: Any) -> Any:
    """`apply`, or its work alone where the gradient is not to have gradients itself: that saves 5 us."""
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return apply(function, *arguments)
    return function.forward(_Unrecorded(), *arguments)


def tangent_of(
    product: Callable[..., Tensor], tensors: Sequence[Tensor | None], tangents: Sequence[Tensor | None]
) -> Tensor | None:
    """Of a product that is linear in each of its tensors: the sum of those with one tensor's tangent in its place."""
    parts = [product(*tensors[:i], t, *tensors[i + 1 :]) for i, t in enumerate(tangents) if t is not None]
    return functools.reduce(operator.add, parts) if parts else None


def tangents_of_gradient(
    gradient: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Of gates * S(x, dy) and <S(x, dy), W>, which `gradient` makes of (x, dy, W, gates).

    The first does not depend on W, the second not on gates.
    """
    x, dy, of_w, of_gates = tangents
    dw = tangent_of(lambda *given: gradient(*given)[0], tensors, (x, dy, None, of_gates))
    dgates = tangent_of(lambda *given: gradient(*given)[1], tensors, (x, dy, of_w, None))
    return dw, dgates
