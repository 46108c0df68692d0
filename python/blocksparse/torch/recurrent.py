"""Recurrent networks as functions: the LSTM, and weights that many steps share."""

from .functional.lstm import State, apply_cell, apply_lstm, lstm
from .functional.shared_weight import SharedWeight

__all__ = ["SharedWeight", "State", "apply_cell", "apply_lstm", "lstm"]
