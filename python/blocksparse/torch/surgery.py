"""Putting block-sparse layers in the place of dense ones: one layer, or those of a network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar, cast, overload

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._core.arguments import need, to_int
from ..layout import Layout
from . import convert
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
from .modules.layer import BlockSparseLayer
from .modules.linear import BlockSparseLinear
from .modules.lstm import BlockSparseLSTM
from .own_behaviour import lost_with

Filter = str | Callable[[str, nn.Module], bool] | None
_Layer = TypeVar("_Layer", bound=BlockSparseLayer)

_CONVOLUTIONS: dict[type[nn.Module], type[BlockSparseConv]] = {
    **dict(zip(DENSE, (BlockSparseConv1d, BlockSparseConv2d, BlockSparseConv3d), strict=True)),
    **dict(
        zip(
            DENSE_TRANSPOSED,
            (BlockSparseConvTranspose1d, BlockSparseConvTranspose2d, BlockSparseConvTranspose3d),
            strict=True,
        )
    ),
}
_LINEARS: dict[type[nn.Module], type[BlockSparseLinear]] = {nn.Linear: BlockSparseLinear}
SPARSE: dict[type[nn.Module], Any] = {**_CONVOLUTIONS, **_LINEARS, nn.LSTM: BlockSparseLSTM}  # by the dense class


@overload
def from_dense(weight: Tensor, layout: Layout) -> Tensor: ...


@overload
def from_dense(weight: nn.Module, layout: Layout | None = None, **options: Any) -> Any: ...


def from_dense(weight: Tensor | nn.Module, layout: Layout | None = None, **options: Any) -> Any:
    """The blocks of a dense weight or layer. ::

        layer = bst.from_dense(linear, density=0.1)  # a BlockSparseLinear with the blocks of the largest norms
        layer = bst.from_dense(linear, layout)  # with those of a layout
        values = bst.from_dense(linear.weight, layout)  # [blocks, b, b], differentiable

    Args:
        weight: [out, in], or a filter [out, in, size...] (that of a transposed convolution, [in, out, size...], needs
            its first two dimensions exchanged); or a `torch.nn` Linear, convolution or LSTM.
        layout: which blocks to take.
        options: of a layer: `density` and `block_size`, or what else its class's `from_dense` takes.

    Returns:
        Values [blocks, b, b], those of a filter [blocks, taps, b, b]; of a layer the block-sparse layer.

    Raises:
        ValueError: the weight does not have the layout's size; of a layer, not exactly one of density and layout is
            given, or it cannot be done.
        TypeError: it is no tensor and no such layer; or a weight comes without a layout.
    """
    if not isinstance(weight, nn.Module):
        if options or (layout is None and isinstance(weight, Tensor)):
            raise TypeError(
                "[from_dense] a weight needs a layout and nothing else: select_blocks(weight, density, block_size) "
                "makes one"
            )
        return convert.from_dense(weight, layout)
    kind = next((sparse for dense, sparse in SPARSE.items() if isinstance(weight, dense)), None)
    if kind is None:
        raise TypeError(f"[from_dense] a {type(weight).__name__}, needs a torch.nn Linear, convolution or LSTM")
    return kind.from_dense(weight, layout=layout, **options)


def replace_convolutions(
    model: nn.Module,
    filter: Filter = None,
    *,
    density: float,
    block_size: int = 32,
    targets: str | Collection[str] | None = None,
    ignore: str | Collection[str] = (),
) -> dict[str, BlockSparseConv]:
    """Replaces convolutions of a network by block-sparse ones that keep their blocks of the largest norms. ::

        replaced = bst.replace_convolutions(resnet, r"layer[34].*conv2", density=0.25, block_size=32)
        replaced = bst.replace_convolutions(resnet, density=0.25, targets=["layer3", "layer4"], ignore="downsample")

    Parameters of what was replaced are new ones: make the optimizer afterwards. They want gradients where the old ones
    did.

    Args:
        model: is changed.
        filter: which ones: a regular expression found in their names, or a function of name and module. None, and no
            targets: all without groups whose channels are a block at least on either side.
        density: share of blocks to keep; see `select_blocks`.
        block_size: edge of a block, in channels.
        targets: only those with one of these names, or in a part that has it: "conv2" and "layer3.0" are such names of
            "layer3.0.conv2".
        ignore: none of those.

    Returns:
        The new layers by name.

    Raises:
        ValueError: no convolution was chosen, one cannot be replaced (one that is parametrized or pruned, that has
            hooks or a forward of its own, which would be lost, or whose weight others use too, say), a name is that of
            nothing, or the model is itself a convolution.
    """
    options = _Options("replace_convolutions", "convolution", density, block_size)
    return _replace(options, _CONVOLUTIONS, model, filter, targets, ignore)


def replace_linears(
    model: nn.Module,
    filter: Filter = None,
    *,
    density: float,
    block_size: int = 32,
    targets: str | Collection[str] | None = None,
    ignore: str | Collection[str] = (),
) -> dict[str, BlockSparseLinear]:
    """Replaces linear layers of a network by block-sparse ones that keep their blocks of the largest norms. ::

        replaced = bst.replace_linears(transformer, density=0.1, ignore="lm_head")

    As `replace_convolutions`, of layers whose type is `torch.nn.Linear` itself: subclasses, such as the projection in
    `torch.nn.MultiheadAttention`, whose weight that module reads, stay as they are. `torch.nn.TransformerEncoderLayer`
    no longer takes the shortcut that reads its layers' weights.

    Args:
        model: is changed.
        filter: which ones: a regular expression found in their names, or a function of name and module. None, and no
            targets: all whose features are a block at least on either side.
        density: share of blocks to keep; see `select_blocks`.
        block_size: edge of a block.
        targets: only those with one of these names, or in a part that has it: "fc1" and "layers.0" are such names of
            "layers.0.fc1".
        ignore: none of those.

    Returns:
        The new layers by name.

    Raises:
        ValueError: as `replace_convolutions`.
    """
    options = _Options("replace_linears", "linear layer", density, block_size)
    return _replace(options, _LINEARS, model, filter, targets, ignore)


class _Options:
    """How layers are made, and who is asked."""

    def __init__(self, op: str, noun: str, density: float, block_size: int) -> None:
        self.op, self.noun, self.density = op, noun, density
        self.block_size = to_int("block_size", block_size, op=op)


def _replace(
    options: _Options,
    kinds: Mapping[type[nn.Module], type[_Layer]],
    model: nn.Module,
    filter: Filter,
    targets: str | Collection[str] | None,
    ignore: str | Collection[str],
) -> dict[str, _Layer]:
    op = options.op
    need(op, "model", model, nn.Module, "a torch.nn.Module")
    if not callable(filter):
        need(op, "filter", filter, (str, re.Pattern, NoneType), "a str, a function or None")
    wanted = None if targets is None else _names(op, "targets", targets, model)
    spared = _names(op, "ignore", ignore, model)
    chosen = (
        filter
        if callable(filter)
        else _by_name(op, filter, options.block_size if filter is None and wanted is None else None)
    )
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    made: dict[nn.Module, _Layer] = {}  # a module may have several names
    replaced = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        kind = kinds.get(parametrize.type_before_parametrizations(module))
        if kind is None or (wanted is not None and not _has(name, wanted)) or _has(name, spared):
            continue
        if not chosen(name, module):
            continue
        if not name:
            raise ValueError(f"[{op}] the model is a {options.noun} itself: use from_dense")
        if module not in made:
            made[module] = _made_of(options, kind, name, module, uses)
        replaced[name] = made[module]
    if not replaced:
        by = "".join(f", {key}={value!r}" for key, value in (("targets", targets), ("ignore", ignore)) if value)
        raise ValueError(f"[{op}] no {options.noun} was chosen by {filter!r}{by} and blocks of {options.block_size}")
    for name, layer in replaced.items():
        put(model, name, layer)
    return replaced


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts a layer in the place of the one of that name."""
    path, _, child = name.rpartition(".")
    parent = model.get_submodule(path)
    setattr(parent, child, layer)
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # what its shortcut asks for, which reads the weights as dense ones
        for above in _on_the_way(model, path):
            if isinstance(above, nn.TransformerEncoder):
                above.use_nested_tensor = False  # which it makes of padded inputs for the shortcut alone


def _on_the_way(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules from the model to the one of that name."""
    yield model
    for part in path.split(".") if path else ():
        model = getattr(model, part)
        yield model


def _made_of(options: _Options, kind: type[_Layer], name: str, module: nn.Module, uses: Counter[int]) -> _Layer:
    op = options.op
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"[{op}] {name} is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first, or leave "
            "it out by filter"
        )
    own = dict(module.named_parameters(recurse=False))
    if not own.keys() <= {"weight", "bias"}:  # hooks make its weight, as those of pruning and of the older weight_norm
        raise ValueError(
            f"[{op}] {name} has the parameters {', '.join(sorted(own))}, needs weight and bias alone: remove what "
            "computes them first (torch.nn.utils.remove_weight_norm, prune.remove), or leave it out by filter"
        )
    if lost := lost_with(module):
        raise ValueError(f"[{op}] {name} has {lost}, which would be lost: leave it out by ignore")
    if shared := [key for key, parameter in own.items() if uses[id(parameter)] > 1]:
        raise ValueError(
            f"[{op}] {name} shares its {shared[0]} with another module, which would keep the dense one: leave it out "
            "by ignore"
        )
    try:
        layer: _Layer = kind.from_dense(module, density=options.density, block_size=options.block_size)  # type: ignore[attr-defined]
    except ValueError as error:
        raise ValueError(f"[{op}] {name}: {error}") from error
    layer.train(module.training)
    for key, parameter in own.items():
        layer.get_parameter(key).requires_grad_(parameter.requires_grad)
    return layer


def _names(op: str, what: str, given: object, model: nn.Module) -> Sequence[str]:
    """Raises unless each is the name of a part of the model, or the end, beginning or middle of one."""
    names = [given] if isinstance(given, str) else list(cast(Any, given)) if isinstance(given, Collection) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"[{op}] {what} is {given!r}, needs a name or a list of names")
    there = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if not any(_has(full, [name]) for full in there):
            raise ValueError(f"[{op}] {what} has {name!r}, but no module has that name")
    return names


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(f".{part}." in f".{name}." for part in parts)


def _by_name(op: str, pattern: str | re.Pattern[str] | None, least: int | None) -> Callable[[str, nn.Module], bool]:
    if least is None:
        try:
            wanted = re.compile("" if pattern is None else pattern)
        except re.error as error:
            raise ValueError(f"[{op}] filter is {pattern!r}, needs a regular expression: {error}") from None
        return lambda name, _: wanted.search(name) is not None

    def wide(_: str, module: Any) -> bool:
        if isinstance(module, nn.Linear):
            return min(module.in_features, module.out_features) >= least
        return module.groups == 1 and min(module.in_channels, module.out_channels) >= least

    return wide
