"""Moved to `blocksparse.torch.modules.conv`."""

from .._core.moved import names_of

__getattr__ = names_of("blocksparse.torch.modules.conv", __name__)
