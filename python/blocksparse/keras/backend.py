"""The products of the backend that Keras runs on: PyTorch, JAX or TensorFlow.

Each takes images with channels last, sequences with steps first, and answers a tensor of the backend.
"""

from __future__ import annotations

from typing import Any

import keras

from ..layout import Layout

BACKEND: str = keras.backend.backend()
JITS = BACKEND != "tensorflow"  # whether keras may compile with XLA: TensorFlow's C interface gives XLA no kernel


def linear(x: Any, values: Any, layout: Layout, bias: Any, gates: Any) -> Any:
    """x W^T + bias."""
    if BACKEND == "torch":
        from ..torch import linear as product
    elif BACKEND == "jax":
        from ..jax import linear as product
    else:
        from ..tensorflow import linear as product
    return product(x, values, layout, bias, gates=gates)


def conv(x: Any, values: Any, layout: Layout, geometry: tuple[int, ...], bias: Any, gates: Any) -> Any:
    """The convolution of x [n, size..., channels] by the geometry of `_core.geometry`."""
    if BACKEND == "torch":
        return _torch_conv(x, values, layout, geometry, bias, gates)
    if BACKEND == "jax":
        from ..jax.conv import apply_conv
    else:
        from ..tensorflow.conv import apply_conv
    return apply_conv(x, values, layout, geometry, bias, gates=gates)


def _torch_conv(x: Any, values: Any, layout: Layout, geometry: tuple[int, ...], bias: Any, gates: Any) -> Any:
    from ..torch.functional.conv import apply_conv
    from ..torch.tables import index_of

    index, last = index_of(layout, x.device), x.dim() - 1
    channels_first = x.permute(0, last, *range(1, last))  # a view, which is taken as it is
    y = apply_conv(channels_first, values, index, geometry, layout.sizes, layout.transposed, bias=bias, gates=gates)
    return y.permute(0, *range(2, last + 1), 1)


def lstm(pre: Any, values: Any, layout: Layout, state: Any, lengths: Any) -> tuple[Any, tuple[Any, Any]]:
    """Y [steps, n, hidden] and (h, c) of pre [steps, n, 4 hidden]."""
    if BACKEND == "torch":
        from ..torch import lstm as run
    elif BACKEND == "jax":
        from ..jax import lstm as run
    else:
        from ..tensorflow import lstm as run
    made: tuple[Any, tuple[Any, Any]] = run(pre, values, layout, state, lengths)
    return made
