"""Block-sparse layers for PyTorch: functional ops, and modules on top."""

from .convert import from_bsr, from_dense, select_blocks, to_bsr, to_dense
from .deep_update import DeepUpdateLSTM
from .functional import index_of, linear, linear_wgrad
from .lstm import BlockSparseLSTM, MultiplicativeLSTM
from .modules import BlockSparseLinear
from .recurrent import lstm

__all__ = [
    "BlockSparseLSTM",
    "BlockSparseLinear",
    "DeepUpdateLSTM",
    "MultiplicativeLSTM",
    "from_bsr",
    "from_dense",
    "index_of",
    "linear",
    "linear_wgrad",
    "lstm",
    "select_blocks",
    "to_bsr",
    "to_dense",
]
