"""Making models block-sparse: pruning, learning the structure, one-shot methods, and what they share."""

from ...schedules import Constant, PolynomialDecay, Schedule, ThresholdRamp
from .blast import Blast
from .compact import compact_
from .convert import convert
from .densities import erk_densities, uniform_densities
from .distill import Distilled, Distiller
from .exchange import CosineDrop
from .l0 import L0
from .lasso import GroupLasso, shrink_
from .magnitude import MagnitudePruner
from .masks import apply_masks, check_masks, choose_blocks, masks_from_bsr, masks_of_zeros, masks_to_bsr
from .moments import Moments, move_blocks, replace_parameter
from .oneshot import sparsify_
from .pruner import Pruner
from .report import Report, Row
from .rewiring import SET
from .rigl import RigL
from .scores import block_norms
from .scores_grow import conv_grow_scores, grow_bound, grow_scores
from .scores_oneshot import damped, obs_scores, refit, wanda_scores
from .targets import Target, find_targets
from .timing import Seen, Timing, watch

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
    "Moments",
    "PolynomialDecay",
    "Pruner",
    "Report",
    "RigL",
    "Row",
    "Schedule",
    "Seen",
    "Target",
    "ThresholdRamp",
    "Timing",
    "apply_masks",
    "block_norms",
    "check_masks",
    "choose_blocks",
    "compact_",
    "conv_grow_scores",
    "convert",
    "damped",
    "erk_densities",
    "find_targets",
    "grow_bound",
    "grow_scores",
    "masks_from_bsr",
    "masks_of_zeros",
    "masks_to_bsr",
    "move_blocks",
    "obs_scores",
    "refit",
    "replace_parameter",
    "shrink_",
    "sparsify_",
    "uniform_densities",
    "wanda_scores",
    "watch",
]
