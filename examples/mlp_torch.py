"""The feed-forward part of a language model, and one that was dense."""

# [readme]
import torch

import blocksparse.torch as bst
from blocksparse import graphs

up = graphs.random(32, 16, density=0.1, block_size=32, seed=0)  # 1024 hidden units of 512 features
down = graphs.random(16, 32, density=0.1, block_size=32, seed=1)
mlp = bst.BlockSparseMLP(512, 1024, up, down)  # W_down (silu(W_gate x) * (W_up x))
y = mlp(torch.randn(2, 7, 512))

dense = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
model = torch.nn.Sequential(dense, torch.nn.LayerNorm(512))
replaced = bst.replace_mlps(model, density=0.2, block_size=32)  # keeps the blocks of the largest norms
# [readme]

y.square().mean().backward()
assert list(replaced) == ["0"]
assert model(y).shape == (2, 7, 512)
print(mlp)
