"""The layer norm of recurrent networks."""

from .functional.norm import layer_norm
from .ops.norm import backward, forward

__all__ = ["backward", "forward", "layer_norm"]
