"""Making models block-sparse: pruning, learning the structure, one-shot methods, and what they share."""

from .blast import Blast
from .l0 import L0
from .lasso import GroupLasso, shrink_
from .magnitude import MagnitudePruner
from .masks import apply_masks, check_masks, choose_blocks, masks_from_bsr, masks_of_zeros, masks_to_bsr
from .pruner import Pruner
from .report import Report, Row
from .schedules import Constant, PolynomialDecay, Schedule, ThresholdRamp
from .scores import block_norms
from .targets import Target, find_targets

__all__ = [
    "L0",
    "Blast",
    "Constant",
    "GroupLasso",
    "MagnitudePruner",
    "PolynomialDecay",
    "Pruner",
    "Report",
    "Row",
    "Schedule",
    "Target",
    "ThresholdRamp",
    "apply_masks",
    "block_norms",
    "check_masks",
    "choose_blocks",
    "find_targets",
    "masks_from_bsr",
    "masks_of_zeros",
    "masks_to_bsr",
    "shrink_",
]
