"""The LSTM with a block-sparse recurrent weight on TensorFlow's tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._core.arguments import shown
from ..layout import Layout
from . import gradients as gradients  # registers them
from . import ops
from .tables import as_given, index_of, refuse_gpu


@tf.autograph.experimental.do_not_convert
def lstm(pre: Any, values: Any, layout: Layout, state: Any = None, lengths: Any = None) -> tuple[Any, tuple[Any, Any]]:
    """A sequence through an LSTM: z = pre[t] + W h, c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c).

    The gates' rows of W [4 hidden, hidden] are in the order i, f, g, o. A CPU op; what its backward pass needs, the
    gates and cells of all steps, is made by every call. Differentiable any number of times: the backward pass is one
    op, and what differentiates that is a loop over steps.

    Args:
        pre: [steps, n, 4 * hidden] or [steps, n, 4, hidden]: the input's projection and all biases.
        values: [layout.blocks, b, b], of the dtype of pre.
        layout: of W [4 hidden, hidden]: `layout.stack(4)` if the gates share one. hidden is a multiple of b.
        state: (h, c) before the first step, [n, hidden] each; zeros by default. c is float32 (float64 for float64),
            whatever the dtype of pre.
        lengths: [n], steps of each sequence; afterwards its state stays and its y is 0. All steps by default.

    Returns:
        y [steps, n, hidden], and the state (h, c) after each sequence's last step.

    Raises:
        ValueError: the layout is not [4 hidden, hidden]; in a graph, a shape is known to be wrong; pre is on a GPU.
        tf.errors.InvalidArgumentError: a shape is wrong.
        TypeError: the layout is none, or dtypes differ.
    """
    index = index_of(layout, "lstm")
    refuse_gpu("lstm", pre)
    rows, hidden = layout.sizes
    if rows != 4 * hidden or layout.transposed:
        raise ValueError(f"[lstm] layout is {rows} x {hidden}, needs 4 hidden x hidden, not transposed")
    pre, (values,) = tf.convert_to_tensor(pre), as_given(values)
    shape = tf.shape(pre)
    if pre.shape.rank not in (3, 4) or pre.shape[2:].as_list() not in ([rows], [4, hidden], [None], [4, None]):
        raise ValueError(f"[lstm] pre is {pre.shape}, needs [steps, n, 4, {hidden}]")
    steps, n = pre.shape.as_list()[:2]
    if pre.shape.rank == 3:
        pre = tf.reshape(pre, [shape[0], shape[1], 4, hidden])
    wide = tf.float64 if pre.dtype == tf.float64 else tf.float32
    if state is None:
        h, c = tf.zeros([shape[1], hidden], pre.dtype), tf.zeros([shape[1], hidden], wide)
    else:
        if not isinstance(state, tuple | list) or len(state) != 2:
            raise TypeError(f"[lstm] state is {shown(state)}, needs (h, c)")
        h, c = state
        h, c = tf.cast(h, pre.dtype), tf.cast(c, wide)
    counts = [] if lengths is None else [_counts(lengths)]
    y, h, c, _, _ = ops.lstm(pre=pre, values=values, index=index, h0=h, c0=c, lengths=counts)
    if not tf.executing_eagerly():
        refuse_gpu("lstm", y)
        y.set_shape([steps, n, hidden])
        h.set_shape([n, hidden])
        c.set_shape([n, hidden])
    return y, (h, c)


def _counts(lengths: Any) -> Any:
    """The lengths as the op takes them.

    Raises:
        TypeError: they are no integers.
    """
    lengths = tf.convert_to_tensor(lengths)
    if not lengths.dtype.is_integer:
        raise TypeError(f"[lstm] lengths are {lengths.dtype.name}, needs integers")
    return tf.cast(lengths, tf.int64)
