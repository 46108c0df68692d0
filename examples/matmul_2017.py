"""The program of the 2017 release, with its own names."""

# [readme]
import numpy as np

from blocksparse.matmul import BlocksparseMatMul

hidden_size, block_size, minibatch_size = 4096, 32, 64
pattern = np.random.default_rng(0).integers(2, size=(hidden_size // block_size,) * 2)
bsmm = BlocksparseMatMul(pattern, block_size=block_size, feature_axis=1)
x = np.ones(bsmm.i_shape(minibatch_size), np.float32)
w = np.random.default_rng(1).standard_normal(bsmm.w_shape, dtype=np.float32)
y = bsmm(x, w)
# [readme]
print(y.shape, bsmm.sparsity)
