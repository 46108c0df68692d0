"""Making models block-sparse: pruning, learning the structure, one-shot methods, and what they share."""

from .densities import erk_densities, uniform_densities
from .exchange import CosineDrop
from .masks import apply_masks, check_masks, masks_from_bsr, masks_of_zeros, masks_to_bsr
from .moments import Moments, move_blocks, replace_parameter
from .rewiring import SET
from .rigl import RigL
from .schedules import Constant, PolynomialDecay, Schedule, ThresholdRamp
from .scores import block_norms
from .scores_grow import conv_grow_scores, grow_bound, grow_scores
from .targets import Target, find_targets

__all__ = [
    "SET",
    "Constant",
    "CosineDrop",
    "Moments",
    "PolynomialDecay",
    "RigL",
    "Schedule",
    "Target",
    "ThresholdRamp",
    "apply_masks",
    "block_norms",
    "check_masks",
    "conv_grow_scores",
    "erk_densities",
    "find_targets",
    "grow_bound",
    "grow_scores",
    "masks_from_bsr",
    "masks_of_zeros",
    "masks_to_bsr",
    "move_blocks",
    "replace_parameter",
    "uniform_densities",
]
