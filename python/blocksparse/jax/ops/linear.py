"""The linear op: which product it is, as `products` asks."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import numpy as np

from ..._core import library
from ..tables import Sizes
from .products import Form, Shape


@dataclasses.dataclass(frozen=True)
class Linear(Form):
    """x [n, in] and y [n, out], or features-first [in, n] and [out, n]."""

    sizes: Sizes
    features_first: bool = False
    tf32: bool = False

    @property
    def handlers(self) -> str:
        """See `Form`."""
        return "linear"

    @property
    def integers(self) -> int:
        """See `Form`."""
        return 1

    @property
    def token_axis(self) -> int:
        """See `Form`."""
        return 1 if self.features_first else 0

    @property
    def feature_axis(self) -> int:
        """See `Form`."""
        return 0 if self.features_first else 1

    def values_shape(self) -> Shape:
        """See `Form`."""
        b = self.sizes.block_size
        return self.sizes.blocks, b, b

    def _of(self, features: int, shape: Shape) -> Shape:
        n = shape[self.token_axis]
        return (features, n) if self.features_first else (n, features)

    def y_shape(self, x: Shape) -> Shape:
        """See `Form`."""
        return self._of(self.sizes.outputs, x)

    def x_shape(self, y: Shape) -> Shape:
        """See `Form`."""
        return self._of(self.sizes.inputs, y)

    def around(self, x: Shape, features: int) -> Shape:
        """The shape of x with so many features; x may have any axes around them."""
        return (features, *x[1:]) if self.features_first else (*x[:-1], features)

    def rows(self, x: Any) -> Any:
        """An array like x or y with all axes but that of features as one."""
        features = x.shape[0 if self.features_first else -1]
        n = math.prod(x.shape[1:] if self.features_first else x.shape[:-1])
        return x.reshape((features, n) if self.features_first else (n, features))

    def numbers(self, bits: int, activation: int) -> tuple[int, ...]:
        """See `Form`."""
        return int(self.tf32), bits, *self.sizes.numbers(), int(self.features_first), activation

    def workspace(self, which: str, x: Shape, dtype: np.dtype) -> int:
        """See `Form`."""
        view, code = self.sizes.card_view(), library.DTYPES[dtype.name]
        return int(library.ask(f"bs_linear_{which}_workspace_size", ctypes.byref(view), code, x[self.token_axis]))
