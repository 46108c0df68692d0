"""`compact_`: layers move to block-sparse storage in mid-training, and their optimizer's state with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...._core.arguments import need
from ...lent_weights import need_own_weights
from ..optimizer.moments import inner_optimizer, replace_parameter
from ..weights.masked_layer import Layer, need_free
from ..weights.masks import check_masks, layout_of
from ..weights.targets import Target
from .convert import replaced, targets_of
from .storage import Group, grouped, obstacle, sparse_layer, values_of

Pick = Callable[[Tensor], Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def compact_(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    optimizer: Optimizers = None,
    *,
    block_size: int = 32,
    _owner: object = None,
) -> dict[str, nn.Module]:
    """Puts block-sparse layers in the places of pruned ones, and lets the optimizer go on with their parameters.

    A layer's weight [out, in] becomes a new parameter [blocks, b, b], at its place in the optimizer's groups. Of its
    gradient and of each moment the live blocks are kept, bit for bit; counts of steps stay. Biases stay the parameters
    that they were. So the next step does to the live blocks what it would have done, up to the order of sums. Layers
    that are block-sparse already move to the blocks of the mask alone.

    All is checked before anything is changed. A learning rate scheduler or a GradScaler goes on with the optimizer.

    Args:
        model: is changed.
        masks: {name: [out_blocks, in_blocks]}.
        optimizer: that trains these weights, or several of which one does. None: there is none.
        block_size: edge of the blocks.

    Returns:
        The new layers, by name. Layers without a block-sparse form that trains alike (LSTMs, whose two biases become
        one) are left as they are, with a warning that names them.

    Raises:
        ValueError: the masks are not of this model; the optimizer does not hold a layer's weight, or keeps state of it
            in another form than the weight's (as Adafactor does), or has a list of parameters of its own (LBFGS); a
            pruner, SET or RigL has a layer, and would go on with the old one; an `L0` is still learning gates, by which
            the model multiplies its weights; the model is itself a layer, whose place nobody knows; or it is inside of
            DistributedDataParallel, which has to be made anew with the new parameters.
    """
    need("compact", "model", model, nn.Module, "a torch.nn.Module")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "[compact] the model is inside of DistributedDataParallel, which would go on with the old parameters: "
            "give model.module, and wrap it again"
        )
    need("compact", "masks", masks, Mapping, "a dict of tensors")
    optimizers = _listed(optimizer)
    if not masks:
        return {}
    need_own_weights("compact", model)
    targets = targets_of(model, masks, block_size)
    checked = check_masks(targets, masks)
    groups, left = [], []
    for group in grouped(targets):
        why = _obstacle(group)
        left += [f"{group[0].module_name} ({why})"] if why else []
        groups += [] if why else [group]
    need_free("compact", [target for group in groups for target in group], _owner)
    need_places("compact", [target for group in groups for target in group])
    if left:
        warnings.warn(f"[compact] left as they are, with zeros: {', '.join(left)}", stacklevel=2)
    for group in groups:
        if optimizers:
            _check(optimizers, group)
    made: dict[str, nn.Module] = {}
    for group in groups:
        made[group[0].path] = sparse_layer(group, checked)
    for group in groups:
        _move(optimizers, group, checked, cast(Any, made[group[0].path]))
    replaced(model, {group[0].module: made[group[0].path] for group in groups})
    return made


def need_places(op: str, targets: Sequence[Target]) -> None:
    """Raises ValueError if the model is itself one of the layers, so that no other can be put in its place."""
    if any(target.path == "" and not _obstacle([target]) for target in targets):
        raise ValueError(
            f"[{op}] the model is itself the layer that would move to block-sparse storage, so the caller would go on "
            "with the old one: put it into a torch.nn.Sequential"
        )


def due(layer: Layer, densities: Sequence[float]) -> bool:
    """Whether a pruner's layer has come down to one of the densities since its weight was stored as it is."""
    blocks = layer.target.grid[0] * layer.target.grid[1]
    live = int(layer.mask.sum()) / blocks
    stored = 1.0 if layer.target.layout is None else layer.target.layout.density
    return any(live <= density < stored for density in densities)


def move_layers(
    model: nn.Module, layers: Sequence[Layer], optimizers: Sequence[torch.optim.Optimizer], owner: object
) -> None:
    """`compact_` for layers that a pruner has, the owner, which goes on with them.

    What cannot move (an LSTM, say) stays as it is. Raises what `compact_` does.
    """
    movable = [layer for layer in layers if not _obstacle([layer.target])]
    if not movable:
        return
    shadows = {}
    for layer in movable:
        mask, shadow = layer.mask, layer.shadow
        kept = None if shadow is None else values_of(layer.target, mask, layout_of(layer.target, mask), shadow).clone()
        shadows[layer.target.name] = kept
    masks = {layer.target.name: layer.mask for layer in movable}
    made = compact_(model, masks, optimizers, block_size=movable[0].target.block_size, _owner=owner)
    for layer in movable:
        old = layer.target
        new = Target(old.name, old.path, made[old.path], "weight", old.block_size)
        layer.move(new, shadows[old.name])


def _obstacle(group: Group) -> str:
    return obstacle(group) or ("an LSTM's two biases would become one" if isinstance(group[0].module, nn.LSTM) else "")


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    return [inner_optimizer("compact", one) for one in several]


def _check(optimizers: list[torch.optim.Optimizer], group: Group) -> None:
    target = group[0]
    parameter = target.parameter
    held = [optimizer for optimizer in optimizers if _holds(optimizer, parameter)]
    if not held:
        raise ValueError(f"[compact] the optimizer does not hold {target.name}")
    for optimizer in held:
        if any(parameter is other for other in getattr(optimizer, "_params", ())):
            raise ValueError(
                f"[compact] a {type(optimizer).__name__} keeps a list of parameters of its own, so it would go on with "
                f"the old one of {target.name}"
            )
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"[compact] the optimizer's {name} of {target.name} is {list(value.shape)}, needs the weight's "
                    f"shape {list(parameter.shape)}: a {type(optimizer).__name__} cannot go on with blocks"
                )


def _holds(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is other for group in optimizer.param_groups for other in group["params"])


@torch.no_grad()
def _move(optimizers: list[torch.optim.Optimizer], group: Group, masks: Mapping[str, Tensor], layer: nn.Module) -> None:
    target = group[0]
    old, new = target.parameter, cast(nn.Parameter, layer.weight)
    mask = masks[target.name]
    layout = layout_of(target, mask)

    def pick(tensor: Tensor) -> Tensor:
        # As the new weight lies in memory: fused optimizers go through all tensors by the same strides.
        return values_of(target, mask, layout, tensor).clone(memory_format=torch.contiguous_format)

    if old.grad is not None:
        new.grad = pick(old.grad)
    pairs: list[tuple[Any, Any, Pick]] = [(old, new, pick)]
    gates = getattr(target.module, "gates", None)
    if isinstance(gates, nn.Parameter):  # of one of our own layers: one a block
        pairs.append((gates, layer.gates, lambda gate: gate[mask[target.places()]].clone()))
    for optimizer in optimizers:
        for before, after, of in pairs:
            if _holds(optimizer, before):
                replace_parameter(optimizer, before, after, of)
