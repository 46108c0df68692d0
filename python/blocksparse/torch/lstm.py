"""LSTMs with block-sparse recurrent weights, and what further recurrent networks can be made of."""

from .modules.lstm import BlockSparseLSTM, MultiplicativeLSTM
from .modules.recurrent import Recurrent, cell, per_layer, projection, run_steps, stack_gates, start_of
from .ops.lstm import GATES, UNITS

__all__ = [
    "GATES",
    "UNITS",
    "BlockSparseLSTM",
    "MultiplicativeLSTM",
    "Recurrent",
    "cell",
    "per_layer",
    "projection",
    "run_steps",
    "stack_gates",
    "start_of",
]
