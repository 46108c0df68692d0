"""Whole models. `language`: bytes of text through a small-world LSTM."""
