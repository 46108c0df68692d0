"""`Gated`: while a module runs, its weights are multiplied by gates, block by block."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...lent_weights import WeightLender
from ...modules.layer import BlockSparseLayer
from ...modules.recurrent import Recurrent
from ..weights.targets import Target


class Gated(WeightLender):
    """Lets a target's module run with gates [out_blocks, in_blocks], which get gradients <dW_B, W_B>.

    Our own block-sparse layers take them to their kernels. Other modules see, while they run, the product of parameter
    and gates in the place of the parameter, which stays what it is.

    Args:
        target: whose module.
        root: the model, in which modules are looked for that read the weights of others.
        gates: is asked at each run, with whether the module trains; None: the weights are as they are. A copy of the
            model asks, too, for its hooks are copies of these.
    """

    def __init__(self, target: Target, root: nn.Module, gates: Callable[[bool], Tensor | None]) -> None:
        self._target, self._gates = target, gates
        self._reader = _reader(target, root)
        self._handles: list[RemovableHandle] = [
            self._reader.register_forward_pre_hook(self._lend),
            self._reader.register_forward_hook(self._take_back, always_call=True),
        ]
        _forget_compiled()

    @property
    def name(self) -> str:
        """The target's."""
        return self._target.name

    @property
    def lends(self) -> bool:
        """Whether there are gates now."""
        return self._gates(False) is not None

    def ask(self, gates: Callable[[bool], Tensor | None]) -> None:
        """Asks another one for gates from now on."""
        self._gates = gates

    def remove(self) -> None:
        """Ends that."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _forget_compiled()

    @torch.compiler.disable
    def _lend(self, reader: nn.Module, inputs: Any) -> None:
        target, gates = self._target, self._gates(self._target.module.training)
        if gates is None:
            return
        if isinstance(target.module, BlockSparseLayer) and reader is target.module:
            target.module.lend_gates(gates[target.places()])
        else:
            self._put(target.times(target.parameter, gates))

    @torch.compiler.disable
    def _take_back(self, reader: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(self._target.module, BlockSparseLayer) and reader is self._target.module:
            self._target.module.lend_gates(None)
        else:
            self._put(None)

    def _put(self, weight: Tensor | None) -> None:
        """In front of the parameter, which stays in its place; LSTMs read a list of their weights instead."""
        own, name = vars(self._target.module), self._target.parameter_name
        if weight is None:
            own.pop(name, None)
        else:
            own[name] = weight
        if isinstance(self._target.module, nn.LSTM):
            own["_flat_weights"][own["_flat_weights_names"].index(name)] = getattr(self._target.module, name)


def _forget_compiled() -> None:
    """Compiled code does not look whether a module has hooks now: it would go on as if nothing had changed."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _reader(target: Target, root: nn.Module) -> nn.Module:
    """The module that runs with the weight: the target's own, or one above that reads it without running that."""
    names = target.path.split(".")
    for i in range(len(names)):
        above = root.get_submodule(".".join(names[:i]))
        if isinstance(above, Recurrent | nn.MultiheadAttention):
            return above
    return target.module
