"""Making models block-sparse: pruning, learning the structure, one-shot methods, and what they share."""

from .blast import Blast
from .compact import compact_
from .convert import convert
from .distill import Distilled, Distiller
from .l0 import L0
from .lasso import GroupLasso, shrink_
from .magnitude import MagnitudePruner
from .masks import apply_masks, check_masks, choose_blocks, masks_from_bsr, masks_of_zeros, masks_to_bsr
from .oneshot import sparsify_
from .pruner import Pruner
from .report import Report, Row
from .schedules import Constant, PolynomialDecay, Schedule, ThresholdRamp
from .scores import block_norms
from .scores_oneshot import damped, obs_scores, refit, wanda_scores
from .targets import Target, find_targets
from .timing import Seen, Timing, watch

__all__ = [
    "L0",
    "Blast",
    "Constant",
    "Distilled",
    "Distiller",
    "GroupLasso",
    "MagnitudePruner",
    "PolynomialDecay",
    "Pruner",
    "Report",
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
    "convert",
    "damped",
    "find_targets",
    "masks_from_bsr",
    "masks_of_zeros",
    "masks_to_bsr",
    "obs_scores",
    "refit",
    "shrink_",
    "sparsify_",
    "wanda_scores",
    "watch",
]
