"""What the block-sparse layers of Keras share: the layout, variables over its blocks, saving and loading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ..layout import Layout
from . import layouts
from .backend import JITS

_PATTERN = "pattern"  # beside the variables in a file of weights


class BlockSparseLayer(keras.layers.Layer):
    """The base of the layers: `kernel` [blocks, ..., b, b], `bias` and, where asked for, `gates` [blocks]."""

    def __init__(
        self,
        layout: Layout | str | None = None,
        *,
        density: float = 0.1,
        block_size: int = 32,
        seed: int = 0,
        gates: bool = False,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        name = type(self).__name__
        if isinstance(layout, str):  # of a configuration
            layout = layouts.from_text(name, layout)
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(f"[{name}] layout is a {type(layout).__name__}, needs a blocksparse.Layout")
        if not 0 < density <= 1:
            raise ValueError(f"[{name}] density is {density}, needs 0 < density <= 1")
        self.layout, self.density, self.seed = layout, density, seed
        self.block_size = block_size if layout is None else layout.block_size
        self.use_gates, self.use_bias = gates, use_bias
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.kernel: Any = None
        self.bias: Any = None
        self.gates: Any = None
        self.supports_jit = JITS

    def features_of(self, shape: Sequence[int | None], axis: int = -1, ndim: int | None = None) -> int:
        """The features of inputs of this shape, which Keras checks from now on: `ndim` axes, or any number from 1 on.

        Raises:
            ValueError: there are other axes, or the features are not known.
        """
        fits = len(shape) == ndim if ndim else len(shape) > 0
        features = shape[axis] if fits else None
        if features is None:
            axes = f"{ndim} axes" if ndim else "one axis or more"
            raise ValueError(
                f"[{type(self).__name__}] inputs are {list(shape)}, needs {axes}, and a known size of axis {axis}"
            )
        self.input_spec = keras.layers.InputSpec(ndim=ndim, min_ndim=1, axes={axis: features})
        return int(features)

    def make_variables(self, out_features: int, in_features: int, taps: tuple[int, ...] = ()) -> None:
        """Draws the layout unless it was given, and makes the variables.

        Raises:
            ValueError: the layout that was given has another size.
        """
        name = type(self).__name__
        if self.layout is None:
            self.layout = layouts.drawn(out_features, in_features, self.density, self.block_size, self.seed)
        if self.layout.sizes != (out_features, in_features):
            raise ValueError(f"[{name}] layout is {self.layout.sizes}, needs {(out_features, in_features)} (out, in)")
        blocks, b, _ = self.layout.values_shape
        self.kernel = self.add_weight(
            name="kernel",
            shape=(blocks, *((math.prod(taps),) if taps else ()), b, b),
            initializer=layouts.OverBlocks(self.kernel_initializer, self.layout),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(out_features,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        if self.use_gates:
            wide = "float64" if self.compute_dtype == "float64" else "float32"
            self.gates = self.add_weight(
                name="gates", shape=(blocks,), initializer="ones", trainable=False, dtype=wide, autocast=False
            )

    def tensors(self) -> tuple[Layout, Any, Any, Any]:
        """The layout, and kernel, bias and gates as tensors of the backend; None where there is none."""
        assert self.layout is not None  # `build` has made it
        given = (self.kernel, self.bias, self.gates)
        kernel, bias, gates = (None if one is None else keras.ops.convert_to_tensor(one) for one in given)
        return self.layout, kernel, bias, gates

    @property
    def sparsity(self) -> float:
        """Share of the blocks of the whole matrix that are not there, or whose gates are 0."""
        if self.layout is None:
            raise ValueError(f"[{type(self).__name__}] is not built yet, so it has no layout")
        live = self.layout.blocks if self.gates is None else int(np.count_nonzero(self.gates_now()))
        return 1 - live / max(math.prod(self.layout.grid), 1)

    def gates_now(self) -> Any:
        """The gates as a NumPy array."""
        return keras.ops.convert_to_numpy(self.gates)

    # ---- Saving and loading -----------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """All arguments; the layout as text."""
        serialised = {
            "activation": keras.activations.serialize(self.activation),
            **{
                f"{of}_{kind}": getattr(keras, f"{kind}s").serialize(getattr(self, f"{of}_{kind}"))
                for of in ("kernel", "bias")
                for kind in ("initializer", "regularizer", "constraint")
            },
        }
        own = {
            "layout": None if self.layout is None else layouts.to_text(self.layout),
            "density": self.density,
            "block_size": self.block_size,
            "seed": self.seed,
            "gates": self.use_gates,
            "use_bias": self.use_bias,
        }
        return {**super().get_config(), **own, **serialised}

    def save_own_variables(self, store: Any) -> None:
        """With the pattern beside them."""
        super().save_own_variables(store)
        if self.layout is not None:
            store[_PATTERN] = self.layout.pattern()

    def load_own_variables(self, store: Any) -> None:
        """Refuses weights over other blocks.

        Raises:
            ValueError: they are of another layout, or of no block-sparse layer.
        """
        saved = {key: store[key] for key in store.keys()}  # noqa: SIM118  a store is no dict
        pattern = saved.pop(_PATTERN, None)
        if pattern is None:
            raise ValueError(f"[{self.name}] these weights are of no block-sparse layer")
        theirs = Layout.from_pattern(np.asarray(pattern))
        if self.layout is not None and theirs != self.layout:
            raise ValueError(f"[{self.name}] weights are of {theirs} (hash {hash(theirs)}), needs {self.layout}")
        super().load_own_variables(saved)
