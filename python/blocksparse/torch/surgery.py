"""Putting block-sparse layers in the place of a network's dense ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from .._core.arguments import need, to_int
from .modules.conv import (
    DENSE,
    DENSE_TRANSPOSED,
    BlockSparseConv,
    BlockSparseConv1d,
    BlockSparseConv2d,
    BlockSparseConv3d,
    BlockSparseConvTranspose1d,
    BlockSparseConvTranspose2d,
    BlockSparseConvTranspose3d,
)

_SPARSE: dict[type[nn.Module], type[BlockSparseConv]] = {
    **dict(zip(DENSE, (BlockSparseConv1d, BlockSparseConv2d, BlockSparseConv3d), strict=True)),
    **dict(
        zip(
            DENSE_TRANSPOSED,
            (BlockSparseConvTranspose1d, BlockSparseConvTranspose2d, BlockSparseConvTranspose3d),
            strict=True,
        )
    ),
}


def replace_convolutions(
    model: nn.Module,
    filter: str | Callable[[str, nn.Module], bool] | None = None,
    *,
    density: float,
    block_size: int = 32,
) -> dict[str, BlockSparseConv]:
    """Replaces convolutions of a network by block-sparse ones that keep their blocks of the largest norms. ::

        replaced = bst.replace_convolutions(resnet, r"layer[34].*conv2", density=0.25, block_size=32)

    Parameters of what was replaced are new ones: make the optimizer afterwards. They want gradients where the old ones
    did. Hooks of what was replaced are not taken over.

    Args:
        model: is changed.
        filter: which ones: a regular expression found in their names, or a function of name and module. None: all
            without groups whose channels are a block at least on either side.
        density: share of blocks to keep; see `select_blocks`.
        block_size: edge of a block, in channels.

    Returns:
        The new layers by name.

    Raises:
        ValueError: no convolution was chosen, one cannot be replaced (a parametrized or pruned one, say), or the model
            is itself one.
    """
    need("replace_convolutions", "model", model, nn.Module, "a torch.nn.Module")
    block_size = to_int("block_size", block_size, op="replace_convolutions")
    if not callable(filter):
        need("replace_convolutions", "filter", filter, (str, re.Pattern, NoneType), "a str, a function or None")
    chosen = filter if callable(filter) else _by_name(filter, block_size)
    made: dict[nn.Module, BlockSparseConv] = {}  # a module may have several names
    replaced = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        kind = _SPARSE.get(parametrize.type_before_parametrizations(module))
        if kind is None or not chosen(name, module):
            continue
        if not name:
            raise ValueError("[replace_convolutions] the model is a convolution itself: use from_dense")
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"[replace_convolutions] {name} is parametrized: call torch.nn.utils.parametrize."
                "remove_parametrizations first, or leave it out by filter"
            )
        own = {key for key, _ in module.named_parameters(recurse=False)}
        if not own <= {"weight", "bias"}:  # hooks make its weight, as those of pruning and of the older weight_norm do
            raise ValueError(
                f"[replace_convolutions] {name} has the parameters {', '.join(sorted(own))}, needs weight and bias "
                "alone: remove what computes them first (torch.nn.utils.remove_weight_norm, prune.remove), or leave it "
                "out by filter"
            )
        if module not in made:
            try:
                made[module] = kind.from_dense(module, density=density, block_size=block_size)
            except ValueError as error:
                raise ValueError(f"[replace_convolutions] {name}: {error}") from error
            made[module].train(module.training)
            for key, parameter in module.named_parameters(recurse=False):
                made[module].get_parameter(key).requires_grad_(parameter.requires_grad)
        replaced[name] = made[module]
    if not replaced:
        raise ValueError(f"[replace_convolutions] no convolution was chosen by {filter!r} and blocks of {block_size}")
    for name, layer in replaced.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return replaced


def _by_name(pattern: str | None, block_size: int) -> Callable[[str, nn.Module], bool]:
    if pattern is not None:
        return lambda name, _: re.search(pattern, name) is not None

    def wide(_: str, module: Any) -> bool:
        return module.groups == 1 and min(module.in_channels, module.out_channels) >= block_size

    return wide
