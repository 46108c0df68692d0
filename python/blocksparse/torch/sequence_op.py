"""Moved to `blocksparse.torch.autograd.sequence`."""

from .._core.moved import names_of

__getattr__ = names_of("blocksparse.torch.autograd.sequence", __name__)
