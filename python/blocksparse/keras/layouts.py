"""Layouts in Keras: drawn when a layer is built, written into its configuration, chosen from a dense weight."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from ..layout import Layout


def drawn(out_features: int, in_features: int, density: float, block_size: int, seed: int) -> Layout:
    """As many blocks in each row as give the density, at least one; columns differ by one block at most."""
    rows, columns = -(-out_features // block_size), -(-in_features // block_size)
    degree = max(1, math.floor(density * columns + 0.5))
    name = f"balanced({rows},{columns},{degree})"
    return Layout.from_graph(name, block_size, seed=seed, out_features=out_features, in_features=in_features)


def to_text(layout: Layout) -> str:
    """The pattern as text, for JSON."""
    return base64.b64encode(zlib.compress(layout.pattern().astype("<i4").tobytes())).decode()


def from_text(op: str, text: str) -> Layout:
    """What `to_text` wrote.

    Raises:
        ValueError: it is no such text, or was altered.
    """
    try:
        words = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<i4")
    except (ValueError, zlib.error) as error:
        raise ValueError(f"[{op}] layout is text, but no pattern of a layout: {error}") from error
    return Layout.from_pattern(words.astype(np.int32))


def largest_blocks(weight: npt.NDArray[Any], density: float, block_size: int) -> Layout:
    """The layout of the blocks of a weight [out, in, ...] with the largest Frobenius norms: floor(density n + 0.5).

    Raises:
        ValueError: the density is outside of [0, 1].
    """
    if not 0 <= density <= 1:
        raise ValueError(f"[from_dense] density is {density}, needs 0 to 1")
    out, in_ = weight.shape[:2]
    squares = np.square(weight.astype(np.float64)).reshape(out, in_, -1).sum(2)
    grid = (-(-out // block_size), -(-in_ // block_size))
    full = np.zeros((grid[0] * block_size, grid[1] * block_size))
    full[:out, :in_] = squares
    norms = full.reshape(grid[0], block_size, grid[1], block_size).sum((1, 3)).ravel()
    mask = np.zeros(norms.size, np.bool_)
    mask[np.argsort(-norms, kind="stable")[: math.floor(density * norms.size + 0.5)]] = True
    return Layout.from_mask(mask.reshape(grid), block_size, out_features=out, in_features=in_)


def blocks_of(weight: npt.NDArray[Any], layout: Layout) -> npt.NDArray[Any]:
    """The blocks of a weight [out, in] that a layout names: [blocks, b, b]."""
    b, (rows, columns) = layout.block_size, layout.grid
    full = np.zeros((rows * b, columns * b), weight.dtype)
    full[: weight.shape[0], : weight.shape[1]] = weight
    out, in_ = layout.coordinates()
    return full.reshape(rows, b, columns, b).transpose(0, 2, 1, 3)[out, in_]


class OverBlocks(keras.initializers.Initializer):
    """An initializer for blocks [blocks, ..., b, b], which scales by the layout's fans where Keras scales by shapes."""

    def __init__(self, inner: Any, layout: Layout) -> None:
        self._inner, self._layout = inner, layout

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Numbers of that shape."""
        made = self._inner(shape, dtype=dtype)
        mode = getattr(self._inner, "mode", None)
        if not isinstance(self._inner, keras.initializers.VarianceScaling) or not self._layout.blocks:
            return made
        of_shape = math.prod(shape[:-2]) * shape[-1]  # both fans, as Keras has it
        fan_in, fan_out = (of_shape / max(side, 1) for side in self._layout.grid)
        fan = {"fan_in": fan_in, "fan_out": fan_out}.get(str(mode), (fan_in + fan_out) / 2)
        return made * math.sqrt(of_shape / fan)
