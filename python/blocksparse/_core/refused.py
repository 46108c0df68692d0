"""Names of the 2017 release that are not there any more: who asks for one is told what to take in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn


def ways_of(module: str, ways: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """What such a module takes as its `__getattr__`.

    Args:
        module: its own name.
        ways: for names of the original, what to take now.
    """

    def getattr_of_module(name: str) -> NoReturn:
        if name in ways:
            raise NotImplementedError(f"[{module}] {name} of the 2017 release is not there: take {ways[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
