"""The layer norm of recurrent networks."""

from .functional.norm import backward, forward, layer_norm

__all__ = [
    "backward",
    "forward",
    "layer_norm",
]
