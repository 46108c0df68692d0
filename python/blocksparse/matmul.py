"""The classes of the 2017 release, with their names and conventions, on NumPy, PyTorch and TensorFlow.

    from blocksparse.matmul import BlocksparseMatMul

    bsmm = BlocksparseMatMul(layout, block_size=32, feature_axis=1)     # layout [C/b, K/b] of zeros and ones
    y = bsmm(x, w)                                                      # x [N, C], w of shape bsmm.w_shape -> [N, K]

There y = x W with W [C, K], a block of weights is [c, k], and blocks are numbered along a Z-order curve (`z_order`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ._arrays.kinds import dtype_name_of, kind_of, sizes_of
from .layout import Layout
from .projection import SparseProj as SparseProj  # which the original has here, too

Initializer = Callable[..., npt.NDArray[Any]]
_ORIGINAL = {  # arguments of the original's call that are not taken, and what to do
    "dw_dtype": "the gradient of w has the dtype of w: cast w",
    "gate_grad": "gates have gradients wherever they are asked for: leave it out",
    "dw_gated": "the gradient of w is the true one, gate * x^T dy: leave it out",
    "bench": "python benchmarks/calls.py and blocksparse-bench measure",
}


class BlocksparseMatMul:
    """y = x W for a block-sparse W [C, K].

    Args:
        layout: [C / block_size, K / block_size], non-zero where there is a block.
        block_size: 8, 16, 32, 64 or 128 (of which the original had 8, 16, 32 on axis 0 and 32, 64 on axis 1).
        feature_axis: 1: x is [N, C]; 0: x is [C, N]. None: each call infers it from x, whose first or last dimension is
            C.
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
        feature_axis: int | None = None,
        z_order: bool = True,
        name: str | None = None,
    ) -> None:
        mask = np.asarray(layout)
        if mask.ndim != 2:
            raise ValueError(f"[BlocksparseMatMul] layout has shape {mask.shape}, needs [C / b, K / b]")
        if feature_axis not in (None, 0, 1):
            raise ValueError(f"[BlocksparseMatMul] feature_axis is {feature_axis!r}, needs 0, 1 or None")
        if not mask.any():
            raise ValueError("[BlocksparseMatMul] the layout has no block, needs one at least")
        # The core's layout is of W itself as [out = C, in = K], so that its blocks are [c, k]; x W is that of its
        # transpose.
        self._core = Layout.from_mask(mask != 0, block_size)
        self._turned = self._core.t()
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
        """Shape of x for N tokens; without a feature_axis, that of axis 0."""
        return (N, self.C) if self.axis else (self.C, N)

    def o_shape(self, N: int) -> tuple[int, int]:
        """Shape of the result for N tokens; without a feature_axis, that of axis 0."""
        return (N, self.K) if self.axis else (self.K, N)

    def block_coord(self, block: int) -> tuple[int, int]:
        """(c, k) of a block, in blocks."""
        c, k = self._coords[block]
        return int(c), int(k)

    # ---- Initializers: NumPy arrays, which TensorFlow's variables take ----------------------------------------------

    def identity_init(self, scale: float = 1.0) -> Initializer:
        """An initializer(shape, dtype): scale * identity where c mod KB == k mod CB, 0 elsewhere."""

        def initializer(shape: Any = None, dtype: Any = np.float32, **_partition: Any) -> npt.NDArray[Any]:
            w = self._empty("identity_init", shape, dtype)
            c, k = self._coords.T
            w[(c % self.KB) == (k % self.CB)] = scale * np.eye(self.bsize, dtype=w.dtype)
            return w

        return initializer

    def ortho_init(self, seed: int | None = None) -> Initializer:
        """An initializer(shape, dtype) of orthonormal columns.

        Each column of blocks has orthonormal columns by itself: those of different ones share few features of x. A W
        without zeros has orthonormal columns as a whole, or rows, if these are fewer.
        """

        def initializer(shape: Any = None, dtype: Any = np.float32, **_partition: Any) -> npt.NDArray[Any]:
            w, rng, b = self._empty("ortho_init", shape, dtype), np.random.default_rng(seed), self.bsize
            c, k = self._coords.T
            if self.layout.all():
                whole = _orthonormal(rng, self.C, self.K).reshape(self.CB, b, self.KB, b)
                w[...] = whole.transpose(0, 2, 1, 3)[c, k]
                return w
            for column in np.unique(k):
                mine = np.flatnonzero(k == column)
                w[mine] = _orthonormal(rng, mine.size * b, b).reshape(-1, b, b)
            return w

        return initializer

    def _empty(self, name: str, shape: Any, dtype: Any) -> npt.NDArray[Any]:
        given = None if shape is None else tuple(int(side) for side in shape)
        if given not in (None, self.w_shape):
            raise ValueError(f"[{name}] shape is {given}, needs {self.w_shape}")
        return np.zeros(self.w_shape, getattr(dtype, "as_numpy_dtype", dtype))

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def l2_normalize(self, W: Any, gain: Any = None, epsilon: float = 1e-12, dtype: Any = None) -> Any:
        """W with each of its K columns scaled to length 1, or to its gain.

        Args:
            W: w_shape, of any kind; computed in float32 at least.
            gain: [K], float32: the lengths.
            epsilon: the least sum of squares of a column.
            dtype: of the result; that of W by default.

        Raises:
            ValueError: a shape is wrong.
            TypeError: W and gain are of different kinds.
        """
        kind = kind_of("l2_normalize", W=W, **({} if gain is None else {"gain": gain}))
        W = kind.array(W)
        self._check_w(W)
        if gain is not None and sizes_of(gain) != [self.K]:
            raise ValueError(f"[l2_normalize] gain is {_text(sizes_of(gain))}, needs {(self.K,)}")
        name = kind.dtype_name(W)
        wide = "float64" if name == "float64" else "float32"
        w, k = kind.to(W, wide), self._coords[:, 1]
        squares = kind.segment_sum(kind.sum(w * w, 1), k, self.KB)
        scale = kind.at_least(squares, epsilon) ** -0.5  # [KB, b]
        if gain is not None:
            scale = scale * kind.reshape(kind.to(kind.array(gain), wide), (self.KB, self.bsize))
        scaled = w * kind.reshape(kind.take(scale, k), (self.blocks, 1, self.bsize))
        return kind.to(scaled, name if dtype is None else dtype_name_of(dtype))

    def __call__(self, x: Any, w: Any, gate: Any = None, name: str | None = None, **original: Any) -> Any:
        """The product x W.

        Args:
            x: [N, C] or [C, N]: see feature_axis. A NumPy array, a PyTorch tensor or a TensorFlow tensor, of graphs,
                too; the result is of the same kind and, but for NumPy's, differentiable.
            w: w_shape, of the same kind and dtype.
            gate: g_shape, float32: a factor for each block; 0 skips it.
            name: accepted, and otherwise unused.
            **original: other arguments of the original, which are refused.

        Returns:
            [N, K] or [K, N].

        Raises:
            ValueError: a shape or dtype is wrong, or does not say where the features are.
            TypeError: they are of different kinds, or an argument of the original is not taken: the message says why.
        """
        for key in original:
            why = _ORIGINAL.get(key, "there is no such argument")
            raise TypeError(f"[BlocksparseMatMul] {key} is given: {why}")
        kind = kind_of("BlocksparseMatMul", x=x, w=w, **({} if gate is None else {"gate": gate}))
        x, w = kind.array(x), kind.array(w)
        self._check_w(w)
        features_first = not self._axis_of(x)
        if self.z_order:
            w, gate = kind.take(w, self._to_core), None if gate is None else kind.take(gate, self._to_core)
        return kind.product(x, w, self._turned, gate, features_first)

    matmul = __call__

    def _check_w(self, w: Any) -> None:
        if (shape := sizes_of(w)) != list(self.w_shape):
            raise ValueError(f"[BlocksparseMatMul] w is {_text(shape)}, needs {self.w_shape}")

    def _axis_of(self, x: Any) -> int:
        """Where the features of x are: as was said, or where its size is C."""
        shape = sizes_of(x)
        possible = [axis for axis in (0, 1) if shape is not None and len(shape) > 1 and shape[-axis] == self.C]
        if self.axis is not None:
            unknown = shape is None or (len(shape) > 1 and shape[-self.axis] is None)  # in a graph
            if self.axis not in possible and not unknown:
                needed = f"[N, {self.C}]" if self.axis else f"[{self.C}, N]"
                raise ValueError(f"[BlocksparseMatMul] x is {_text(shape)}, needs {needed}")
            return self.axis
        if len(possible) != 1:
            what = "both could be" if possible else "neither of which is known to be"
            raise ValueError(
                f"[BlocksparseMatMul] x is {_text(shape)}, {what} the {self.C} features: pass feature_axis=1 to "
                f"BlocksparseMatMul for x of [N, {self.C}], feature_axis=0 for [{self.C}, N]"
            )
        return possible[0]


def group_param_grads(param_grad: Any, group_size: int = 8, cast32: bool = True) -> NoReturn:
    """Refused: it rewrote a graph of TensorFlow so that gradients of one weight at many steps were one product."""
    raise NotImplementedError(
        "[group_param_grads] graphs are not rewritten. tf.gradients adds the gradients of a weight that is used at "
        "many steps, so leave this call out; for one product call the object once on all steps, [steps * N, C], or use "
        "blocksparse.torch.linear_wgrad, which takes a list of steps"
    )


def _text(shape: list[int | None] | None) -> str:
    if shape is None:
        return "of unknown shape"
    inner = ", ".join(str(side) for side in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float64]:
    """[rows, columns] with orthonormal columns, or rows where these are fewer: Q of a normal matrix, signs of R out."""
    tall = rows >= columns
    q, r = np.linalg.qr(rng.standard_normal((rows, columns) if tall else (columns, rows)))
    q = q * np.sign(np.diagonal(r))
    return np.asarray(q if tall else q.T)


def _z_order(c: npt.NDArray[Any], k: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Position on a Z-order (Morton) curve: the bits of c and k take turns, c's first."""
    position = np.zeros(c.shape, np.int64)
    for bit in range(31):
        position |= (c.astype(np.int64) >> bit & 1) << (2 * bit)
        position |= (k.astype(np.int64) >> bit & 1) << (2 * bit + 1)
    return position
