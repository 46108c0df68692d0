"""Block-sparse layers for JAX: functions of arrays, and modules for flax and equinox on top."""
from .conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .linear import linear
from .lstm import lstm
from .tables import Tables, tables_of
