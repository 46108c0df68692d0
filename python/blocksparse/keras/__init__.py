"""Block-sparse layers for Keras 3, on PyTorch, JAX or TensorFlow, whichever Keras runs on."""

import importlib.util as _util

if _util.find_spec("keras") is None:
    raise ModuleNotFoundError("blocksparse.keras needs Keras 3: pip install 'blocksparse[keras]'", name="keras")

from ..schedules import PolynomialDecay
from .conv import BlockSparseConv1D, BlockSparseConv2D, BlockSparseConv3D
from .dense import BlockSparseDense
from .lstm import BlockSparseLSTM
from .pruning import PruneBlocks, prune, strip_pruning

__all__ = [
    "BlockSparseConv1D",
    "BlockSparseConv2D",
    "BlockSparseConv3D",
    "BlockSparseDense",
    "BlockSparseLSTM",
    "PolynomialDecay",
    "PruneBlocks",
    "prune",
    "strip_pruning",
]
