"""The class of the 2017 release, with its names and conventions, on NumPy arrays and PyTorch tensors.

    from blocksparse.matmul import BlocksparseMatMul

    bsmm = BlocksparseMatMul(layout, block_size=32, feature_axis=1)     # layout [C/b, K/b] of zeros and ones
    y = bsmm(x, w)                                                      # x [N, C], w of shape bsmm.w_shape -> [N, K]

There y = x W with W [C, K], a block of weights is [c, k], and blocks are numbered along a Z-order curve (`z_order`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import numpy as ops
from ._core.arguments import need_one_kind
from .layout import Layout


class BlocksparseMatMul:
    """y = x W for a block-sparse W [C, K].

    Args:
        layout: [C / block_size, K / block_size], non-zero where there is a block.
        block_size: 8, 16, 32, 64 or 128 (of which the original had 8, 16, 32 on axis 0 and 32, 64 on axis 1).
        feature_axis: 1: x is [N, C]; 0, the original's default: x is [C, N].
        z_order: whether blocks are numbered along a Z-order curve, as in weights that the original saved, or along the
            rows of `layout`. The core stores rows, so the first costs a copy of the weights in each call.
        name: kept, and otherwise unused.

    Raises:
        ValueError: an argument is wrong, or the layout has no block.
    """

    def __init__(
        self,
        layout: npt.ArrayLike,
        block_size: int = 32,
        feature_axis: int = 0,
        z_order: bool = True,
        name: str | None = None,
    ) -> None:
        mask = np.asarray(layout)
        if mask.ndim != 2:
            raise ValueError(f"[BlocksparseMatMul] layout has shape {mask.shape}, needs [C / b, K / b]")
        if feature_axis not in (0, 1):
            raise ValueError(f"[BlocksparseMatMul] feature_axis is {feature_axis!r}, needs 0 or 1")
        if not mask.any():
            raise ValueError("[BlocksparseMatMul] the layout has no block, needs one at least")
        # The core's layout is of W itself as [out = C, in = K], so that its blocks are [c, k]; x W is then its dgrad.
        self._core = Layout.from_mask(mask != 0, block_size)
        self.layout, self.bsize, self.axis = mask > 0, block_size, feature_axis
        self.z_order, self.name = z_order, name or "BlocksparseMatMul"
        self.CB, self.KB = self._core.grid
        self.C, self.K = self._core.out_features, self._core.in_features
        self.blocks = self._core.blocks
        self.w_shape, self.g_shape = self._core.values_shape, (self.blocks,)
        self.flops = self.blocks * block_size * block_size * 2
        self.sparsity = round(self._core.density, 3)  # the original's name for what is the density
        c, k = self._core.coordinates()
        numbering = np.argsort(_z_order(c, k), kind="stable") if z_order else np.arange(self.blocks)
        self._to_core = np.argsort(numbering)  # core block i is the caller's block _to_core[i]
        self._coords = np.stack([c, k], 1)[numbering]

    def i_shape(self, N: int) -> tuple[int, int]:
        """Shape of x for N tokens."""
        return (N, self.C) if self.axis else (self.C, N)

    def o_shape(self, N: int) -> tuple[int, int]:
        """Shape of the result for N tokens."""
        return (N, self.K) if self.axis else (self.K, N)

    def block_coord(self, block: int) -> tuple[int, int]:
        """(c, k) of a block, in blocks."""
        c, k = self._coords[block]
        return int(c), int(k)

    def identity_init(self, scale: float = 1.0) -> Callable[..., npt.NDArray[Any]]:
        """An initializer(shape, dtype): scale * identity where c mod KB == k mod CB, 0 elsewhere."""

        def initializer(shape: tuple[int, ...] | None = None, dtype: Any = np.float32) -> npt.NDArray[Any]:
            if shape is not None and tuple(shape) != self.w_shape:
                raise ValueError(f"[identity_init] shape is {tuple(shape)}, needs {self.w_shape}")
            w = np.zeros(self.w_shape, dtype)
            c, k = self._coords.T
            w[(c % self.KB) == (k % self.CB)] = scale * np.eye(self.bsize, dtype=dtype)
            return w

        return initializer

    def __call__(self, x: Any, w: Any, gate: Any = None) -> Any:
        """The product x W.

        Args:
            x: i_shape(N), a NumPy array or a PyTorch tensor (then differentiable).
            w: w_shape, of the same kind and dtype.
            gate: g_shape, float32: a factor for each block; 0 skips it.

        Returns:
            o_shape(N), of the same kind.

        Raises:
            ValueError: a shape or dtype is wrong.
            TypeError: they are of different kinds.
        """
        need_one_kind("BlocksparseMatMul", x=x, w=w, **({} if gate is None else {"gate": gate}))
        if tuple(w.shape) != self.w_shape:
            raise ValueError(f"[BlocksparseMatMul] w is {tuple(w.shape)}, needs {self.w_shape}")
        if len(x.shape) < 2 or x.shape[-1 if self.axis else 0] != self.C:
            needed = f"[N, {self.C}]" if self.axis else f"[{self.C}, N]"
            raise ValueError(f"[BlocksparseMatMul] x is {tuple(x.shape)}, needs {needed}")
        return self._numpy(x, w, gate) if isinstance(x, np.ndarray) else self._torch(x, w, gate)

    matmul = __call__

    def _numpy(self, x: npt.NDArray[Any], w: npt.NDArray[Any], gate: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        if self.z_order:
            w, gate = w[self._to_core], None if gate is None else gate[self._to_core]
        if self.axis:
            return ops.linear_dgrad(np.ascontiguousarray(x), w, self._core, gates=gate)
        tokens = np.ascontiguousarray(x).reshape(self.C, -1).T  # the original flattens what follows the features
        return ops.linear_dgrad(tokens, w, self._core, gates=gate).T.reshape(self.K, *x.shape[1:])

    def _torch(self, x: Any, w: Any, gate: Any) -> Any:
        import torch

        from .torch import linear

        if self.z_order:
            order = torch.from_numpy(self._to_core).to(w.device)
            w, gate = w[order], None if gate is None else gate[order]
        if self.axis:
            return linear(x, w, self._core.t(), gates=gate)
        return linear(x.reshape(self.C, -1).t(), w, self._core.t(), gates=gate).t().reshape(self.K, *x.shape[1:])


def _z_order(c: npt.NDArray[Any], k: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Position on a Z-order (Morton) curve: the bits of c and k take turns, c's first."""
    position = np.zeros(c.shape, np.int64)
    for bit in range(31):
        position |= (c.astype(np.int64) >> bit & 1) << (2 * bit)
        position |= (k.astype(np.int64) >> bit & 1) << (2 * bit + 1)
    return position
