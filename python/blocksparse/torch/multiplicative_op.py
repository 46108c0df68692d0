"""Moved to `blocksparse.torch.autograd.multiplicative`."""

from .._core.moved import names_of

__getattr__ = names_of("blocksparse.torch.autograd.multiplicative", __name__)
