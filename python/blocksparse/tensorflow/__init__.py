"""Block-sparse products on TensorFlow's tensors, on the CPU."""

import importlib.util as _util

if _util.find_spec("tensorflow") is None:
    raise ModuleNotFoundError(
        "blocksparse.tensorflow needs TensorFlow: pip install 'blocksparse[tensorflow]'", name="tensorflow"
    )

from .conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .linear import linear
from .lstm import lstm
from .tables import index_of

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "index_of",
    "linear",
    "lstm",
]
