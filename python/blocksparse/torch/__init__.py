"""Block-sparse layers for PyTorch: functional ops, and modules on top."""

import importlib.util as _util

if _util.find_spec("torch") is None:
    raise ModuleNotFoundError("blocksparse.torch needs PyTorch: pip install 'blocksparse[torch]'", name="torch")

from ..interleave import interleaved_layout

# Modules that nothing else here imports are attributes all the same: `norm`, and old addresses for one release.
from . import conv_modules as conv_modules
from . import deep_update_op as deep_update_op
from . import deep_update_steps as deep_update_steps
from . import index as index
from . import layer as layer
from . import multiplicative_op as multiplicative_op
from . import norm as norm
from . import sequence_op as sequence_op
from .conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .convert import from_bsr, select_blocks, to_bsr, to_dense
from .deep_update import DeepUpdateLSTM
from .edge_bias import EdgeBias
from .functional import glu, linear, linear_glu, linear_wgrad
from .interleave import interleave, interleave_rows, separate, separate_rows
from .lstm import BlockSparseLSTM, MultiplicativeLSTM
from .mlp_parts import MLPParts, dense_mlp, mlp_parts
from .mlp_surgery import find_mlps, put_mlp, replace_mlps
from .modules import (
    BlockSparseConv1d,
    BlockSparseConv2d,
    BlockSparseConv3d,
    BlockSparseConvTranspose1d,
    BlockSparseConvTranspose2d,
    BlockSparseConvTranspose3d,
    BlockSparseGLU,
    BlockSparseLinear,
    BlockSparseMLP,
)
from .ops import flops as _flops  # noqa: F401  registers what ops cost
from .pretrained import load_pretrained, save_pretrained
from .recurrent import lstm  # the function, in the place of the module that is imported above
from .surgery import from_dense, replace_convolutions, replace_linears
from .tables import index_of
from .weight_norm import weight_norm

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
    "EdgeBias",
    "MLPParts",
    "MultiplicativeLSTM",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "dense_mlp",
    "find_mlps",
    "from_bsr",
    "from_dense",
    "glu",
    "index_of",
    "interleave",
    "interleave_rows",
    "interleaved_layout",
    "linear",
    "linear_glu",
    "linear_wgrad",
    "load_pretrained",
    "lstm",
    "mlp_parts",
    "put_mlp",
    "replace_convolutions",
    "replace_linears",
    "replace_mlps",
    "save_pretrained",
    "select_blocks",
    "separate",
    "separate_rows",
    "to_bsr",
    "to_dense",
    "weight_norm",
]
