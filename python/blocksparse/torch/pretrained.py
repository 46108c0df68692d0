"""Networks with block-sparse layers as one file: patterns and values, loaded without a second conversion."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._core.arguments import need
from ..layout import Layout
from . import tensor_file
from .layer_records import hash_of, make, misfit, record_of
from .lent_weights import need_own_weights
from .surgery import put

FORMAT = "blocksparse-pretrained-1"
_SHOWN = 3  # differences that a message names


def save_pretrained(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Writes a network to one safetensors file: all of it is there, or, if writing fails, what was there before. ::

        bst.save_pretrained(model, "small.safetensors")
        model = bst.load_pretrained(build, "small.safetensors")

    It holds the entries of the state dict, patterns among them, and how its block-sparse layers were made. Parameters
    that several modules share are written once, and shared again when they are loaded.

    Args:
        model: with block-sparse layers in it, or without.
        file: is overwritten.

    Raises:
        ValueError: a block-sparse layer is parametrized, the state dict holds what is no tensor or has no values, or an
            `L0` is still learning gates, by which the model multiplies its weights.
        OSError: it cannot be written.
        ImportError: safetensors is not installed.
    """
    need("save_pretrained", "model", model, nn.Module, "a torch.nn.Module")
    if Path(file).is_dir():
        raise IsADirectoryError(f"[save_pretrained] {file} is a folder, needs the name of a file")
    model = _unwrapped(model)
    need_own_weights("save_pretrained", model)
    entries = model.state_dict()
    for name, entry in entries.items():
        if not isinstance(entry, Tensor) or entry.is_meta or entry.layout is not torch.strided:
            kind = "on meta" if isinstance(entry, Tensor) and entry.is_meta else f"a {type(entry).__name__}"
            raise ValueError(f"[save_pretrained] {name} is {kind}, needs a dense tensor with values")
    tensors, aliases = _without_aliases(entries)
    identities = [name for name, module in model.named_modules() if type(module) is nn.Identity]
    header = {"layers": _records(model), "aliases": aliases, "gates": _gates_of(model), "identities": identities}
    tensor_file.write(Path(file), tensors, FORMAT, json.dumps(header), "save_pretrained")


def load_pretrained(
    build: Callable[[], nn.Module], file: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> nn.Module:
    """The network that `save_pretrained` wrote, bit for bit, in eval mode.

    Block-sparse layers take the places of the dense ones that `build` makes. Nothing is converted or timed. Parameters
    have the file's dtypes. Where `build` makes block-sparse layers itself, they need all blocks of those in the file:
    a sparse network that was pruned further is loaded so, one whose blocks have moved (SET, RigL) is not.

    Buffers that are not in its state dict are as `build` makes them. Those of a network that was cast, a table of
    rotary embeddings, say, may differ.

    Args:
        build: makes the dense network: `lambda: MyModel(config)`. It may do so under `torch.device("meta")`, if all of
            its tensors are in its state dict.
        file: to be read.
        device: of the result. None: that of the network's parameters, or the CPU if it was made on meta.

    Raises:
        ValueError: the file is damaged or of another network: the message has the shapes and hashes of both. Or the
            network holds tensors on meta that the file has not.
        OSError: there is no such file, or it cannot be read.
        TypeError: `build` makes no `torch.nn.Module`.
    """
    path = Path(file)
    tensors, header = _read(path)
    if not callable(build) or isinstance(build, nn.Module):
        raise TypeError(f"[load_pretrained] build is a {type(build).__name__}, needs a function that makes the network")
    model = build()
    need("load_pretrained", "what build() makes", model, nn.Module, "a torch.nn.Module")
    if device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    entries = tensors | {alias: tensors[name] for alias, name in header["aliases"].items()}
    layers = _put_layers(path, model, entries, header["layers"])
    model = layers.get("", model)
    there = dict(model.named_modules())
    for name in header["identities"]:  # where another module does the work: the second half of BERT's MLP
        if name in there and type(there[name]) is not nn.Identity:
            put(model, name, nn.Identity())
    for name, shape in header["gates"].items():
        owner, _, buffer = name.rpartition(".")
        if owner in dict(model.named_modules()) and not hasattr(model.get_submodule(owner), buffer):
            model.get_submodule(owner).register_buffer(buffer, torch.empty(shape, device="meta"))
    _check_same(path, {name: list(entry.shape) for name, entry in entries.items()}, model)
    model.load_state_dict(entries, assign=True)
    _share(model, header["aliases"])
    for layer in layers.values():
        layer.apply(_place)
    if empty := [name for name, entry in _tensors_of(model) if entry.is_meta]:
        raise ValueError(
            f"[load_pretrained] {', '.join(empty[:_SHOWN])} {'is' if len(empty) == 1 else 'are'} on meta, and not in "
            f"{path}: build() needs to make what its state dict does not hold"
        )
    return model.to(device).eval()


# ---- Writing -------------------------------------------------------------------------------------------------------


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _without_aliases(entries: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each tensor once, the names of those that are there already)."""
    first: dict[Any, str] = {}
    tensors, aliases = {}, {}
    for name, entry in entries.items():
        place = (entry.device, entry.data_ptr(), entry.dtype, tuple(entry.shape), entry.stride())
        if entry.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = entry.detach().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _records(model: nn.Module) -> dict[str, Any]:
    """How each block-sparse layer is made, by name; a module of several names: the first of them."""
    records: dict[str, Any] = {}
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{whole}.") or whole == "" != name for whole in records):
            continue  # is part of one
        record = record_of(module)
        if record is None:
            continue
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"[save_pretrained] {name} is parametrized: call "
                "torch.nn.utils.parametrize.remove_parametrizations first"
            )
        records[name] = {"same": names[module]} if module in names else record
        names.setdefault(module, name)
    return records


def _gates_of(model: nn.Module) -> dict[str, list[int]]:
    """Names and shapes of the buffers that pruning has put beside dense weights."""
    gates = {}
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        weight = own.removesuffix("_gates")
        if weight != own and buffer.dim() == 2 and hasattr(model.get_submodule(owner), weight):
            gates[name] = list(buffer.shape)
    return gates


# ---- Reading -------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if path.is_dir():
        raise IsADirectoryError(f"[load_pretrained] {path} is a folder, needs a file that save_pretrained wrote")
    if not path.is_file():
        raise FileNotFoundError(f"[load_pretrained] there is no file {path}")
    with tensor_file.opened(path, "load_pretrained", "file of a network") as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.keys() != {FORMAT}:
        kind = ", ".join(metadata) or "none"
        held = _outline({name: list(tensor.shape) for name, tensor in tensors.items()})
        raise ValueError(
            f"[load_pretrained] {path} was not written by save_pretrained: its metadata is {kind[:60]}, needs "
            f"{FORMAT}. It holds {held}"
        )
    digest, text = tensor_file.parts(metadata[FORMAT])
    tensor_file.check_digest(path, digest, tensors, text, "load_pretrained")
    header: dict[str, Any] = json.loads(text)
    return tensors, header


def _put_layers(
    path: Path, model: nn.Module, entries: Mapping[str, Tensor], records: Mapping[str, Any]
) -> dict[str, nn.Module]:
    """Block-sparse layers on meta in their places in the model."""
    there = dict(model.named_modules(remove_duplicate=False))
    made: dict[str, nn.Module] = {}
    for name, record in records.items():
        if "same" in record:
            made[name] = made[record["same"]]
        else:
            prefix = f"{name}." if name else ""
            own = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
            made[name] = make(record, own)
        wrong = "there is no such module" if name not in there else misfit(there[name], made[name])
        if wrong:
            saved = "; ".join(_described(part) for part in made[name].modules() if hasattr(part, "layout"))
            raise ValueError(f"[load_pretrained] {path} is of another network: {name} is {saved} there. Here {wrong}")
    for name, layer in made.items():
        layer.train(there[name].training)
        if name:
            put(model, name, layer)
    return made


def _described(layer: Any) -> str:
    layout: Layout = layer.layout
    return f"{layout!r} (hash {hash_of(layout)})"


def _check_same(path: Path, saved: Mapping[str, list[int]], model: nn.Module) -> None:
    """Raises ValueError unless the file's entries are those of the model."""
    own = {name: list(entry.shape) for name, entry in model.state_dict().items() if isinstance(entry, Tensor)}
    if own == saved:
        return
    names = sorted(own.keys() | saved.keys())
    wrong = [
        f"{name} is {saved.get(name, 'not')} there and {own.get(name, 'not')} here"
        for name in names
        if own.get(name) != saved.get(name)
    ]
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    raise ValueError(
        f"[load_pretrained] {path} is of another network: {'; '.join(wrong[:_SHOWN])}{more}. "
        f"The file holds {_outline(saved)}, build() makes {_outline(own)}"
    )


def _outline(shapes: Mapping[str, list[int]]) -> str:
    text = json.dumps(sorted(shapes.items()))
    return f"{len(shapes)} tensors (hash {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _share(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Parameters and buffers that were one become one again."""
    for alias, name in aliases.items():
        (owner, _, key), (other, _, kept) = alias.rpartition("."), name.rpartition(".")
        value = getattr(model.get_submodule(other), kept)
        if getattr(model.get_submodule(owner), key) is not value:
            setattr(model.get_submodule(owner), key, value)


def _place(module: nn.Module) -> None:
    """Tables to where the weight is now."""
    place, weight = getattr(module, "place", None), getattr(module, "weight", None)
    if place is not None and isinstance(weight, Tensor):
        place(weight.device)


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
