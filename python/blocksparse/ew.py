"""The elementwise ops of the 2017 release, which frameworks have had themselves since: each name says where it is."""

from ._core.refused import ways_of

_IN_MATH = "add multiply subtract divide maximum minimum negative reciprocal square sqrt exp log sigmoid tanh"

WAYS = {
    **{name: f"tf.math.{name}, or PyTorch's or JAX's" for name in _IN_MATH.split()},
    "relu": "tf.nn.relu, or activation='relu' of the linear op",
    "elu": "tf.nn.elu",
    "fused_lstm_gates": "blocksparse.tensorflow.lstm, which does all steps in one op",
    "split4": "tf.split(x, 4, axis)",
    "concat4": "tf.concat",
    "float_cast": "tf.cast",
    "dropout": "tf.nn.dropout",
    "add_n8": "tf.add_n",
}
__getattr__ = ways_of(__name__, WAYS)
