"""The small-world LSTM."""

from .modules.deep_update import EPSILON, WORTH_BLOCKS, DeepUpdateLSTM

__all__ = ["EPSILON", "WORTH_BLOCKS", "DeepUpdateLSTM"]
