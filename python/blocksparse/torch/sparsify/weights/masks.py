"""Masks, {name: bool [out_blocks, in_blocks]}: which blocks of the weights of a model are live."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...._core.arguments import need, shown
from ....layout import Layout
from ....schedules import check_sparsity, live_blocks
from ...arguments import need_strided
from ...convert import from_bsr as _values_and_layout
from ...convert import from_dense, to_bsr
from .targets import Target

Masks = dict[str, Tensor]


def top_blocks(scores: Tensor, keep: int) -> Tensor:
    """Bool of the shape of the scores: the `keep` largest; of equal ones the first, so that it is the same anywhere."""
    best = torch.sort(scores.flatten(), descending=True, stable=True).indices[:keep]
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    return mask.index_fill_(0, best, True).view(scores.shape)


def choose_blocks(scores: Mapping[str, Tensor], sparsity: float, scope: str = "layer") -> Masks:
    """The masks of the blocks with the largest scores, of an exact number; of equal scores the first.

    Args:
        scores: [out_blocks, in_blocks] of each weight.
        sparsity: share of the blocks that are not live.
        scope: "layer": each weight has that share; "global": all of them together have it.

    Raises:
        ValueError: the sparsity is outside of [0, 1), there is no such scope, or a score is NaN (the message names
            the weight).
    """
    sparsity = check_sparsity("choose_blocks", "sparsity", sparsity)
    check_scope("choose_blocks", scope)
    if wrong := [
        name for name, score in scores.items() if bool(score.isnan().any())
    ]:  # sorted, it would be the largest
        raise ValueError(f"[choose_blocks] scores of {', '.join(wrong)} have NaN, need numbers")
    return in_pools(lambda flat: top_blocks(flat, live_blocks(flat.numel(), sparsity)), scope, scores)


def check_scope(op: str, scope: object) -> None:
    """Raises ValueError unless there is such a scope."""
    if scope not in ("layer", "global"):
        raise ValueError(f"[{op}] scope is {shown(scope)}, needs 'layer' or 'global'")


def in_pools(pick: Callable[..., Tensor], scope: str, *grids: Mapping[str, Tensor]) -> Masks:
    """Masks by pick(*flat grids) -> flat mask: of each weight by itself ("layer"), or of all at once ("global")."""
    first = grids[0]
    found: Masks = {}
    for pool in [[name] for name in first] if scope == "layer" else [list(first)]:
        device = first[pool[0]].device
        flat = [torch.cat([grid[name].flatten().to(device) for name in pool]) for grid in grids]
        parts = pick(*flat).split([first[name].numel() for name in pool])
        found |= {n: part.view(first[n].shape).to(first[n].device) for n, part in zip(pool, parts, strict=True)}
    return found


def warn_of_empty(op: str, masks: Mapping[str, Tensor], when: str = "") -> list[str]:
    """The weights of which no block is left; a warning names them, if there are any."""
    if empty := [name for name, mask in masks.items() if not bool(mask.any())]:
        warnings.warn(
            f"[{op}] {when}no block is left of {', '.join(empty)}: take a lower sparsity, smaller blocks or another "
            "scope, or leave them out by ignore",
            stacklevel=3,
        )
    return empty


def layout_of(target: Target, mask: Tensor) -> Layout:
    """The layout of the blocks that a mask [out_blocks, in_blocks] has of a weight."""
    out, in_ = target.sizes
    return Layout.from_mask(mask.cpu().numpy(), target.block_size, out_features=out, in_features=in_)


def check_masks(targets: Iterable[Target], masks: Mapping[str, Tensor]) -> Masks:
    """The masks as booleans on the weights' devices, in the order of the targets.

    Raises:
        ValueError: a mask is missing or is for no target, has another shape than the target's grid, holds other numbers
            than 0 and 1, or names blocks that a block-sparse module does not have. The message has both shapes and the
            hashes of both layouts.
        TypeError: `masks` is no dict of tensors.
    """
    need("masks", "masks", masks, Mapping, "a dict of tensors")
    by_name = {target.name: target for target in targets}
    missing, more = ([n for n in a if n not in b] for a, b in ((by_name, masks), (masks, by_name)))
    if missing or more:
        raise ValueError(
            f"[masks] of another model: {_names('there is none for', missing)}{'; ' if missing and more else ''}"
            f"{_names('there is no weight for', more)}"
        )
    return {name: _checked(target, masks[name]) for name, target in by_name.items()}


def _names(what: str, names: list[str]) -> str:
    return f"{what} {', '.join(map(str, names))}" if names else ""


def _checked(target: Target, given: Any) -> Tensor:
    name = target.name
    if not isinstance(given, Tensor):
        raise TypeError(f"[masks] that of {name} is {shown(given)}, needs a torch.Tensor")
    need_strided("masks", **{f"that of {name}": given})
    mask = given.detach().to(target.parameter.device) != 0
    if tuple(given.shape) != target.grid:
        hashes = f"hash {_hash(given.detach() != 0, target.block_size)}" if given.dim() == 2 else "no hash"
        raise ValueError(
            f"[masks] that of {name} is {list(given.shape)} ({hashes}), needs {list(target.grid)} (hash "
            f"{hash(layout_of(target, target.present())):016x} with all blocks of {target.block_size})"
        )
    if not torch.equal(mask.to(given.dtype), given.detach().to(mask.device)):
        raise ValueError(f"[masks] that of {name} holds other numbers than 0 and 1")
    if target.layout is not None and bool((mask & ~target.present()).any()):
        raise ValueError(
            f"[masks] that of {name} {list(given.shape)} (hash {hash(layout_of(target, mask)):016x}) has blocks that "
            f"its layout {list(target.grid)} (hash {hash(target.layout):016x}) does not have"
        )
    return mask


def _hash(mask: Tensor, block_size: int) -> str:
    return f"{hash(Layout.from_mask(mask.cpu().numpy(), block_size)):016x}" if min(mask.shape) else "of nothing"


def apply_masks(targets: Iterable[Target], masks: Mapping[str, Tensor]) -> None:
    """Zeroes the blocks of the weights that are not live. All masks are checked before any weight is changed.

    Raises:
        ValueError: as `check_masks`.
    """
    targets = list(targets)
    checked = check_masks(targets, masks)
    for target in targets:
        target.keep_(target.parameter.data, checked[target.name])


def masks_of_zeros(targets: Iterable[Target]) -> Masks:
    """Masks of the blocks that are not all zero, of weights that were pruned elsewhere."""
    return {target.name: target.norms(float("inf")) != 0 for target in targets}


def masks_to_bsr(targets: Iterable[Target], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The live blocks of linear weights as `torch.sparse_bsr` tensors [out, in]; those of dense weights are copies.

    Raises:
        ValueError: as `check_masks`; or a weight is a filter, or its features are no multiples of the block size, which
            BSR cannot say.
    """
    targets = list(targets)
    checked, found = check_masks(targets, masks), {}
    for target in targets:
        layout = layout_of(target, checked[target.name])
        if target.layout is None:
            values = from_dense(target.matrix(), layout)
        elif target.layout.transposed:
            raise ValueError(f"[masks] {target.name} has a transposed layout, which BSR cannot say")
        else:
            values = target.blocks()[checked[target.name][target.places()]]
        if values.dim() != 3:
            raise ValueError(
                f"[masks] {target.name} is a filter of {list(target.parameter.shape)}, which BSR cannot say"
            )
        found[target.name] = to_bsr(values, layout)
    return found


def masks_from_bsr(matrices: Mapping[str, Tensor]) -> Masks:
    """The masks of the blocks that `torch.sparse_bsr` tensors store.

    Raises:
        ValueError: one is not 2-D, or its blocks are not square.
        TypeError: one is no such tensor.
    """
    return {name: torch.from_numpy(_values_and_layout(tensor)[1].mask()) for name, tensor in matrices.items()}
