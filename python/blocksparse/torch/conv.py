"""Convolutions as functions, and the geometry that they take."""

from .._core.geometry import Padding, Sizes, check_geometry, make_geometry, per_size
from .functional.conv import as_order, conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d

__all__ = [
    "Padding",
    "Sizes",
    "as_order",
    "check_geometry",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "make_geometry",
    "per_size",
]
