"""Making models block-sparse: while they are trained, at once, or with blocks that change their places.

- `dense_to_sparse`: `MagnitudePruner`, `GroupLasso`, `L0`, `Blast`; dense training that ends with few blocks
- `sparse_to_sparse`: `SET`, `RigL`; few blocks from the beginning, which change their places
- `one_shot`: `sparsify_`; no training
- `conversion`: `convert`, `compact_`; block-sparse layers in the places of pruned ones
- `weights`: which weights, masks of their blocks, norms, densities
- `optimizer`: moments of blocks that come and go
- `distill`: a sparse student learns what its dense teacher answers
- `trainer`, `lightning`: a `SparsifyCallback` each, for transformers' Trainer and for Lightning
- `report`, `batches`, `distributed`: tables, feeding models, several processes

`weights` and `optimizer` use no other folder, `conversion` and `one_shot` those two, the methods of training all but
`one_shot` and each other.
"""

from ...schedules import Constant, PolynomialDecay, Schedule, ThresholdRamp
from .conversion.compact import compact_
from .conversion.convert import convert
from .conversion.timing import Timing, watch
from .dense_to_sparse.blast import Blast
from .dense_to_sparse.l0 import L0
from .dense_to_sparse.lasso import GroupLasso
from .dense_to_sparse.magnitude import MagnitudePruner
from .dense_to_sparse.pruner import Pruner
from .distill import Distilled, Distiller
from .one_shot.sparsify import sparsify_
from .report import Report
from .sparse_to_sparse.exchange import CosineDrop
from .sparse_to_sparse.rigl import RigL
from .sparse_to_sparse.set import SET
from .weights.densities import erk_densities, uniform_densities
from .weights.masks import apply_masks, choose_blocks, masks_from_bsr, masks_of_zeros, masks_to_bsr
from .weights.norms import block_norms
from .weights.targets import Target, find_targets

__all__ = [
    "L0",
    "SET",
    "Blast",
    "Constant",
    "CosineDrop",
    "Distilled",
    "Distiller",
    "GroupLasso",
    "MagnitudePruner",
    "PolynomialDecay",
    "Pruner",
    "Report",
    "RigL",
    "Schedule",
    "Target",
    "ThresholdRamp",
    "Timing",
    "apply_masks",
    "block_norms",
    "choose_blocks",
    "compact_",
    "convert",
    "erk_densities",
    "find_targets",
    "masks_from_bsr",
    "masks_of_zeros",
    "masks_to_bsr",
    "sparsify_",
    "uniform_densities",
    "watch",
]
