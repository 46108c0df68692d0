"""Pruning while a model is fitted: a callback that sets gates of blocks to 0, and what removes these blocks then."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from ..layout import Layout
from ..schedules import Schedule
from .layer import BlockSparseLayer
from .layouts import to_text


class PruneBlocks(keras.callbacks.Callback):
    """Sets the gates of the blocks with the smallest norms to 0 while a model is fitted.

    At each step that the schedule names, each layer loses blocks until that share of its blocks is gone; what is gone
    stays gone. Blocks with a gate of 0 are skipped by the products, and have no gradients. Steps are counted from the
    optimizer's, so that a fit that goes on goes on with the schedule.

    Args:
        schedule: such as `PolynomialDecay(final_sparsity=0.9, begin_step=1000, end_step=5000, frequency=100)`.
        layers: which layers; by default all block-sparse ones of the model that have gates.

    Raises:
        ValueError: a layer has no gates (make it with gates=True), or the model has none that has (when it is fitted).

    Source: Zhu and Gupta, "To prune, or not to prune", arXiv:1710.01878 (2017); by block as in Narang et al.,
    arXiv:1711.02782 (2017).
    """

    def __init__(self, schedule: Schedule, layers: Iterable[BlockSparseLayer] | None = None) -> None:
        super().__init__()
        self.schedule = schedule
        self._step = self._first = 0
        self._given = None if layers is None else list(layers)
        for layer in self._given or []:
            if not isinstance(layer, BlockSparseLayer) or not layer.use_gates:
                raise ValueError(
                    f"[PruneBlocks] layer {getattr(layer, 'name', layer)!r} has no gates: make it with gates=True"
                )

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the layers, and where the schedule stands."""
        if not self._layers():
            raise ValueError("[PruneBlocks] the model has no block-sparse layer with gates: make one with gates=True")
        self._step = self._iterations()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Several steps may be one batch to Keras: `steps_per_execution`."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Prunes at the steps that the schedule names."""
        # On JAX variables have been given away to the compiled step, and getting them back at each step takes time.
        on_jax = hasattr(self.model, "jax_state_sync")
        now = self._step + 1 + batch - self._first if on_jax else self._iterations()
        acts = any(map(self.schedule.acts_at, range(self._step + 1, now + 1)))
        self._step = now
        if not acts:
            return
        if on_jax:
            self.model.jax_state_sync()
        for layer in self._layers():
            prune(layer, self.schedule.sparsity(self._step))

    def _iterations(self) -> int:
        return int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))

    def _layers(self) -> list[BlockSparseLayer]:
        return prunable(self.model) if self._given is None else self._given


def prunable(model: Any) -> list[BlockSparseLayer]:
    """The block-sparse layers of a model that have gates, nested ones, too."""
    return [layer for layer in _leaves(model) if isinstance(layer, BlockSparseLayer) and layer.use_gates]


def _leaves(model: Any) -> list[Any]:
    """The layers of a model and of the models in it."""
    return [leaf for layer in model.layers for leaf in (_leaves(layer) if hasattr(layer, "layers") else [layer])]


def prune(layer: BlockSparseLayer, sparsity: float) -> None:
    """Sets gates to 0 until floor(sparsity * blocks + 0.5) of them are, those of the smallest norms first."""
    gates = layer.gates_now().copy()
    kernel = keras.ops.convert_to_numpy(layer.kernel).astype(np.float64).reshape(gates.size, -1)
    norms = np.where(gates == 0, -1.0, np.square(kernel).sum(1))
    gone = max(math.floor(sparsity * gates.size + 0.5), int(np.count_nonzero(gates == 0)))
    gates[np.argsort(norms, kind="stable")[:gone]] = 0
    layer.gates.assign(gates)


def strip_pruning(model: Any) -> Any:
    """The model with layers of only those blocks whose gates are not 0, without gates: smaller, with the same results.

    Args:
        model: Sequential or functional, built.

    Returns:
        A new model with variables of its own; the optimizer's are left behind.
    """

    def clone(layer: Any) -> Any:
        config = layer.get_config()
        if not isinstance(layer, BlockSparseLayer) or not layer.use_gates:
            return layer.__class__.from_config(config)
        return layer.__class__.from_config({**config, "gates": False, "layout": to_text(live_layout(layer))})

    stripped = keras.models.clone_model(model, clone_function=clone, recursive=True)
    for old, new in zip(_leaves(model), _leaves(stripped), strict=True):
        if not isinstance(old, BlockSparseLayer) or not old.use_gates:
            new.set_weights(old.get_weights())
            continue
        gates = old.gates_now()
        keep = np.flatnonzero(gates)
        kernel = keras.ops.convert_to_numpy(old.kernel)[keep]
        new.kernel.assign(kernel * gates[keep].reshape(-1, *(1,) * (kernel.ndim - 1)))
        if old.use_bias:
            new.bias.assign(keras.ops.convert_to_numpy(old.bias))  # a copy: JAX gives arrays away
    return stripped


def live_layout(layer: BlockSparseLayer) -> Layout:
    """The layer's layout of the blocks whose gates are not 0, in their order."""
    layout = layer.layout
    assert layout is not None
    keep = np.flatnonzero(layer.gates_now())
    out, in_ = layout.coordinates()
    sizes = {"out_features": layout.out_features, "in_features": layout.in_features}
    return Layout.from_coordinates(out[keep], in_[keep], layout.grid, layout.block_size, **sizes)
