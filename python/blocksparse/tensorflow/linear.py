"""The linear op on TensorFlow's tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._core.arguments import shown
from ..layout import Layout
from . import gradients as gradients  # registers them
from . import ops
from .tables import as_given, index_of, refuse_gpu

ACTIVATE = {
    "none": tf.identity,
    "relu": tf.nn.relu,
    "gelu": lambda x: tf.nn.gelu(x, approximate=False),
    "silu": tf.nn.silu,
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True),
}


@tf.autograph.experimental.do_not_convert
def linear(
    x: Any,
    values: Any,
    layout: Layout,
    bias: Any = None,
    *,
    gates: Any = None,
    residual: Any = None,
    activation: str | None = "none",
    feature_axis: int = -1,
) -> Any:
    """activation(x W^T + bias + residual), where W has the blocks `values` at the places that `layout` names.

    A CPU op: eager, in `tf.function`, in graphs and sessions of `tf.compat.v1`, in saved models (load them after
    `import blocksparse.tensorflow`). Differentiable any number of times. x, values and the result are read and written
    where TensorFlow has them.

    Args:
        x: [..., layout.in_features], with feature_axis=0 [layout.in_features, ...]; float32, float64, bfloat16 or
            float16.
        values: [layout.blocks, b, b], of the dtype of x.
        layout: which blocks of W there are.
        bias: [layout.out_features].
        gates: [layout.blocks], float32 (float64 for float64): block i counts gates[i] times, 0 skips it.
        residual: like the result.
        activation: "none" (or None), "relu", "gelu" (the exact one), "gelu_tanh" or "silu".
        feature_axis: -1: the last axis of x and of the result counts features; 0: the first one does.

    Returns:
        [..., layout.out_features], or [layout.out_features, ...], of the dtype of x.

    Raises:
        ValueError: in a graph, a shape is known to be wrong; x is on a GPU.
        tf.errors.InvalidArgumentError: a shape is wrong.
        TypeError: the layout is none, or dtypes differ.
    """
    activate = activation_of("linear", activation)
    if feature_axis not in (0, -1):
        raise ValueError(f"[linear] feature_axis is {feature_axis!r}, needs -1 (the last) or 0 (the first)")
    features_first = feature_axis == 0
    index = index_of(layout)
    refuse_gpu("linear", x)
    x, values, bias = as_given(x, values, bias)
    if not tf.executing_eagerly():
        x = tf.convert_to_tensor(x)
        _check_width(x, layout, features_first)
    y = ops.linear(
        x=x,
        values=values,
        index=index,
        gates=[] if gates is None else [tf.convert_to_tensor(gates)],
        bias=[] if bias is None else [bias],
        transposed=layout.transposed,
        features_first=features_first,
    )
    if not tf.executing_eagerly():
        refuse_gpu("linear", y)
        rest = x.shape[1:] if features_first else x.shape[:-1]
        y.set_shape([layout.out_features, *rest] if features_first else [*rest, layout.out_features])
    return finish("linear", y, residual, activate)


def finish(op: str, y: Any, residual: Any, activate: Any) -> Any:
    """activate(y + residual), where each may be None.

    Raises:
        ValueError: the residual is not like y.
        tf.errors.InvalidArgumentError: so it turns out when a graph runs that knew no shapes.
    """
    if residual is not None:
        residual = tf.convert_to_tensor(residual)
        if residual.dtype != y.dtype or not residual.shape.is_compatible_with(y.shape):
            raise ValueError(
                f"[{op}] residual is {residual.dtype.name} {residual.shape}, needs {y.dtype.name} {y.shape}"
            )
        y = tf.add_n([y, residual])  # which does not broadcast
    return y if activate is None else activate(y)


def activation_of(op: str, activation: str | None) -> Any:
    """The function of that name; None where there is nothing to do.

    Raises:
        ValueError: there is none of that name.
    """
    if activation is None or activation == "none":
        return None
    if not isinstance(activation, str) or activation not in ACTIVATE:
        raise ValueError(f"[{op}] activation is {shown(activation)}, needs one of {', '.join(ACTIVATE)}")
    return ACTIVATE[activation]


def _check_width(x: Any, layout: Layout, features_first: bool) -> None:
    """Raises ValueError for what a graph already knows to be wrong with x, and for an unknown rank."""
    if x.shape.rank is None:
        raise ValueError(
            "[linear] the rank of x is not known, so the shape of the result is not: tf.ensure_shape helps"
        )
    needed = f"[{layout.in_features}, ...]" if features_first else f"[..., {layout.in_features}]"
    sizes = x.shape.as_list()
    if not sizes or sizes[0 if features_first else -1] not in (None, layout.in_features):
        raise ValueError(f"[linear] x is {sizes}, layout needs {needed}")
