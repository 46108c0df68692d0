"""Tables of layouts as TensorFlow's tensors, and where tensors are."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from ..layout import Layout, need_layout
from .ops import follow_threads

_EAGER, _GRAPHS = "tensorflow", "tensorflow graphs"  # keys of Layout.tables
_has_gpu: bool | None = None


def index_of(layout: Layout, op: str = "linear") -> Any:
    """The layout's tables as an int32 tensor: made once for eager execution and its functions, once in each graph."""
    need_layout(op, layout)
    table = layout.tables.get(_EAGER)
    if table is not None and tf.executing_eagerly():
        return table
    with tf.init_scope():  # out of functions that are being traced
        if tf.executing_eagerly():
            if table is None:
                follow_threads()
                with tf.device("CPU:0"):
                    table = layout.tables[_EAGER] = tf.constant(layout.index())
            return table
        # Names of tensors, since tensors would keep their graphs, which are the keys.
        names = layout.tables.setdefault(_GRAPHS, WeakKeyDictionary())
        graph = tf.compat.v1.get_default_graph()
        if graph not in names:
            follow_threads()
            with tf.control_dependencies(None):  # out of loops and branches
                names[graph] = tf.constant(layout.index(), name="layout").name
        return graph.get_tensor_by_name(names[graph])


def as_given(*arrays: Any) -> tuple[Any, ...]:
    """NumPy's arrays as tensors of their own dtype: an op would round them to the dtype of its other inputs."""
    return tuple(tf.constant(array) if isinstance(array, np.ndarray) else array for array in arrays)


def refuse_gpu(op: str, x: Any) -> None:
    """Raises ValueError for an eager tensor in a GPU's memory, or one that a graph puts there.

    TensorFlow's C interface gives kernels no CUDA stream, so there are kernels for CPUs alone; TensorFlow would copy to
    the host and back for each call without a word.
    """
    global _has_gpu
    if _has_gpu is None:
        _has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if _has_gpu and on_gpu(getattr(x, "device", "")):
        raise ValueError(
            f"[{op}] x is on {x.device}, and the op is for CPUs: put it under tf.device('CPU'), or use "
            "blocksparse.torch or blocksparse.jax, which compute on GPUs"
        )


def on_gpu(device: str | None) -> bool:
    """Whether TensorFlow's name of a device, "/job:localhost/.../device:GPU:0", is that of a GPU."""
    return "GPU:" in (device or "").upper()
