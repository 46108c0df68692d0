"""`convert`: block-sparse layers in the places of pruned ones, where they are faster."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from ...._core.arguments import need, shown, to_count, to_number
from ...lent_weights import lenders_of, need_own_weights
from ...mlp_parts import MLPParts
from ...mlp_surgery import put_mlp
from ...modes import evaluating
from ...modules.layer import BlockSparseLayer
from ...modules.mlp import BlockSparseMLP
from ...surgery import put
from ..batches import Forward
from ..progress import bar
from ..weights.masked_layer import disown_left, need_free
from ..weights.masks import check_masks
from ..weights.targets import Target, candidates, find_targets
from .alike import alike, kind_of_group, kind_of_layer
from .mlps import Composed, Layers, pruned_mlps, sparse_mlp
from .storage import Group, grouped, obstacle, sparse_layer
from .timing import Seen, Timing, guess, input_for, time_layers, watch

TOKENS = 512  # where nobody says what the layers will be fed
DELAY_S = 3.0  # from which on there is a bar


def convert(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    block_size: int = 32,
    min_speedup: float = 1.0,
    example: Any = None,
    seen: Mapping[str, Seen] | None = None,
    tokens: int = TOKENS,
    forward: Forward = None,
    timings: dict[str, Timing] | None = None,
    progress: bool | None = None,
    _owner: object = None,
) -> nn.Module:
    """Puts block-sparse layers in the places of pruned ones where they are measured faster on the model's device. ::

        timings = {}
        model = bss.convert(model, masks, example=batch, timings=timings)

    Each layer is timed as it is and as a block-sparse one, both with weights in the cache, with PyTorch's number of
    threads, fed as in the model's run over the example. A layer that would become slower keeps its zeros and its place.
    Layers that are block-sparse already keep the blocks of the mask alone.

    The feed-forward part of a transformer, all of whose layers were pruned, becomes one `BlockSparseMLP` where that is
    faster than they are one by one. The model has to call the part as a whole when it runs over the example. Without an
    example a `torch.nn.Sequential` becomes one only inside another: a model may call its layers one by one.

    Layers that are alike are timed once: of one class, with the same sizes, strides, options, dtype and input, and
    numbers of blocks that differ by at most a tenth. The one with the most blocks is timed, and stands for all. Which
    blocks they are is not looked at. A pair takes about 0.1 s, where a call takes over 10 ms half a second or eight
    calls of both.

    Calls are eager. On a card the host's part of short ones does not count, as in a CUDA graph: a model that is run
    eagerly with few tokens waits for launches, of which a block-sparse layer has no fewer. What `torch.compile` fuses
    around a dense layer is not seen. Time the whole model, as it will run.

    New layers share the old ones' biases. Their weights are new parameters, which want gradients where the old ones
    did: make the optimizer afterwards. Gates that no pruner has, as in a copy of a pruner's model, are taken away. All
    layers are made and timed before the first one is replaced.

    What has hooks, or a forward of its own, stays as it is, for these would be lost. A warning names such layers. To
    have them converted, take the hooks away and register them anew afterwards.

    Args:
        model: is changed.
        masks: {name: [out_blocks, in_blocks]}, as `sparsify_` and pruners give them. Values of other blocks are lost.
        block_size: edge of their blocks.
        min_speedup: times before / after from which on a layer is replaced. 0: all are, without timing any.
        example: a batch to run the model over: how it is fed decides what is faster.
        seen: what the layers are fed, {module's name: Seen}, in place of an example.
        tokens: rows of x for layers that neither tells of; pixels of a convolution.
        forward: how the model is called on the example; see `sparsify_`.
        timings: is filled with the times of each layer, by its name.
        progress: whether to show a bar when timing takes more than three seconds. None: on a terminal.

    Returns:
        The model; the new layer, if the model is itself a layer.

    Raises:
        TypeError: something is of another type.
        ValueError: the masks are not of this model (see `check_masks`), a pruner that is attached, SET or RigL
            has one of its layers, an `L0` is still learning gates, by which the model multiplies its weights, `seen`
            names something else, or there are no kernels for the device.
    """
    need("convert", "model", model, nn.Module, "a torch.nn.Module")
    if not to_number("convert", "min_speedup", min_speedup) >= 0:
        raise ValueError(f"[convert] min_speedup is {shown(min_speedup)}, needs 0 or more")
    tokens = to_count("tokens", tokens, "convert", least=1)
    for name, what in (seen or {}).items():
        need("convert", f"seen[{name!r}]", what, Seen, "a Seen")
    need("convert", "masks", masks, Mapping, "a dict of tensors")
    if not masks:
        return model
    need_own_weights("convert", model)
    targets = targets_of(model, masks, block_size)
    checked = check_masks(targets, masks)
    groups = grouped(targets)
    if left := [f"{group[0].module_name} ({why})" for group in groups if (why := obstacle(group))]:
        warnings.warn(f"[convert] left as they are, with zeros: {', '.join(left)}", stacklevel=2)
    groups = [group for group in groups if not obstacle(group)]
    need_free("convert", [target for group in groups for target in group], _owner)
    if strange := set(seen or {}) - {name for name, _ in model.named_modules(remove_duplicate=False)}:
        raise ValueError(f"[convert] seen names {', '.join(sorted(strange))}, which the model has not")
    shapes, called = dict(seen or {}), None
    if example is not None:
        modules = dict(model.named_modules())
        watched = watch(modules, model, example, forward)
        shapes |= watched
        called = {modules[name] for name in watched}
    fed = {group[0].path: shapes.get(group[0].path) or guess(group[0].module, tokens) for group in groups}
    made = {group[0].module: sparse_layer(group, checked) for group in groups}
    whole: dict[str, tuple[MLPParts, BlockSparseMLP]] = {}
    if min_speedup > 0:
        times = {} if timings is None else timings
        made = _faster_layers(groups, made, fed, min_speedup, times, progress)
        mlps = pruned_mlps(model, _paths(groups), called)
        whole = _faster_mlps(mlps, groups, checked, made, fed, min_speedup, times, progress)
    elif groups:
        _try(groups[0][0].module_name, made[groups[0][0].module], fed[groups[0][0].path])
    for target in targets:
        if target.module not in made:
            target.keep_(target.parameter.data, checked[target.name])
    for name, (parts, mlp) in whole.items():
        put_mlp(model, name, parts, mlp)
    disown_left(targets)
    for lender in lenders_of(model):  # of a copy; none of them lends any more
        lender.remove()
    return replaced(model, made)


def _faster_layers(
    groups: list[Group],
    made: Layers,
    fed: Mapping[str, Seen],
    min_speedup: float,
    times: dict[str, Timing],
    progress: bool | None,
) -> dict[nn.Module, nn.Module]:
    """Those of the layers that were made that are fast enough."""
    lists = alike(
        groups, lambda group: kind_of_group(group, fed[group[0].path]), lambda g: [blocks_of(made[g[0].module])]
    )
    found: dict[str, Timing] = {}
    with bar(progress, len(lists), "timing layers", "layer", DELAY_S) as done:
        for members in lists:
            path, module = members[0][0].path, members[0][0].module
            _try(members[0][0].module_name, made[module], fed[path])
            before, after = time_layers(module, made[module], fed[path])
            better = before / after >= min_speedup
            for target, *_ in members:
                density = density_of(made[target.module])
                found[target.path] = Timing(target.path, fed[path].shape, before, after, density, better, path)
            done()
    times.update((group[0].path, found[group[0].path]) for group in groups)
    return {group[0].module: made[group[0].module] for group in groups if times[group[0].path].converted}


def _paths(groups: list[Group]) -> dict[nn.Module, str]:
    """The names of modules whose `weight` was pruned."""
    return {group[0].module: group[0].path for group in groups if group[0].name == group[0].path}


def _faster_mlps(
    mlps: Mapping[str, MLPParts],
    groups: list[Group],
    masks: Mapping[str, Tensor],
    made: Layers,
    fed: Mapping[str, Seen],
    min_speedup: float,
    times: dict[str, Timing],
    progress: bool | None,
) -> dict[str, tuple[MLPParts, BlockSparseMLP]]:
    """MLPs by name that are faster as one module than their layers are, dense or as they were made."""
    paths = _paths(groups)
    built: dict[str, tuple[MLPParts, BlockSparseMLP]] = {}
    for name, parts in mlps.items():
        mlp = sparse_mlp(parts, masks, paths, next(g[0].block_size for g in groups if g[0].module is parts.up))
        if mlp is not None:
            built[name] = (parts, mlp)

    def kind(name: str) -> Hashable:
        parts = built[name][0]
        layers = layers_of(parts)
        kinds = [(kind_of_layer(layer), layer in made) for layer in layers]
        return tuple(kinds), parts.activation, parts.joined, fed[paths[parts.up]]

    def blocks(name: str) -> list[int]:
        parts, mlp = built[name]  # in which gate and up have the blocks of both
        layers = [layer for layer in layers_of(parts) if layer in made]
        return [blocks_of(mlp), sum(blocks_of(made[layer]) for layer in layers)]

    lists = alike(built, kind, blocks)
    faster: set[str] = set()
    with bar(progress, len(lists), "timing feed-forward parts", "part", DELAY_S) as done:
        for members in lists:
            parts, mlp = built[members[0]]
            seen = fed[paths[parts.up]]
            before, after, better = _timed_mlp(members[0], parts, mlp, made, seen, min_speedup)
            for name in members if better else ():
                density = density_of(built[name][1])
                times[name] = Timing(name, seen.shape, before, after, density, True, members[0])
                faster.add(name)
            done()
    return {name: both for name, both in built.items() if name in faster}


def _timed_mlp(
    name: str, parts: MLPParts, mlp: nn.Module, made: Layers, fed: Seen, min_speedup: float
) -> tuple[float, float, bool]:
    """Seconds of the dense MLP and as one module; and whether that also beats its layers one by one."""
    dense, one_by_one = Composed(parts, {}), Composed(parts, made)
    _try(name, mlp, fed)
    before, after = time_layers(dense, mlp, fed)
    single = time_layers(one_by_one, mlp, fed)
    return before, after, before / after >= min_speedup and single[0] >= single[1]


def layers_of(parts: MLPParts) -> list[nn.Module]:
    """Of a feed-forward part: up, down, and gate if it has one of its own."""
    return [layer for layer in (parts.up, parts.down, parts.gate) if layer is not None]


def targets_of(model: nn.Module, masks: Mapping[str, Tensor], block_size: int) -> list[Target]:
    """The targets that masks are of.

    Raises:
        ValueError: a mask is of nothing.
    """
    need("masks", "masks", masks, Mapping, "a dict of tensors")
    if masks.keys().isdisjoint(target.name for target, _ in candidates(model, block_size)):
        wrapped = next((name for name in ("_orig_mod", "module") if hasattr(model, name)), None)
        hint = "" if wrapped is None else f". The model is a {type(model).__name__}: give what it wraps, its .{wrapped}"
        raise ValueError(f"[masks] of another model: there is no weight for {', '.join(map(str, masks))}{hint}")
    return find_targets(model, block_size, targets=lambda name, _: name in masks)


def replaced(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The model with new layers in all places of the old ones."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in made and name:
            put(model, name, made[module])
    return made.get(model, model)


def blocks_of(layer: nn.Module) -> int:
    """Live blocks of a layer, or of all of its parts."""
    return sum(part.layout.blocks for part in layer.modules() if isinstance(part, BlockSparseLayer))


def density_of(layer: nn.Module) -> float:
    """Live blocks / all blocks of a layer, or of all recurrent ones of an LSTM."""
    grids = [part.layout.grid for part in layer.modules() if isinstance(part, BlockSparseLayer)]
    return blocks_of(layer) / max(1, sum(a * b for a, b in grids))


def _try(path: str, layer: nn.Module, fed: Seen) -> None:
    """Raises ValueError where there are no kernels for the layer's device."""
    weight = next(layer.parameters())
    x = input_for(fed, weight.device).to(weight.dtype)
    try:
        with evaluating(layer):  # dropout would draw random numbers
            layer(x)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"[convert] {path} is on {weight.device}, where its block-sparse form does not run: {error}"
        ) from error
