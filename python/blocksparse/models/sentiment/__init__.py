"""What a language model knows of a text: single units that tell praise from blame, and linear classifiers.

texts         labelled texts of files, prepared as models read them
features      cell states of a language model behind a text; needs PyTorch, so its names are there alone
classifiers   splits, units and classifiers, compared and drawn
l1_logistic   L1 logistic regression of many strengths and folds at once
"""

from .classifiers import (
    STRENGTHS,
    UNITS_AT_ONCE,
    Array,
    Score,
    Split,
    Unit,
    bag_of_ngrams,
    best_unit,
    classify,
    classify_at_once,
    colour_text,
    cross_validation,
    fixed_split,
    mcnemar,
    plot_unit,
    unit_score,
)
from .texts import Examples, detokenise, prepare, read_imdb, read_labelled

__all__ = [
    "STRENGTHS",
    "UNITS_AT_ONCE",
    "Array",
    "Examples",
    "Score",
    "Split",
    "Unit",
    "bag_of_ngrams",
    "best_unit",
    "classify",
    "classify_at_once",
    "colour_text",
    "cross_validation",
    "detokenise",
    "fixed_split",
    "mcnemar",
    "plot_unit",
    "prepare",
    "read_imdb",
    "read_labelled",
    "unit_score",
]
