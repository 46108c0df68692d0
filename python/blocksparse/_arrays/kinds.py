"""What the 2017 classes do on arrays of each kind: NumPy's, PyTorch's and TensorFlow's.

A kind is found by what is given, and its library is imported by whoever made that.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core.arguments import shown
from ..layout import Layout

_Index = npt.NDArray[np.integer[Any]]


class Kind:
    """NumPy arrays, and what the other kinds share."""

    name = "NumPy arrays"

    def product(self, x: Any, w: Any, layout: Layout, gates: Any, features_first: bool) -> Any:
        """The product x W^T of x [N, in], or of x [in, ...] if features come first."""
        from .. import numpy as ops

        x = np.ascontiguousarray(x)
        if not features_first:
            return ops.linear_fprop(x, w, layout, gates=gates)
        tokens = x.reshape(len(x), -1).T  # the original flattens what follows the features
        return ops.linear_fprop(tokens, w, layout, gates=gates).T.reshape(-1, *x.shape[1:])

    def array(self, x: Any, like: Any = None) -> Any:
        """What was given as an array of this kind."""
        return x

    def take(self, x: Any, index: _Index) -> Any:
        """x[index] along the first axis; of several axes if the index has a last axis of several entries."""
        return x[index]

    def put(self, x: Any, index: _Index, count: int) -> Any:
        """Zeros [count, ...] with x [n, ...] at the places of index [n], all different."""
        out = np.zeros((count, *x.shape[1:]), x.dtype)
        out[index] = x
        return out

    def segment_sum(self, x: Any, index: _Index, count: int) -> Any:
        """[count, ...]: the sums of those x[i] whose index[i] is the same."""
        out = np.zeros((count, *x.shape[1:]), x.dtype)
        np.add.at(out, index, x)
        return out

    def sum(self, x: Any, axis: int) -> Any:
        """Along an axis."""
        return x.sum(axis)

    def at_least(self, x: Any, least: float) -> Any:
        """The larger of each and `least`."""
        return x.clip(least)

    def concatenate(self, parts: list[Any]) -> Any:
        """One after the other."""
        return np.concatenate(parts)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        """The same numbers in another shape."""
        return x.reshape(shape)

    def dtype_name(self, x: Any) -> str:
        """Such as "float32"."""
        return str(x.dtype.name)

    def to(self, x: Any, dtype_name: str) -> Any:
        """Of another dtype."""
        if dtype_name == "bfloat16":
            from ml_dtypes import bfloat16

            return x.astype(bfloat16)
        return x.astype(dtype_name)


class TorchKind(Kind):
    """PyTorch tensors, with gradients."""

    name = "PyTorch tensors"

    def product(self, x: Any, w: Any, layout: Layout, gates: Any, features_first: bool) -> Any:
        """See `Kind`."""
        from ..torch import linear

        if not features_first:
            return linear(x, w, layout, gates=gates)
        return linear(x.reshape(len(x), -1).t(), w, layout, gates=gates).t().reshape(-1, *x.shape[1:])

    def take(self, x: Any, index: _Index) -> Any:
        """See `Kind`."""
        return x[self._index(x, index)]

    def put(self, x: Any, index: _Index, count: int) -> Any:
        """See `Kind`."""
        return self.segment_sum(x, index, count)

    def segment_sum(self, x: Any, index: _Index, count: int) -> Any:
        """See `Kind`."""
        return x.new_zeros((count, *x.shape[1:])).index_add(0, self._index(x, index), x)

    def concatenate(self, parts: list[Any]) -> Any:
        """See `Kind`."""
        import torch

        return torch.cat(parts)

    def dtype_name(self, x: Any) -> str:
        """See `Kind`."""
        return str(x.dtype).removeprefix("torch.")

    def to(self, x: Any, dtype_name: str) -> Any:
        """See `Kind`."""
        import torch

        return x.to(getattr(torch, dtype_name))

    def _index(self, x: Any, index: _Index) -> Any:
        import torch

        return torch.from_numpy(index.astype(np.int64)).to(x.device)


class TensorFlowKind(Kind):
    """TensorFlow tensors, with gradients, and what TensorFlow makes tensors of."""

    name = "TensorFlow tensors"

    def product(self, x: Any, w: Any, layout: Layout, gates: Any, features_first: bool) -> Any:
        """See `Kind`."""
        from ..tensorflow import linear

        return linear(x, w, layout, gates=gates, feature_axis=0 if features_first else -1)

    def array(self, x: Any, like: Any = None) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        return tf.convert_to_tensor(x, None if like is None else like.dtype)

    def take(self, x: Any, index: _Index) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        # Unlike tf.gather's, the gradient of tf.gather_nd is dense where the index has three axes or more.
        return tf.gather_nd(x, index[None, ..., None])[0]

    def put(self, x: Any, index: _Index, count: int) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        shape = tf.concat([[count], tf.shape(x)[1:]], 0)
        out = tf.scatter_nd(index[None, :, None], x[None], shape)
        out.set_shape([count, *x.shape[1:]])
        return out

    def segment_sum(self, x: Any, index: _Index, count: int) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        return tf.math.unsorted_segment_sum(x, index, count)

    def sum(self, x: Any, axis: int) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        return tf.reduce_sum(x, axis)

    def at_least(self, x: Any, least: float) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        return tf.maximum(x, tf.cast(least, x.dtype))

    def concatenate(self, parts: list[Any]) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        return tf.concat(parts, 0)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        return tf.reshape(x, shape)

    def to(self, x: Any, dtype_name: str) -> Any:
        """See `Kind`."""
        import tensorflow as tf

        return tf.cast(x, dtype_name)


NUMPY, TORCH, TENSORFLOW = Kind(), TorchKind(), TensorFlowKind()


def kind_of(op: str, **given: object) -> Kind:
    """The kind of what is given: all of it of one, but NumPy arrays may stand beside TensorFlow's tensors.

    Raises:
        TypeError: something is of another kind.
    """
    values = given.values()
    arrays = [isinstance(value, np.ndarray) for value in values]
    if all(arrays):
        return NUMPY
    if not any(arrays) and all(hasattr(value, "requires_grad") for value in values):
        return TORCH
    is_tensor = getattr(sys.modules.get("tensorflow"), "is_tensor", None)
    if is_tensor is not None:
        tensors = [bool(is_tensor(value)) for value in values]
        if any(tensors) and all(a or t for a, t in zip(arrays, tensors, strict=True)):
            return TENSORFLOW
    kinds = ", ".join(f"{name} is {shown(value)}" for name, value in given.items())
    raise TypeError(f"[{op}] {kinds}, needs NumPy arrays, PyTorch tensors or TensorFlow tensors alone")


def sizes_of(x: Any) -> list[int | None] | None:
    """The shape of x; None for what a graph of TensorFlow does not know yet, for all of it if it knows no rank."""
    if not hasattr(x.shape, "as_list"):
        return list(x.shape)
    return None if x.shape.rank is None else list(x.shape.as_list())


def dtype_name_of(dtype: Any) -> str:
    """The name of a dtype of NumPy, PyTorch or TensorFlow, or of one given by its name."""
    if isinstance(dtype, str):
        return dtype
    if hasattr(dtype, "as_numpy_dtype"):
        return str(dtype.name)
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else np.dtype(dtype).name
