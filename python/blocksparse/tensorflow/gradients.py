"""The gradients of the ops, which TensorFlow looks up by their names.

The three passes of a product are linear in each of their tensors, so the gradients of one are the other two, and there
are gradients of any order. The gradient of x is the product on the layout's transpose. The LSTM's gradient is one op,
and further ones are those of a loop.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._core.geometry import rank_of
from . import ops
from .lstm_steps import gradient_of_gradient

Tensors = list[Any]


def _skipped(op: Any) -> tuple[int, ...]:
    """Inputs whose gradients nobody asks for; graphs leave them out by themselves."""
    return getattr(op, "skip_input_indices", None) or ()


def _parts(op: Any, start: int, *counts: str) -> list[Tensors]:
    """The lists among the inputs, from `start` on."""
    lists = []
    for count in counts:
        end = start + op.get_attr(count)
        lists.append(list(op.inputs[start:end]))
        start = end
    return lists


def _sum_type(x: Any) -> Any:
    return tf.float64 if x.dtype == tf.float64 else tf.float32


def like(y: Any, x: Any) -> Any:
    """Y, of which a graph is told that its shape is that of x."""
    if not tf.executing_eagerly():
        y.set_shape(x.shape)
    return y


def _per_block(gates: Any, values: Any, rank: int) -> Any:
    """Gates times values, [blocks, ...] of that rank, of the dtype of values and rounded once."""
    return tf.cast(tf.reshape(gates, [-1] + [1] * (rank - 1)) * tf.cast(values, gates.dtype), values.dtype)


def _played(ddw: Any, ddgates: Any, values: Any, gates: Tensors, gate_gradient: bool, rank: int) -> Any:
    """V with <ddw, gates * S> + <ddgates, <S, W>> = <S, V>: it plays the part of a weight."""
    v = _per_block(gates[0], ddw, rank) if gates else ddw
    return v + _per_block(ddgates, values, rank) if gate_gradient else v


def _bias_gradients(bias: Tensors, dy: Any, axis: int, rank: int) -> Tensors:
    """The sums of dy [..., features at axis, ...], in float32 at least; none where there is no bias.

    Shapes are not asked for: a graph that was read from a file does not know them.
    """
    wide = tf.cast(dy, _sum_type(dy))
    axes = [i for i in range(rank) if i != axis % rank]
    return [like(tf.cast(tf.reduce_sum(wide, axes), dy.dtype), one) for one in bias]


# ---- Linear --------------------------------------------------------------------------------------------------------


@tf.RegisterGradient("BlocksparseLinear")
def _linear(op: Any, dy: Any) -> Tensors:
    x, values, index = op.inputs[:3]
    gates, bias = _parts(op, 3, "gate_count", "bias_count")
    skipped, first = _skipped(op), op.get_attr("features_first")
    how = {"transposed": op.get_attr("transposed"), "features_first": first}
    dx, dw = None, None
    dgates: Tensors = [None] * len(gates)
    if 0 not in skipped:
        back = {**how, "transposed": not how["transposed"]}
        dx = like(ops.linear(x=dy, values=values, index=index, gates=gates, bias=[], **back), x)
    if 1 not in skipped or (gates and 3 not in skipped):
        more = {"gates": gates, "gate_gradient": bool(gates), "sum_type": _sum_type(x)}
        dw, of_gates = ops.linear_weight_gradient(x=x, dy=dy, index=index, values=values, **more, **how)
        dw, dgates = like(dw, values), [like(of_gates, gate) for gate in gates]
    flat = [tf.reshape(dy, [tf.size(one), -1] if first else [-1, tf.size(one)]) for one in bias]
    dbias = _bias_gradients(bias, flat[0], 0 if first else 1, 2) if bias else []
    return [dx, dw, None, *dgates, *dbias]


@tf.RegisterGradient("BlocksparseLinearWeightGradient")
def _linear_weight_gradient(op: Any, ddw: Any, ddgates: Any) -> Tensors:
    x, dy, index, values = op.inputs[:4]
    (gates,) = _parts(op, 4, "gate_count")
    gate_gradient = op.get_attr("gate_gradient")
    how = {"transposed": op.get_attr("transposed"), "features_first": op.get_attr("features_first")}
    v = _played(ddw, ddgates, values, gates, gate_gradient, 3)
    back = {**how, "transposed": not how["transposed"]}
    dx = like(ops.linear(x=dy, values=v, index=index, gates=[], bias=[], **back), x)
    ddy = like(ops.linear(x=x, values=v, index=index, gates=[], bias=[], **how), dy)
    dvalues, dgates = None, []
    if gates or gate_gradient:
        more = {"gates": [], "gate_gradient": True, "sum_type": _sum_type(x)}
        s, inner = ops.linear_weight_gradient(x=x, dy=dy, index=index, values=ddw, **more, **how)
        dvalues = like(_per_block(ddgates, s, 3), values) if gate_gradient else None
        dgates = [like(inner, gate) for gate in gates]
    return [dx, ddy, None, dvalues, *dgates]


# ---- Convolutions --------------------------------------------------------------------------------------------------


def _conv_attributes(op: Any) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in ("geometry", "transposed", "channels_last")}


def _size_of(x: Any, channels_last: bool) -> Any:
    """The sizes of images, as they are when the graph runs."""
    shape = tf.shape(x, out_type=tf.int64)
    return shape[1:-1] if channels_last else shape[2:]


@tf.RegisterGradient("BlocksparseConv")
def _conv(op: Any, dy: Any) -> Tensors:
    x, values, index = op.inputs[:3]
    gates, bias, order = _parts(op, 3, "gate_count", "bias_count", "order_count")
    skipped, how = _skipped(op), _conv_attributes(op)
    last = how["channels_last"]
    dx, dw = None, None
    dgates: Tensors = [None] * len(gates)
    shared = {"index": index, "values": values, "gates": gates, "channel_order": order, **how}
    if 0 not in skipped:
        dx = like(ops.conv_input_gradient(dy=dy, size=_size_of(x, last), **shared), x)
    if 1 not in skipped or (gates and 3 not in skipped):
        more = {"gate_gradient": bool(gates), "sum_type": _sum_type(x)}
        dw, of_gates = ops.conv_weight_gradient(x=x, dy=dy, **shared, **more)
        dw, dgates = like(dw, values), [like(of_gates, gate) for gate in gates]
    dbias = _bias_gradients(bias, dy, -1 if last else 1, rank_of(how["geometry"]) + 2)
    return [dx, dw, None, *dgates, *dbias, *[None] * len(order)]


@tf.RegisterGradient("BlocksparseConvInputGradient")
def _conv_input_gradient(op: Any, ddx: Any) -> Tensors:
    dy, values, index, _ = op.inputs[:4]
    gates, order = _parts(op, 4, "gate_count", "order_count")
    how = _conv_attributes(op)
    shared = {"index": index, "values": values, "gates": gates, "channel_order": order, **how}
    ddy = like(ops.conv(x=ddx, bias=[], **shared), dy)
    more = {"gate_gradient": bool(gates), "sum_type": _sum_type(dy)}
    dw, of_gates = ops.conv_weight_gradient(x=ddx, dy=dy, **shared, **more)
    dgates = [like(of_gates, gate) for gate in gates]
    return [ddy, like(dw, values), None, None, *dgates, *[None] * len(order)]


@tf.RegisterGradient("BlocksparseConvWeightGradient")
def _conv_weight_gradient(op: Any, ddw: Any, ddgates: Any) -> Tensors:
    x, dy, index, values = op.inputs[:4]
    gates, order = _parts(op, 4, "gate_count", "order_count")
    gate_gradient, how = op.get_attr("gate_gradient"), _conv_attributes(op)
    v = _played(ddw, ddgates, values, gates, gate_gradient, 4)
    shared = {"index": index, "gates": [], "channel_order": order, **how}
    dx = like(ops.conv_input_gradient(dy=dy, values=v, size=_size_of(x, how["channels_last"]), **shared), x)
    ddy = like(ops.conv(x=x, values=v, bias=[], **shared), dy)
    dvalues, dgates = None, []
    if gates or gate_gradient:
        more = {"gate_gradient": True, "sum_type": _sum_type(x)}
        s, inner = ops.conv_weight_gradient(x=x, dy=dy, values=ddw, **shared, **more)
        dvalues = like(_per_block(ddgates, s, 4), values) if gate_gradient else None
        dgates = [like(inner, gate) for gate in gates]
    return [dx, ddy, None, dvalues, *dgates, *[None] * len(order)]


# ---- The LSTM ------------------------------------------------------------------------------------------------------


@tf.RegisterGradient("BlocksparseLstm")
def _lstm(op: Any, dy: Any, dh: Any, dc: Any, _dgates: Any, _dcells: Any) -> Tensors:
    pre, values, index, h0, c0, *lengths = op.inputs
    y, _, _, gates, cells = op.outputs
    of_outputs, state = {"dy": dy, "dh": dh, "dc": dc}, {"h0": h0, "c0": c0, "lengths": lengths}
    saved = {"pre": pre, "values": values, "index": index, "y": y, "gates": gates, "cells": cells}
    made = ops.lstm_gradient(**saved, **of_outputs, **state)
    dpre, dw, dh0, dc0 = (like(gradient, given) for gradient, given in zip(made, (pre, values, h0, c0), strict=True))
    return [dpre, dw, None, dh0, dc0, *[None] * len(lengths)]


@tf.RegisterGradient("BlocksparseLstmGradient")
def _lstm_gradient(op: Any, *given: Any) -> Tensors:
    """What was saved counts as constant: what it depends on, pre, the weights and the state, are inputs as well."""
    pre, values, index, _, _, _, dy, dh, dc, h0, c0, *lengths = op.inputs
    made = gradient_of_gradient(pre, values, index, [h0, c0], lengths, [dy, dh, dc], list(given))
    inputs = (pre, values, h0, c0, dy, dh, dc)
    dpre, dw, dh0, dc0, *of_outputs = (like(gradient, one) for gradient, one in zip(made, inputs, strict=True))
    return [dpre, dw, None, None, None, None, *of_outputs, dh0, dc0, *[None] * len(lengths)]
