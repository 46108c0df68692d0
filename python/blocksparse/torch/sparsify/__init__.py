"""Making models block-sparse: pruning, learning the structure, one-shot methods, and what they share."""

from .scores_grow import conv_grow_scores, grow_bound, grow_scores

__all__ = [
    "conv_grow_scores",
    "grow_bound",
    "grow_scores",
]
