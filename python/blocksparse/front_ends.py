"""Which front ends work on this machine: what `python -m blocksparse` says of each."""

from __future__ import annotations

import importlib.util

import numpy as np

from ._core import library
from .layout import Layout

Rows = list[tuple[str, str]]


def _torch() -> Rows:
    import torch

    from .torch.ops import conv, linear, lstm

    rows: Rows = [("PyTorch", str(torch.__version__))]
    for name, ops_of in (("PyTorch kernels", linear), ("of convolutions", conv), ("of LSTMs", lstm)):
        kernels: str = ops_of.KERNELS
        rows.append((name, f"{kernels}; on CUDA {ops_of.CUDA_KERNELS}" if torch.version.cuda else kernels))
    return rows


def _jax() -> Rows:
    """By a small product: a runtime that refuses handlers does so without a word."""
    import jax

    from . import jax as bsj

    layout = Layout.from_graph("dense(1)", 8)
    y = bsj.linear(np.ones((1, 8), np.float32), np.ones((1, 8, 8), np.float32), layout)
    if not bool((y == 8).all()):
        raise RuntimeError(f"a product of ones is {float(y[0, 0])}, needs 8")
    ours, theirs = (".".join(map(str, version)) for version in library.xla_versions())
    interface = f"XLA's interface {theirs}, known up to {ours}"
    return [("JAX", jax.__version__), ("JAX kernels", f"on {jax.default_backend()}; {interface}")]


def _tensorflow() -> Rows:
    """By a small product."""
    import tensorflow as tf

    from .tensorflow import linear

    y = linear(tf.ones([1, 8]), tf.ones([1, 8, 8]), Layout.from_graph("dense(1)", 8))
    if not bool(tf.reduce_all(y == 8)):
        raise RuntimeError(f"a product of ones is {y.numpy()[0, 0]}, needs 8")
    return [("TensorFlow", f"{tf.__version__}, with C++ kernels for the CPU")]


def _keras() -> Rows:
    """By a small layer, on the backend that Keras has chosen."""
    import keras

    from .keras import BlockSparseDense

    layer = BlockSparseDense(8, block_size=8, density=1, kernel_initializer="ones")
    total = float(keras.ops.sum(layer(keras.ops.ones((1, 8)))))
    if total != 64:
        raise RuntimeError(f"a product of ones adds up to {total}, needs 64")
    return [("Keras", f"{keras.__version__} on {keras.backend.backend()}")]


def _cupy() -> Rows:
    import cupy

    from . import cupy as _  # noqa: F401  fails where it cannot be used

    return [("CuPy", cupy.__version__)]


_FRONT_ENDS = (
    ("PyTorch", "torch", _torch),
    ("JAX", "jax", _jax),
    ("CuPy", "cupy", _cupy),
    ("TensorFlow", "tensorflow", _tensorflow),
    ("Keras", "keras", _keras),
)


def front_ends() -> Rows:
    """(name, what it is or why it does not work) of each."""
    rows: Rows = []
    for name, module, ask in _FRONT_ENDS:
        if importlib.util.find_spec(module) is None:
            rows.append((name, "not installed"))
            continue
        try:
            rows += ask()
        except Exception as error:  # of whatever kind: this is where it is said
            rows.append((name, f"does not work: {str(error).splitlines()[0] if str(error) else type(error).__name__}"))
    return rows
