"""Functions on tensors and layouts, with gradients."""

from ..ops.calls import usable
from .conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .glu import glu, linear_glu
from .linear import apply_linear, linear, linear_wgrad
from .lstm import lstm
from .norm import layer_norm
from .shared_weight import SharedWeight

__all__ = [
    "SharedWeight",
    "apply_linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "glu",
    "layer_norm",
    "linear",
    "linear_glu",
    "linear_wgrad",
    "lstm",
    "usable",
]
