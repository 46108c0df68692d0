"""The linear op on NumPy arrays."""

# [readme]
import numpy as np

from blocksparse import Layout
from blocksparse import numpy as bsn

layout = Layout.from_mask(np.random.default_rng(0).random((32, 48)) < 0.1, block_size=32)  # 1024 x 1536
w = np.random.default_rng(1).standard_normal(layout.values_shape, dtype=np.float32)  # [blocks, 32, 32]
x = np.random.default_rng(2).standard_normal((64, 1536), dtype=np.float32)
y = bsn.linear_fprop(x, w, layout)  # y = x W^T
dx = bsn.linear_dgrad(y, w, layout)  # dx = dy W
dw = bsn.linear_wgrad(x, y, layout)  # dW of the blocks
# [readme]

dense = layout.to_dense(w)
assert np.allclose(y, x @ dense.T, atol=1e-3)
assert np.allclose(dx, y @ dense, atol=1e-1)
print(layout)
