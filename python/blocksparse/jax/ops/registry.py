"""The core's handlers of XLA's custom calls: registered once for each platform, and called from lowering rules."""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from ..._core import library

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # as lowering rules and as the runtime call them
_HANDLERS = (
    *("bs_xla_linear_fprop", "bs_xla_linear_dgrad", "bs_xla_linear_wgrad", "bs_xla_linear_glu_fprop"),
    *("bs_xla_conv_fprop", "bs_xla_conv_dgrad", "bs_xla_conv_wgrad"),
    *("bs_xla_lstm_forward", "bs_xla_lstm_backward"),
)


_lock = threading.Lock()
_registered = False


def register() -> None:
    """Gives XLA the handlers of all ops, on first use.

    Raises:
        UnavailableError: the runtime speaks no version of XLA's interface that the handlers know.
    """
    global _registered
    with _lock:
        if not _registered:
            jax.local_devices()  # a runtime takes handlers once it has begun
            for name in _HANDLERS:
                capsule = jax.ffi.pycapsule(library.function(name))
                for platform in PLATFORMS.values():
                    jax.ffi.register_ffi_target(name, capsule, platform=platform)
            _registered = True
    check_versions(*library.xla_versions(), importlib.metadata.version("jaxlib"))


def check_versions(ours: tuple[int, int], theirs: tuple[int, int], jaxlib: str) -> None:
    """A runtime refuses handlers of another version without a word, so this is found out here.

    Raises:
        UnavailableError: it has refused them.
    """
    spoken = f"the library speaks versions 0.1 to {ours[0]}.{ours[1]} of XLA's interface for custom calls"
    if theirs == (-1, -1):
        raise library.UnavailableError(f"[jax] {spoken}, jaxlib {jaxlib} has not asked for one: it is too old")
    if theirs[0] != ours[0] or theirs < (0, 1):
        age = "old" if theirs < ours else "new"
        raise library.UnavailableError(f"[jax] {spoken}, jaxlib {jaxlib} has {theirs[0]}.{theirs[1]}: it is too {age}")


@functools.cache
def load_kernels() -> None:
    """Loads all kernels on this process's CUDA devices: what is captured in a command buffer cannot load any."""
    for device in jax.local_devices(backend="cuda"):
        library.call("bs_cuda_prepare", device.local_hardware_id)


def lower(
    name: str,
    platform: str,
    numbers: Sequence[int],
    workspace: Callable[[], int],
    context: mlir.LoweringRuleContext,
    *operands: Any,
) -> Any:
    """A custom call of a handler, as lowering rules return it.

    Args:
        name: the handler.
        platform: "cpu" or "cuda".
        numbers: those of the op; where the call runs is put before them.
        workspace: bytes that the call needs on a card, where they become one more result; handlers on the CPU have
            their own.
        context: of the lowering rule.
        operands: of the call.
    """
    register()
    on_card = platform == "cuda"
    avals = list(context.avals_out)
    if on_card:
        load_kernels()
        avals.append(jax.core.ShapedArray((workspace(),), np.dtype(np.uint8)))
    attribute = np.array([int(on_card), *numbers], np.int64)
    results = jax.ffi.ffi_lowering(name)(context.replace(avals_out=avals), *operands, numbers=attribute)
    return results[: len(context.avals_out)]
