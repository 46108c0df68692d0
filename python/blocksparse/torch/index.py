"""Moved to `blocksparse.torch.tables`."""

from .._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.torch.tables")
