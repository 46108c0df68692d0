"""The projections of the 2017 release between many features and some of them, on NumPy, PyTorch and TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._arrays.kinds import Kind, kind_of, sizes_of


class SparseProj:
    """Between x [nhidden, ...] and y [nproj, ...], which are some of its features, in rising order.

    Args:
        nhidden: features of x.
        nproj: how many of them y has, drawn at random.
        proj_stride: instead, every so manyth of them, as many as fill whole blocks.
        block_size: of these blocks.
        gather_lut: instead, which they are: [nproj], all different.
        name: kept, and otherwise unused.
        seed: of the drawing; None: another one each time, as in the original.

    Attributes:
        gather_lut: feature i of y is feature gather_lut[i] of x.
        scatter_lut: [nhidden]: the feature of y that a feature of x is, or -1.

    Raises:
        ValueError: an argument is wrong, or none says which features they are.
    """

    def __init__(
        self,
        nhidden: int,
        nproj: int | None = None,
        proj_stride: int | None = None,
        block_size: int = 32,
        gather_lut: npt.ArrayLike | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        if gather_lut is not None:
            lut = np.asarray(gather_lut)
        elif nproj is not None:
            if not 0 < nproj <= nhidden:
                raise ValueError(f"[SparseProj] nproj is {nproj}, needs 1 to nhidden, {nhidden}")
            lut = np.sort(np.random.default_rng(seed).permutation(nhidden)[:nproj])
        elif proj_stride is not None:
            if not 0 < proj_stride <= nhidden:
                raise ValueError(f"[SparseProj] proj_stride is {proj_stride}, needs 1 to nhidden, {nhidden}")
            lut = np.arange(nhidden // proj_stride // block_size * block_size) * proj_stride
        else:
            raise ValueError("[SparseProj] needs nproj, proj_stride or gather_lut")
        inside = lut.ndim == 1 and lut.size > 0 and lut.dtype.kind in "iu" and lut.min() >= 0 and lut.max() < nhidden
        if not inside or np.unique(lut).size != lut.size:
            raise ValueError(f"[SparseProj] gather_lut is no list of different features, each 0 to {nhidden - 1}")
        self.nhidden, self.nproj, self.name = nhidden, lut.size, name or "SparseProj"
        self.gather_lut = lut.astype(np.int32)
        self.scatter_lut = np.full(nhidden, -1, np.int32)
        self.scatter_lut[self.gather_lut] = np.arange(lut.size)

    def gather(self, x: Any) -> Any:
        """The features y [nproj, ...] of x [nhidden, ...]."""
        kind, (x,) = self._taken(x=(x, self.nhidden))
        return kind.take(x, self.gather_lut)

    def scatter(self, y: Any) -> Any:
        """X [nhidden, ...]: those of y [nproj, ...] at their places, 0 elsewhere."""
        kind, (y,) = self._taken(y=(y, self.nproj))
        return kind.put(y, self.gather_lut, self.nhidden)

    def scatter_add(self, x: Any, y: Any) -> Any:
        """X [nhidden, ...] + scatter(y)."""
        kind, (x, y) = self._taken(x=(x, self.nhidden), y=(y, self.nproj))
        return x + kind.put(y, self.gather_lut, self.nhidden)

    def scatter_mul(self, x: Any, y: Any) -> Any:
        """X [nhidden, ...] with those at the places of y [nproj, ...] multiplied by it."""
        kind, (x, y) = self._taken(x=(x, self.nhidden), y=(y, self.nproj))
        scaled = kind.take(x, self.gather_lut) * y
        places = np.where(self.scatter_lut < 0, self.nproj + np.arange(self.nhidden), self.scatter_lut)
        return kind.take(kind.concatenate([scaled, x]), places)

    def _taken(self, **given: tuple[Any, int]) -> tuple[Kind, list[Any]]:
        kind = kind_of("SparseProj", **{name: array for name, (array, _) in given.items()})
        taken = []
        for name, (array, features) in given.items():
            array = kind.array(array)
            shape = sizes_of(array)
            if not shape or shape[0] != features:
                raise ValueError(f"[SparseProj] {name} is {shape}, needs [{features}, ...]")
            taken.append(array)
        return kind, taken
