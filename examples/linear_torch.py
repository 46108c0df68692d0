"""A block-sparse layer in a PyTorch network: train it like any other."""

# [readme]
import torch

import blocksparse.torch as bst
from blocksparse import graphs

layout = graphs.barabasi_albert(nodes=64, links=4, block_size=16)  # 1024 x 1024, 13.6 % of the blocks
net = torch.nn.Sequential(bst.BlockSparseLinear(1024, 1024, layout, activation="gelu"), torch.nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
x, target = torch.randn(256, 1024), torch.randint(10, (256,))
for _ in range(20):
    loss = torch.nn.functional.cross_entropy(net(x), target)
    optimizer.zero_grad()
    loss.backward()  # gradients of the blocks alone
    optimizer.step()
# [readme]

print(net[0])
print(f"loss {loss.item():.3f}")
assert loss.item() < 1.5
