"""Moved to `blocksparse.models.language.compression`."""

from blocksparse._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.models.language.compression")
