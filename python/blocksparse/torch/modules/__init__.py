"""Layers and networks with block-sparse weights."""

from .conv import (
    BlockSparseConv1d,
    BlockSparseConv2d,
    BlockSparseConv3d,
    BlockSparseConvTranspose1d,
    BlockSparseConvTranspose2d,
    BlockSparseConvTranspose3d,
)
from .deep_update import DeepUpdateLSTM
from .glu import BlockSparseGLU
from .linear import BlockSparseLinear
from .lstm import BlockSparseLSTM, MultiplicativeLSTM
from .mlp import BlockSparseMLP

__all__ = [
    "BlockSparseConv1d",
    "BlockSparseConv2d",
    "BlockSparseConv3d",
    "BlockSparseConvTranspose1d",
    "BlockSparseConvTranspose2d",
    "BlockSparseConvTranspose3d",
    "BlockSparseGLU",
    "BlockSparseLSTM",
    "BlockSparseLinear",
    "BlockSparseMLP",
    "DeepUpdateLSTM",
    "MultiplicativeLSTM",
]
