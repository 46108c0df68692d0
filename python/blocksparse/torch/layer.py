"""Moved to `blocksparse.torch.modules.layer`."""

from .._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.torch.modules.layer")
