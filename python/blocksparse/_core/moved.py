"""Old addresses of modules: names come from where they are now, and a warning says where that is."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def names_of(new: str, old: str) -> Callable[[str], Any]:
    """What a module that has moved takes as its `__getattr__`. It warns when the first name is asked for.

    Args:
        new: where the names are.
        old: the module's own name.
    """
    told = False

    def getattr_of_module(name: str) -> Any:
        nonlocal told
        if name.startswith("__"):  # of the module itself: tools that look at all modules ask for these
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        if not told:
            told = True
            text = f"{old} has moved to {new}; the old name works for one release"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value

    return getattr_of_module
