"""Block-sparse layers for PyTorch: functional ops, and modules on top."""

from .convert import from_bsr, from_dense, select_blocks, to_bsr, to_dense
from .functional import index_of, linear, linear_wgrad
from .modules import BlockSparseLinear

__all__ = [
    "BlockSparseLinear",
    "from_bsr",
    "from_dense",
    "index_of",
    "linear",
    "linear_wgrad",
    "select_blocks",
    "to_bsr",
    "to_dense",
]
