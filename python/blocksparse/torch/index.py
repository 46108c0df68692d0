"""Moved to `blocksparse.torch.tables`."""

from .._core.moved import names_of

__getattr__ = names_of("blocksparse.torch.tables", __name__)
