"""Functions on tensors and layouts."""

from .linear import apply_linear, linear, linear_wgrad, usable

__all__ = ["apply_linear", "linear", "linear_wgrad", "usable"]
