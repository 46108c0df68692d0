"""Block-sparse layers divided among the processes of `torch.distributed`, by PyTorch's own engines.

DistributedDataParallel and `fully_shard` take every layer of `blocksparse.torch` as it is. Here are the styles by which
`torch.distributed.tensor.parallel.parallelize_module` divides the weights of feed-forward layers themselves. They need
PyTorch 2.7 or newer. A guide is docs/guide/several-cards.md.
"""

from .agreement import need_same_layouts
from .dealing import Deal, deal
from .styles import ColwiseParallel, MLPParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "Deal", "MLPParallel", "RowwiseParallel", "deal", "need_same_layouts"]
