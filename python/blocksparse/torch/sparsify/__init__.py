"""Making models block-sparse: pruning, learning the structure, one-shot methods, and what they share."""

from .masks import apply_masks, check_masks, masks_from_bsr, masks_of_zeros, masks_to_bsr
from .schedules import Constant, PolynomialDecay, Schedule, ThresholdRamp
from .scores import block_norms
from .targets import Target, find_targets

__all__ = [
    "Constant",
    "PolynomialDecay",
    "Schedule",
    "Target",
    "ThresholdRamp",
    "apply_masks",
    "block_norms",
    "check_masks",
    "find_targets",
    "masks_from_bsr",
    "masks_of_zeros",
    "masks_to_bsr",
]
