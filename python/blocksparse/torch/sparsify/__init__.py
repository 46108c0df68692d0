"""Making models block-sparse: pruning, learning the structure, one-shot methods, and what they share."""

from .compact import compact_
from .convert import convert
from .distill import Distilled, Distiller
from .masks import apply_masks, check_masks, masks_from_bsr, masks_of_zeros, masks_to_bsr
from .oneshot import sparsify_
from .schedules import Constant, PolynomialDecay, Schedule, ThresholdRamp
from .scores import block_norms
from .scores_oneshot import damped, obs_scores, refit, wanda_scores
from .targets import Target, find_targets
from .timing import Seen, Timing, watch

__all__ = [
    "Constant",
    "Distilled",
    "Distiller",
    "PolynomialDecay",
    "Schedule",
    "Seen",
    "Target",
    "ThresholdRamp",
    "Timing",
    "apply_masks",
    "block_norms",
    "check_masks",
    "compact_",
    "convert",
    "damped",
    "find_targets",
    "masks_from_bsr",
    "masks_of_zeros",
    "masks_to_bsr",
    "obs_scores",
    "refit",
    "sparsify_",
    "wanda_scores",
    "watch",
]
