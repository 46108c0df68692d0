"""From masked weights to block-sparse storage: the layer that holds the live blocks of another alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ....layout import Layout
from ... import convert
from ...layer_records import make, record_of
from ...modules.conv import DENSE, DENSE_TRANSPOSED
from ...modules.digits import pattern_of
from ...modules.layer import BlockSparseLayer
from ...modules.linear import BlockSparseLinear
from ...modules.lstm import BlockSparseLSTM
from ...own_behaviour import lost_with
from ...surgery import SPARSE
from ..weights.masks import layout_of
from ..weights.targets import Target

Group = list[Target]  # those of one module


def grouped(targets: list[Target]) -> list[Group]:
    """The targets by their modules, in order."""
    groups: dict[nn.Module, Group] = {}
    for target in targets:
        groups.setdefault(target.module, []).append(target)
    return list(groups.values())


def obstacle(group: Group) -> str:
    """What keeps a module from becoming a block-sparse one; "" if nothing does."""
    module: Any = group[0].module
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if lost := lost_with(module):
        return f"it has {lost}, which would be lost"
    if isinstance(module, BlockSparseLayer):
        return "" if record_of(module) is not None else f"it is a {type(module).__name__}, a class of its own"
    if isinstance(module, nn.LSTM):
        plain = type(module) is nn.LSTM and not module.bidirectional and module.proj_size == 0
        return "" if plain else "the LSTM is bidirectional or projects"
    if isinstance(module, (*DENSE, *DENSE_TRANSPOSED)):
        if module.padding_mode != "zeros":
            return f"padding_mode is {module.padding_mode!r}, needs 'zeros'"
        return "" if type(module) in SPARSE else f"it is a {type(module).__name__}, a class of its own"
    linear = type(module) is nn.Linear or not isinstance(module, nn.Linear)  # the latter: transformers' Conv1D
    return "" if linear else f"it is a {type(module).__name__}, whose weight others may read"


def values_of(target: Target, mask: Tensor, layout: Layout, tensor: Tensor) -> Tensor:
    """The live blocks [blocks, ..., b, b] of a tensor of the weight's shape: of the weight, its gradient, a moment."""
    if target.layout is None:
        return convert.from_dense(target.matrix(tensor), layout)
    if not target.layout.transposed:
        return tensor[mask[target.places()]]
    kernel = getattr(target.module, "kernel_size", None)
    return convert.from_dense(convert.to_dense(tensor, target.layout, kernel), layout)


def keeping_random(device: torch.device) -> AbstractContextManager[None]:
    """The generators' states are the same behind it: layers draw weights when they are made, which blocks replace."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def sparse_layer(group: Group, masks: Mapping[str, Tensor]) -> nn.Module:
    """A new layer with the live blocks of a module's weights; it shares the module's bias. Draws no random numbers.

    Args:
        group: the targets of a module without an `obstacle`.
        masks: by the targets' names.
    """
    with torch.no_grad(), keeping_random(group[0].parameter.device):
        return _sparse_layer(group, masks)


def _sparse_layer(group: Group, masks: Mapping[str, Tensor]) -> nn.Module:
    target, module = group[0], cast(Any, group[0].module)
    mask = masks[target.name].to(target.parameter.device)
    layout = layout_of(target, mask)
    if isinstance(module, nn.LSTM):
        return _sparse_lstm(module, group, masks)
    values = values_of(target, mask, layout, target.parameter.detach())
    if isinstance(module, BlockSparseLayer):
        layer = _smaller(module, target, mask, layout, values)
    elif isinstance(module, (*DENSE, *DENSE_TRANSPOSED)):
        layer = SPARSE[type(module)].from_dense(module, layout=layout)
    else:
        options: Any = {"device": values.device, "dtype": values.dtype}
        layer = BlockSparseLinear(layout.in_features, layout.out_features, layout, module.bias is not None, **options)
        layer.weight.copy_(values)
    layer.weight.requires_grad_(module.weight.requires_grad)
    if module.bias is not None:
        layer.bias = module.bias
    return cast(nn.Module, layer.train(module.training))


def _smaller(
    module: BlockSparseLayer, target: Target, mask: Tensor, layout: Layout, values: Tensor
) -> BlockSparseLayer:
    record = record_of(module)
    assert record is not None
    tensors = {**module.state_dict(), "weight": values.clone(), "pattern": pattern_of(layout, values.device)}
    if module.gates is not None:
        grid = module.gates.new_zeros(target.grid)
        grid[target.places()] = module.gates.detach()
        out, in_ = (torch.from_numpy(a).to(mask.device, torch.int64) for a in layout.coordinates())
        tensors["gates"] = grid[out, in_]
    layer = cast(BlockSparseLayer, make(record, tensors))
    layer.load_state_dict({name: tensors[name] for name in layer.state_dict()}, assign=True)  # not a pruner's gates
    layer.place(values.device)
    if module.gates is not None:
        cast(nn.Parameter, layer.gates).requires_grad_(module.gates.requires_grad)
    return layer


def _sparse_lstm(lstm: nn.LSTM, group: Group, masks: Mapping[str, Tensor]) -> nn.Module:
    by_name = {target.parameter_name: target for target in group}
    layouts = []
    for i in range(lstm.num_layers):
        target = by_name.get(f"weight_hh_l{i}")
        if target is None:  # is not pruned, so has all of its blocks
            target = Target("", "", lstm, f"weight_hh_l{i}", group[0].block_size)
            layouts.append(layout_of(target, target.present()))
        else:
            layouts.append(layout_of(target, masks[target.name]))
    layer = BlockSparseLSTM.from_dense(lstm, layout=layouts)
    for i in range(lstm.num_layers):
        for mine, theirs in (
            (layer.input[i].weight, ("weight_ih",)),
            (layer.input[i].bias, ("bias_ih", "bias_hh")),  # their sum
            (layer.recurrent[i].weight, ("weight_hh",)),
        ):
            if mine is not None:
                mine.requires_grad_(any(getattr(lstm, f"{name}_l{i}").requires_grad for name in theirs))
    return layer.train(lstm.training)
