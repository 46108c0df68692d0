"""Recurrent networks whose steps are all one op of the core: what the networks have in common.

A network says how the core takes its tensors; `run` calls the core forward, and as an autograd node backward.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._core import library, structs
from ..blocks import Blocks
from ..ops.calls import blocks_of, pointer_to, scratch, stream_of, sum_dtype, view_of
from ..ops.linear import allows_tf32
from .transforms import needs_gradient, refuse_second, refuse_tangents

# What the core is given: h0, c0 [n, H], factor [steps, n, H], more of the network's own, and the weights.
Given = Sequence[Tensor]


class Network(ABC):
    """An op of the core, and the layouts of the weights that go with the tensors of each call.

    Args:
        layers: whose weights are the last of the tensors.
    """

    op: str  # "deep_update": of bs_deep_update_forward, say

    def __init__(self, layers: Sequence[Blocks]) -> None:
        self.layers = layers
        self._layouts = [
            (layer.tables(layer.weight.device), layer.layout) for layer in layers
        ]  # both passes have these

    @abstractmethod
    def inputs(self, given: Given, lengths: Tensor | None) -> ctypes.Structure:
        """As the core takes them; the tensors must outlive it."""

    @abstractmethod
    def grads(self, grads: Sequence[Tensor | None]) -> ctypes.Structure:
        """Likewise, of the gradients: one of each tensor that is given, or None where it is not wanted."""

    def optional(self, i: int) -> bool:
        """Whether the gradient of the i-th tensor may be left out."""
        return i < 2

    def view(self, i: int, weight: Tensor) -> Any:
        """A pointer to the layout of the i-th weight."""
        index, layout = self._layouts[i]
        return ctypes.pointer(view_of(index, layout.transposed, *blocks_of(weight), *layout.sizes, self.op))

    def narrowed(self, given: Given) -> list[Tensor]:
        """Weights in the dtype of their products, that of factor."""
        first = len(given) - len(self.layers)
        return [*given[:first], *(weight.detach().to(given[2].dtype) for weight in given[first:])]


def takes(x: Tensor) -> bool:
    """Whether the core can be called on x: it holds numbers, and nothing is traced or counts ops.

    The core's call is no op, so modes such as FlopCounterMode would not see it.
    """
    real = not x.is_meta and not isinstance(x, FakeTensor)
    if not real or x.numel() == 0 or torch.compiler.is_compiling():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._get_tracing_state() is None


def run(network: Network, lengths: Tensor | None, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [steps, n, H], h and c [n, H].

    Args:
        network: says what is done.
        lengths: steps of each sequence, [n]; None: all.
        given: tensors; the weights as they are, perhaps wider than the others.
    """
    refuse_tangents(network.op, *given)
    if lengths is not None:
        lengths = lengths.to(given[0].device, torch.int64).contiguous()
    given = tuple(t.contiguous() for t in given)  # outside of the node, for the core has pointers alone
    if torch.is_grad_enabled() and needs_gradient(*given):
        made: tuple[Tensor, Tensor, Tensor] = _Run.apply(network, lengths, *given)
        return made
    return _forward(network, lengths, network.narrowed(given), False)[:3]


def _memory(network: Network, which: str, like: Tensor, inputs: ctypes.Structure) -> tuple[structs.Workspace, Tensor]:
    return scratch(library.ask(f"bs_{network.op}_{which}_size", ctypes.byref(inputs)), like)


def _forward(
    network: Network, lengths: Tensor | None, given: Given, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, h, c and what the backward pass needs."""
    h0, c0, factor = given[:3]
    inputs = network.inputs(given, lengths)
    y, h, c = torch.empty_like(factor), torch.empty_like(h0), torch.empty_like(c0)
    saved, to_save = factor.new_empty(0), structs.Workspace()
    if save:
        to_save, saved = _memory(network, "saved", factor, inputs)
    workspace, _scratch = _memory(network, "forward_workspace", factor, inputs)
    made = (pointer_to(t, network.op) for t in (y, h, c))
    stream = stream_of(factor, allows_tf32(factor))
    library.call(f"bs_{network.op}_forward", ctypes.byref(inputs), *made, to_save, workspace, stream)
    return y, h, c, saved


class _Run(torch.autograd.Function):
    """Weights may be wider than their products (autocast): their gradients are as wide as they are."""

    @staticmethod
    def forward(ctx: Any, network: Network, lengths: Tensor | None, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        narrow = network.narrowed(given)
        y, h, c, saved = _forward(network, lengths, narrow, True)
        ctx.save_for_backward(lengths, y, saved, *narrow)
        ctx.network, ctx.dtypes = network, [t.dtype for t in given]
        ctx.set_materialize_grads(False)
        return y, h, c

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        network: Network = ctx.network
        refuse_tangents(network.op, *of_outputs)
        with torch.no_grad():
            grads = _backward(network, ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[2:], of_outputs)
        return (None, None, *refuse_second(network.op, grads, ctx.saved_tensors[1]))


def _backward(
    network: Network,
    all_saved: tuple[Any, ...],
    wide: Sequence[torch.dtype],
    needed: Sequence[bool],
    of_outputs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of what was given, of whose dtypes `wide` is, as far as they are needed."""
    lengths, y, saved, *given = all_saved
    wanted = [is_needed or not network.optional(i) for i, is_needed in enumerate(needed)]
    dtypes = [t.dtype if dtype == t.dtype else sum_dtype(y.dtype) for t, dtype in zip(given, wide, strict=True)]
    grads = [
        torch.empty_like(t, dtype=dtype) if want else None for t, dtype, want in zip(given, dtypes, wanted, strict=True)
    ]
    inputs, of_given = network.inputs(given, lengths), network.grads(grads)
    contiguous = [None if t is None else t.contiguous() for t in of_outputs]
    workspace, _scratch = _memory(network, "backward_workspace", y, inputs)
    library.call(
        f"bs_{network.op}_backward",
        *(ctypes.byref(inputs), pointer_to(y, network.op), structs.Workspace(saved.data_ptr(), saved.numel())),
        *(pointer_to(t, network.op) for t in contiguous),
        *(ctypes.byref(of_given), workspace, stream_of(y, allows_tf32(y))),
    )
    return grads
