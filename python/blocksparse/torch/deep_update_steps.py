"""Moved to `blocksparse.torch.autograd.deep_update_steps`."""

from .._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.torch.autograd.deep_update_steps")
