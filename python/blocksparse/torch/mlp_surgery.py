"""Putting block-sparse MLPs in the place of a network's dense ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from .._core.arguments import need, shown
from .mlp_parts import MLPParts, mlp_parts
from .modules.mlp import BlockSparseMLP
from .surgery import put

Chosen = str | Callable[[str, nn.Module], bool] | None


def find_mlps(model: nn.Module) -> dict[str, MLPParts]:
    """The feed-forward parts of a network by name, those that `mlp_parts` knows. Nothing is changed.

    One whose layers or parameters other modules use too is left out. One that is at several places is there once.
    Whether the network calls a part as a whole is not known: see `is_called_whole`.
    """
    need("find_mlps", "model", model, nn.Module, "a torch.nn.Module")
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    places = {_place(model, name) for name, _ in model.named_modules(remove_duplicate=False) if name}
    uses.update(child for _, _, child in places)
    found: dict[str, MLPParts] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):  # what torch.compile has wrapped, say
            continue
        parts = mlp_parts(module)
        if parts is not None and not _shared(parts, uses):
            found[name] = parts
    return found


def is_called_whole(model: nn.Module, part: nn.Module) -> bool:
    """Whether a network calls a part itself, as far as that is known without running it.

    Through the layers of a `torch.nn.Sequential` a network may also go one by one, which no `BlockSparseMLP` allows. It
    is known to be called where what has it is a `torch.nn.Sequential`, too. All other modules are taken to be called.
    """
    owners = [module for module in model.modules() if any(child is part for child in module.children())]
    return not isinstance(part, nn.Sequential) or all(type(m).forward is nn.Sequential.forward for m in owners)


def put_mlp(model: nn.Module, name: str, parts: MLPParts, mlp: BlockSparseMLP) -> None:
    """Puts a block-sparse MLP in the place of the dense one of that name, and in all others that it has in the model.

    Where the dense one is two halves of a larger module (BERT), the MLP takes the place of the first,
    `<name>.intermediate`, and the linear layer of the second one, `<name>.output.dense`, becomes an identity.

    Raises:
        ValueError: the model is itself what is to be replaced, or the parts are no longer there.
    """
    if model.get_submodule(name) is not parts.module:
        raise ValueError(f"[put_mlp] {name!r} is not what it was when its parts were found")
    if parts.halves:
        second: Any = parts.module.output
        parts.module.intermediate = mlp
        second.dense = nn.Identity()
        return
    if not name:
        raise ValueError("[put_mlp] the model is an MLP itself: use BlockSparseMLP.from_dense")
    for place, module in list(model.named_modules(remove_duplicate=False)):
        if module is parts.module:
            put(model, place, mlp)


def replace_mlps(
    model: nn.Module, chosen: Chosen = None, *, block_size: int = 32, **options: Any
) -> dict[str, BlockSparseMLP]:
    r"""Replaces the feed-forward parts of a network, those that `find_mlps` finds, by block-sparse ones. ::

        replaced = bst.replace_mlps(llama, density=0.1, block_size=64)
        replaced = bst.replace_mlps(llama, r"layers\.(1\d|2\d)\.", density=0.1)

    Parameters of what was replaced are new ones: make the optimizer afterwards.

    Args:
        model: is changed, once all MLPs are made.
        chosen: which ones: a regular expression found in their names, or a function of name and module. It has to leave
            out those whose layers the network calls one by one. None: all that are called whole. A
            `torch.nn.Sequential` is known to be, without a run of the network, in another one alone.
        block_size: edge of a block.
        options: what `BlockSparseMLP.from_dense` takes: `density`, or `pruned=True`.

    Returns:
        The new modules by the names of the dense ones.

    Raises:
        ValueError: there is no such MLP, or one cannot be made.
    """
    op = "replace_mlps"
    need(op, "model", model, nn.Module, "a torch.nn.Module")
    takes = (lambda _, part: is_called_whole(model, part)) if chosen is None else _by_name(op, chosen)
    found = find_mlps(model)
    wanted = {name: parts for name, parts in found.items() if takes(name, parts.module)}
    if not wanted:
        there = ", ".join(found) or "none"
        raise ValueError(f"[{op}] no MLP was chosen by {shown(chosen)}; of those that are known the model has: {there}")
    made: dict[str, BlockSparseMLP] = {}
    for name, parts in wanted.items():
        try:
            made[name] = BlockSparseMLP.from_dense(parts, block_size=block_size, **options)
        except ValueError as error:
            raise ValueError(f"[{op}] {name}: {error}") from error
    for name, mlp in made.items():
        put_mlp(model, name, wanted[name], mlp)
    return made


def _place(model: nn.Module, name: str) -> tuple[int, str, int]:
    """Where a module is: the one that has it, its name there, and which it is."""
    path, _, child = name.rpartition(".")
    return id(model.get_submodule(path)), child, id(model.get_submodule(name))


def _shared(parts: MLPParts, uses: Counter[int]) -> bool:
    layers = [layer for layer in (parts.gate, parts.up, parts.down) if layer is not None]
    if parts.halves:
        layers += [parts.module.get_submodule(half) for half in ("intermediate", "output")]
    return any(uses[id(used)] > 1 for layer in layers for used in (layer, *layer.parameters(recurse=False)))


def _by_name(op: str, chosen: str | Callable[[str, nn.Module], bool]) -> Callable[[str, nn.Module], bool]:
    if callable(chosen):
        return chosen
    need(op, "chosen", chosen, (str, re.Pattern), "a str, a function or None")
    try:
        wanted = re.compile(chosen)
    except re.error as error:
        raise ValueError(f"[{op}] chosen is {chosen!r}, needs a regular expression: {error}") from None
    return lambda name, _: wanted.search(name) is not None
