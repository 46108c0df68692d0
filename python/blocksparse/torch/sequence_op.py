"""Moved to `blocksparse.torch.autograd.sequence` and `blocksparse.torch.blocks`."""

from .._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.torch.autograd.sequence", "blocksparse.torch.blocks")
