"""TensorFlow's ops of this package, made while TensorFlow opens the library that registers them.

    linear(x, values, index, gates, bias) -> y                    y = x (gates * W)^T + bias
    linear_weight_gradient(x, dy, index, values, gates) -> dw, dgates
    conv, conv_input_gradient, conv_weight_gradient               the same of images
    lstm(pre, values, index, h0, c0, lengths) -> y, h, c, gates, cells
    lstm_gradient(...) -> dpre, dw, dh0, dc0

`index` is `Layout.index()` as a tensor; `gates`, `bias`, `channel_order` and `lengths` are lists of none or one tensor.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import tensorflow as tf

from .._core import library

OLDEST = "2.16"  # the first of which the wheels go with Keras 3


def plugin_path() -> Path:
    """The library of the ops, beside the core."""
    return library.library_path().with_name("libblocksparse_tensorflow.so")


def _load() -> tuple[Any, ctypes.CDLL]:
    path = plugin_path()
    if not path.exists():
        raise ImportError(f"{path} is missing: install the package (pip install .), or build its target with the core")
    made = tf.load_op_library(str(path))
    opened = ctypes.CDLL(str(path))
    opened.bs_tensorflow_failure.restype = ctypes.c_char_p
    if failure := opened.bs_tensorflow_failure().decode():
        raise ImportError(
            f"TensorFlow {tf.__version__} lacks what the ops need ({failure}): needs the C interface for kernels of "
            f"TensorFlow {OLDEST} or newer"
        )
    return made, opened


_made, _plugin = _load()

linear = _made.blocksparse_linear
linear_weight_gradient = _made.blocksparse_linear_weight_gradient
conv = _made.blocksparse_conv
conv_input_gradient = _made.blocksparse_conv_input_gradient
conv_weight_gradient = _made.blocksparse_conv_weight_gradient
lstm = _made.blocksparse_lstm
lstm_gradient = _made.blocksparse_lstm_gradient


def follow_threads() -> None:
    """Ops take as many threads as TensorFlow's own may; the core's default where nothing was set."""
    _plugin.bs_tensorflow_set_threads(tf.config.threading.get_intra_op_parallelism_threads())
