"""`BlockSparseDense`: `keras.layers.Dense` with a block-sparse kernel."""

from __future__ import annotations

from typing import Any

import keras

from .._core.arguments import need, to_int
from ..layout import Layout
from . import backend, layouts
from .layer import BlockSparseLayer


@keras.saving.register_keras_serializable(package="blocksparse")
class BlockSparseDense(BlockSparseLayer):
    """y = activation(x W^T + bias), with W [units, features] zero outside of the blocks of a layout.

    `kernel` [blocks, b, b] is an ordinary variable: optimizers cost what the blocks cost. On PyTorch and JAX on CPU and
    CUDA, on TensorFlow on the CPU, without XLA.

    Args:
        units: features of the result.
        layout: which blocks of (out, in) there are. None: drawn when the layer is built, see the next three.
        density: share of blocks, equally many in each row.
        block_size: their edge: 8, 16, 32, 64 or 128.
        seed: of the drawing.
        gates: whether to have a variable `gates` [blocks], all 1 at first, which `PruneBlocks` sets to 0.
        activation: as in `keras.layers.Dense`.
        use_bias: as in `keras.layers.Dense`.
        kernel_initializer: as in `keras.layers.Dense`; scaled by the layout's fans.
        bias_initializer: as in `keras.layers.Dense`, as are regularizers and constraints.
        **more: of `keras.layers.Layer`.

    Raises:
        ValueError: an argument is wrong, or the layout has another size (when the layer is built).
    """

    def __init__(self, units: int, layout: Layout | str | None = None, **more: Any) -> None:
        super().__init__(layout, **more)
        self.units = to_int("units", units, op=type(self).__name__)

    def build(self, input_shape: Any) -> None:
        """Makes the variables."""
        self.make_variables(self.units, self.features_of(input_shape))
        self.built = True

    def call(self, inputs: Any) -> Any:
        """[..., features] -> [..., units]."""
        layout, kernel, bias, gates = self.tensors()
        return self.activation(backend.linear(inputs, kernel, layout, bias, gates))

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """[..., units]."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """All arguments."""
        return {"units": self.units, **super().get_config()}

    @classmethod
    def from_dense(
        cls,
        dense: keras.layers.Dense,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        gates: bool = False,
    ) -> BlockSparseDense:
        """A layer with the blocks of a built dense one that have the largest norms, or with those of a given layout.

        Raises:
            ValueError: not exactly one of density and layout is given, the density is outside of [0, 1], or the dense
                layer is not built.
            TypeError: it is no `keras.layers.Dense`.
        """
        need("from_dense", "dense", dense, keras.layers.Dense, "a keras.layers.Dense")
        if (density is None) == (layout is None):
            raise ValueError("[from_dense] needs density or layout, one of them")
        if not dense.built:
            raise ValueError("[from_dense] the dense layer is not built, so it has no weights")
        weight = keras.ops.convert_to_numpy(dense.kernel).T
        if layout is None:
            assert density is not None
            layout = layouts.largest_blocks(weight, density, block_size)
        made = cls(
            dense.units,
            layout,
            gates=gates,
            activation=dense.activation,
            use_bias=dense.use_bias,
            dtype=dense.dtype_policy,
        )
        made.build((None, weight.shape[1]))
        made.kernel.assign(layouts.blocks_of(weight, layout))
        if dense.use_bias:
            made.bias.assign(keras.ops.convert_to_numpy(dense.bias))  # a copy: JAX gives arrays away
        return made
