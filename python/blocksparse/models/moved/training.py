"""Moved to `blocksparse.models.language.training` and `blocksparse.models.checkpoint`."""

from blocksparse._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.models.language.training", "blocksparse.models.checkpoint")
