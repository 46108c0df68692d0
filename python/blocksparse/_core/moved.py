"""Old addresses of modules: names come from where they are now, and a warning says where that is."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def names_of(old: str, *new: str) -> Callable[[str], Any]:
    """What a module that has moved takes as its `__getattr__`. It warns when the first name is asked for.

    Args:
        old: the module's own name.
        new: the modules that its names are in.
    """
    told = False

    def getattr_of_module(name: str) -> Any:
        nonlocal told
        if not name.startswith("__"):  # tools that look at all modules ask for those
            for module in map(importlib.import_module, new):
                if hasattr(module, name):
                    if not told:
                        told = True
                        text = f"{old} has moved to {' and '.join(new)}; the old name works for one release"
                        warnings.warn(text, DeprecationWarning, stacklevel=2)
                    return getattr(module, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return getattr_of_module
