"""A residual block whose convolutions are block-sparse, and a dense network made sparse."""

# [readme]
import torch

import blocksparse.torch as bst
from blocksparse import graphs

first, second = (  # 256 x 256 channels, each output sees a quarter
    graphs.balanced_random(16, degree=4, block_size=16, seed=seed) for seed in (0, 1)
)
block = torch.nn.Sequential(
    bst.BlockSparseConv2d(256, 256, 3, first, padding="same", activation="relu"),
    bst.BlockSparseConv2d(256, 256, 3, second, padding="same"),
).to(memory_format=torch.channels_last)
x = torch.randn(2, 256, 14, 14).to(memory_format=torch.channels_last)
y = x + block(x)  # dense in space, sparse over channels

net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7), torch.nn.Conv2d(64, 128, 3), torch.nn.Conv2d(128, 128, 3))
replaced = bst.replace_convolutions(net, density=0.25, block_size=32)  # keeps the blocks of the largest norms
# [readme]

y.square().mean().backward()
assert list(replaced) == ["1", "2"]
assert net(torch.randn(1, 3, 16, 16)).shape == (1, 128, 6, 6)
print(net)
