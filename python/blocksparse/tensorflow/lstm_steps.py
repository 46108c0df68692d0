"""The LSTM step by step in TensorFlow's operations: what derivatives of its gradient are made of.

The op and its gradient are one kernel each. Whoever differentiates the gradient gets that of the loop below, which
has derivatives of any order, and is a function of what the op was given: nothing that the op saved is in it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import ops

Tensors = list[Any]


def _steps(pre: Any, values: Any, index: Any, h0: Any, c0: Any, lengths: Tensors) -> Tensors:
    """Y, h and c; gates in the order i, f, g, o, sums in the type of c."""
    wide, steps, hidden = c0.dtype, tf.shape(pre)[0], tf.shape(h0)[-1]

    def step(t: Any, h: Any, c: Any, made: Any) -> Tensors:
        product = ops.linear(x=h, values=values, index=index, gates=[], bias=[])
        z = tf.cast(pre[t], wide) + tf.cast(tf.reshape(product, [-1, 4, hidden]), wide)
        i, f, o = (tf.sigmoid(z[:, gate]) for gate in (0, 1, 3))
        c_next = f * c + i * tf.tanh(z[:, 2])
        h_next = tf.cast(o * tf.tanh(c_next), h.dtype)
        y = h_next
        if lengths:
            runs = (tf.cast(t, tf.int64) < lengths[0])[:, None]
            y = tf.where(runs, h_next, tf.zeros_like(h))
            h_next, c_next = tf.where(runs, h_next, h), tf.where(runs, c_next, c)
        return [t + 1, h_next, c_next, made.write(t + 1, y)]

    # One element more than steps: lists of none cannot be stacked.
    made = tf.TensorArray(h0.dtype, size=steps + 1, element_shape=h0.shape).write(0, h0)
    _, h, c, made = tf.while_loop(lambda t, *_: t < steps, step, [tf.constant(0), h0, c0, made])
    return [made.stack()[1:], h, c]


@tf.function(autograph=False, reduce_retracing=True)
def gradient_of_gradient(
    pre: Any, values: Any, index: Any, state: Tensors, lengths: Tensors, of_outputs: Tensors, given: Tensors
) -> Tensors:
    """The gradients of pre, values, h0, c0, dy, dh and dc, where `given` are those of dpre, dw, dh0 and dc0.

    Args:
        pre: [steps, n, 4, hidden].
        values: [blocks, b, b].
        index: the layout's tables.
        state: h0 and c0.
        lengths: none, or one tensor.
        of_outputs: dy, dh and dc.
        given: see above.
    """
    inputs = [pre, values, *state]
    with tf.GradientTape() as outer:
        outer.watch(inputs + of_outputs)
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            made = _steps(pre, values, index, state[0], state[1], lengths)
        first = inner.gradient(made, inputs, of_outputs, unconnected_gradients="zero")
    second: Tensors = outer.gradient(first, inputs + of_outputs, given, unconnected_gradients="zero")
    return second
