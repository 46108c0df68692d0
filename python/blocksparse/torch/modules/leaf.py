"""Modules as leaves of `torch.fx` graphs, which hold them as single calls: they look at what tensors are."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy


def as_leaf(module: nn.Module, *arguments: Any) -> Any:
    """The call of a module as a node, where one of its arguments stands for a tensor; else None.

    Raises:
        TypeError: the module is what is traced, not a part of it.
    """
    proxy = next((a for a in arguments if isinstance(a, Proxy)), None)
    if proxy is None:
        return None
    tracer: Any = proxy.tracer
    if (name := tracer.path_of_module(module)) == "":
        raise TypeError(f"[{type(module).__name__}] torch.fx has this as a leaf: trace a network that holds it")
    return tracer.create_proxy("call_module", name, arguments, {})
