"""Magnitude pruning by blocks as a transformation of optax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("blocksparse.jax.pruning needs optax: pip install optax", name="optax") from error

from .._core.arguments import shown, to_int
from ..layout import Layout
from ..schedules import Schedule, live_blocks

Targets = Callable[[tuple[Any, ...], Any], bool]


class PruningState(NamedTuple):
    """What `wrap_optax` keeps: steps taken, the masks, and the state of the optimizer inside."""

    step: Any
    masks: Any  # like the parameters: bool [blocks, blocks] of each pruned one, else None
    inner: Any


def wrap_optax(
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    block_size: int = 32,
    targets: Targets | None = None,
    axes: tuple[int, int] = (-2, -1),
    scope: str = "layer",
) -> optax.GradientTransformation:
    """An optimizer that keeps the blocks of dense weights with the largest Frobenius norms, ever fewer of them. ::

        tx = pruning.wrap_optax(optax.adamw(1e-3), PolynomialDecay(0.9, begin_step=200, end_step=2000), block_size=32)
        state = tx.init(params)
        updates, state = tx.update(grads, state, params)   # as ever, compiled or not
        params = optax.apply_updates(params, updates)
        masks = pruning.masks_of(state)

    Step t is the moment after the t-th update. Blocks that are not live are zeros in the parameters, get no gradients,
    and stay zero, whatever momentum and weight decay do. As many are live as `MagnitudePruner(regrow=False)` of
    `blocksparse.torch.sparsify` keeps, and the same ones: of equal blocks the first. Where a norm is not finite, blocks
    stay as they are until the next step that acts.

    Args:
        optimizer: what makes updates of gradients.
        schedule: how sparse at which step, of `blocksparse.schedules`.
        block_size: edge of a block.
        targets: targets(path, parameter) says whether to prune one; by default all with two axes.
        axes: of the parameter, those of the blocks; a block has all of the others (taps of a filter).
        scope: "layer": each weight has that share of zeros; "global": all of them together have it.

    Raises:
        ValueError: the scope or the block size is none.
        TypeError: the schedule is none.
    """
    if not callable(getattr(schedule, "acts_at", None)) or not callable(getattr(schedule, "sparsity", None)):
        raise TypeError(f"[wrap_optax] schedule is {shown(schedule)}, needs one of blocksparse.schedules")
    if scope not in ("layer", "global"):
        raise ValueError(f'[wrap_optax] scope is {scope!r}, needs "layer" or "global"')
    b = to_int("block_size", block_size, op="wrap_optax")
    if b < 1:
        raise ValueError(f"[wrap_optax] block_size is {b}, needs 1 or more")
    chosen = (lambda path, parameter: parameter.ndim == 2) if targets is None else targets
    times = [step for step in range(schedule.begin_step, schedule.end_step + 1) if schedule.acts_at(step)]

    def init(params: Any) -> PruningState:
        def mask(path: tuple[Any, ...], parameter: Any) -> Any:
            return jnp.ones(_grid(parameter.shape, b, axes), bool) if chosen(path, parameter) else None

        masks = jax.tree_util.tree_map_with_path(mask, params)
        return PruningState(jnp.zeros((), jnp.int32), masks, optimizer.init(params))

    def update(gradients: Any, state: PruningState, params: Any = None) -> tuple[Any, PruningState]:
        if params is None:
            raise ValueError("[wrap_optax] update needs params, of which it prunes")
        step = state.step + 1
        gradients = _masked(gradients, state.masks, b, axes)
        updates, inner = optimizer.update(gradients, state.inner, params)
        after = _masked(optax.apply_updates(params, updates), state.masks, b, axes)
        at = jnp.searchsorted(jnp.asarray(times, jnp.int32), step)
        acts = (at < len(times)) & (jnp.asarray(times, jnp.int32)[at] == step) if times else jnp.zeros((), bool)

        def choose() -> Any:
            return _choose(after, state.masks, b, axes, scope, [schedule.sparsity(t) for t in times], at)

        masks = jax.lax.cond(acts, choose, lambda: state.masks) if times else state.masks
        after = _masked(after, masks, b, axes)
        updates = jax.tree_util.tree_map(lambda new, old: (new - old).astype(old.dtype), after, params)
        return updates, PruningState(step, masks, inner)

    return optax.GradientTransformation(init, update)


def masks_of(state: Any) -> Any:
    """The masks of an optimizer's state, wherever in it `wrap_optax` has put them; like the parameters.

    Raises:
        ValueError: there are none, or more than one.
    """
    leaves = jax.tree_util.tree_leaves(state, is_leaf=lambda node: isinstance(node, PruningState))
    found = [leaf for leaf in leaves if isinstance(leaf, PruningState)]
    if len(found) != 1:
        raise ValueError(f"[masks_of] the state has {len(found)} of wrap_optax, needs one")
    return found[0].masks


def layout_from_mask(mask: Any, block_size: int, sizes: Sequence[int], *, transposed: bool = False) -> Layout:
    """The layout of a mask and of a weight of `sizes`; `transposed` for the kernels of flax, which are [in, out]."""
    array, (rows, columns) = np.asarray(mask), sizes
    if transposed:
        array, rows, columns = array.T, columns, rows
    return Layout.from_mask(array, block_size, out_features=rows, in_features=columns)


def _grid(shape: Sequence[int], b: int, axes: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (-(-shape[axis] // b) for axis in axes)
    return rows, columns


def _norms(parameter: Any, b: int, axes: tuple[int, int]) -> Any:
    """The Frobenius norm of each block, summed in float32 (float64)."""
    squares = jnp.square(parameter.astype(jnp.promote_types(parameter.dtype, jnp.float32)))
    squares = jnp.moveaxis(squares, axes, (-2, -1))
    squares = squares.reshape(-1, *squares.shape[-2:]).sum(0)
    (out, in_), (rows, columns) = squares.shape, _grid(parameter.shape, b, axes)
    padded = jnp.pad(squares, ((0, rows * b - out), (0, columns * b - in_)))
    return jnp.sqrt(padded.reshape(rows, b, columns, b).sum((1, 3)))


def _masked(tree: Any, masks: Any, b: int, axes: tuple[int, int]) -> Any:
    """Zeros in the blocks that are not live."""

    def one(mask: Any, array: Any) -> Any:
        if mask is None:
            return array
        whole = jnp.repeat(jnp.repeat(mask, b, 0), b, 1)[: array.shape[axes[0]], : array.shape[axes[1]]]
        shape = [1] * array.ndim
        for axis in axes:
            shape[axis] = array.shape[axis]
        ordered = whole if axes[0] % array.ndim < axes[1] % array.ndim else whole.T
        return jnp.where(ordered.reshape(shape), array, jnp.zeros((), array.dtype))

    return jax.tree_util.tree_map(one, masks, tree, is_leaf=lambda node: node is None)


def _choose(
    params: Any, masks: Any, b: int, axes: tuple[int, int], scope: str, sparsities: Sequence[float], at: Any
) -> Any:
    """The masks of the live blocks with the largest norms, as many as step `at` of those that act keeps."""
    flat, tree = jax.tree_util.tree_flatten(masks)
    arrays = jax.tree_util.tree_map(
        lambda m, p: p if m is not None else None, masks, params, is_leaf=lambda n: n is None
    )
    norms = [
        jnp.where(mask, _norms(array, b, axes), 0).reshape(-1)
        for mask, array in zip(flat, jax.tree_util.tree_leaves(arrays), strict=True)
    ]
    pools = [[i] for i in range(len(norms))] if scope == "layer" else [list(range(len(norms)))]
    made: list[Any] = list(flat)
    for pool in pools if norms else []:
        scores = jnp.concatenate([norms[i] for i in pool])
        live = jnp.concatenate([flat[i].reshape(-1) for i in pool])
        keep = jnp.asarray([live_blocks(scores.size, sparsity) for sparsity in sparsities], jnp.int32)[at]
        order = jnp.argsort(jnp.where(live, -scores, jnp.inf), stable=True)  # what is not live comes last
        mask = jnp.zeros(scores.size, bool).at[order].set(jnp.arange(scores.size) < keep) & live
        mask = jnp.where(jnp.isfinite(scores).all(), mask, live)
        ends = np.cumsum([norms[i].size for i in pool])[:-1]
        for i, part in zip(pool, jnp.split(mask, ends), strict=True):
            made[i] = part.reshape(flat[i].shape)
    return jax.tree_util.tree_unflatten(tree, made)
