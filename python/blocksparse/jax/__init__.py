"""Block-sparse layers for JAX: functions of arrays, and modules for flax (`nnx`, `linen`) and `equinox` on top.

The ops run on the CPU and on CUDA through XLA's C interface for custom calls. Modules are imported by name, as
`from blocksparse.jax import nnx`: each needs its own library.
"""

import importlib.util as _util

if _util.find_spec("jax") is None:
    raise ModuleNotFoundError("blocksparse.jax needs JAX: pip install 'blocksparse[jax]'", name="jax")

import jax as _jax

if not hasattr(_jax, "ffi") or not hasattr(_jax, "typeof"):
    raise ImportError(f"blocksparse.jax needs JAX 0.6 or newer, this is {_jax.__version__}", name="jax")

from ..interleave import interleaved_layout
from . import initializers
from .conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .convert import from_bcsr, from_bsr, from_dense, select_blocks, to_bcsr, to_bsr, to_dense
from .glu import glu, linear_glu
from .interleave import interleave, interleave_rows, separate, separate_rows
from .linear import linear
from .lstm import lstm
from .sharding import split_rows
from .tables import Tables, tables_of

__all__ = [
    "Tables",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "from_bcsr",
    "from_bsr",
    "from_dense",
    "glu",
    "initializers",
    "interleave",
    "interleave_rows",
    "interleaved_layout",
    "linear",
    "linear_glu",
    "lstm",
    "select_blocks",
    "separate",
    "separate_rows",
    "split_rows",
    "tables_of",
    "to_bcsr",
    "to_bsr",
    "to_dense",
]
