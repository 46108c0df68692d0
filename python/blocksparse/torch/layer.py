"""Moved to `blocksparse.torch.modules.layer`."""

from .._core.moved import names_of

__getattr__ = names_of("blocksparse.torch.modules.layer", __name__)
