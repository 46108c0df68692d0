"""Recurrent networks as functions, and weights that many steps share."""

from .functional.lstm import SharedWeight, State, apply_cell, apply_lstm, lstm

__all__ = [
    "SharedWeight",
    "State",
    "apply_cell",
    "apply_lstm",
    "lstm",
]
