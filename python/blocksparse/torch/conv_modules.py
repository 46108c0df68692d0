"""Moved to `blocksparse.torch.modules.conv`."""

from .._core.moved import names_of

__getattr__ = names_of(__name__, "blocksparse.torch.modules.conv")
