"""Moved to `blocksparse.models.sentiment.features`."""

from blocksparse._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.models.sentiment.features")
