"""Block-sparse layers for PyTorch: functional ops, and modules on top."""

from .conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .conv_modules import (
    BlockSparseConv1d,
    BlockSparseConv2d,
    BlockSparseConv3d,
    BlockSparseConvTranspose1d,
    BlockSparseConvTranspose2d,
    BlockSparseConvTranspose3d,
)
from .convert import from_bsr, from_dense, select_blocks, to_bsr, to_dense
from .deep_update import DeepUpdateLSTM
from .edge_bias import EdgeBias
from .functional import linear, linear_wgrad
from .index import index_of
from .lstm import BlockSparseLSTM, MultiplicativeLSTM
from .modules import BlockSparseLinear
from .recurrent import lstm
from .surgery import replace_convolutions
from .weight_norm import weight_norm

__all__ = [
    "BlockSparseConv1d",
    "BlockSparseConv2d",
    "BlockSparseConv3d",
    "BlockSparseConvTranspose1d",
    "BlockSparseConvTranspose2d",
    "BlockSparseConvTranspose3d",
    "BlockSparseLSTM",
    "BlockSparseLinear",
    "DeepUpdateLSTM",
    "EdgeBias",
    "MultiplicativeLSTM",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "from_bsr",
    "from_dense",
    "index_of",
    "linear",
    "linear_wgrad",
    "lstm",
    "replace_convolutions",
    "select_blocks",
    "to_bsr",
    "to_dense",
    "weight_norm",
]
