"""How block-sparse layers are made, as plain data: what `save_pretrained` writes beside their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..layout import Layout
from .modules.conv import BlockSparseConv
from .modules.digits import saved_integers
from .modules.glu import BlockSparseGLU
from .modules.layer import BlockSparseLayer
from .modules.linear import BlockSparseLinear
from .modules.lstm import BlockSparseLSTM
from .modules.mlp import BlockSparseMLP
from .surgery import SPARSE

Tensors = Mapping[str, Tensor]

_LSTM = ("input_size", "hidden_size", "num_layers", "batch_first", "dropout")
_MLP = ("in_features", "hidden_features", "out_features", "gated", "activation")
_CONV = ("kernel_size", "stride", "padding", "dilation")


@dataclass(frozen=True)
class Kind:
    """A class of layers.

    Attributes:
        options: what of a layer, besides its tensors, says how it is made; plain data.
        make: a layer on meta from options and the tensors of its state dict.
    """

    options: Callable[[Any], dict[str, Any]]
    make: Callable[[dict[str, Any], Tensors], nn.Module]


KINDS: dict[str, tuple[type[nn.Module], Kind]] = {}  # by the class's name


def record_of(module: nn.Module) -> dict[str, Any] | None:
    """{"kind": ..., "options": ...} of a block-sparse layer; None of any other module."""
    for name, (kind, how) in KINDS.items():
        if parametrize.type_before_parametrizations(module) is kind:
            return {"kind": name, "options": how.options(module)}
    return None


def make(record: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    """A layer on meta, whose tables are not placed yet.

    Raises:
        ValueError: this version has no such layer.
    """
    if record.get("kind") not in KINDS:
        raise ValueError(f"[load_pretrained] the file has a {record.get('kind')}, which this version does not know")
    return KINDS[record["kind"]][1].make(dict(record["options"]), tensors)


def misfit(there: nn.Module, layer: nn.Module) -> str:
    """What keeps a layer from the place of another module, dense or block-sparse; "" if nothing does.

    Sizes have to be equal. A block-sparse module has to have all blocks of the layer, which may have been pruned.
    """
    if isinstance(there, nn.LSTM | BlockSparseLSTM) and isinstance(layer, BlockSparseLSTM):
        own, other = ([getattr(lstm, name) for name in _LSTM[:3]] for lstm in (there, layer))
        return _misfit_of_layouts(there, layer) if own == other else f"it is LSTM{tuple(own)}"
    if isinstance(layer, BlockSparseMLP):
        return _misfit_of_mlp(there, layer) or _misfit_of_layouts(there, layer)
    if isinstance(there, BlockSparseLayer):
        if wrong := _misfit_of_layouts(there, layer):
            return wrong
        if not isinstance(there, type(layer)):
            return f"it is a {type(there).__name__}, not a {type(layer).__name__}"
    kernel, needed = (getattr(conv, "kernel_size", None) for conv in (there, layer))
    if kernel != needed:
        return f"it is a {type(there).__name__} with the kernel {kernel}, not {needed}"
    kind = next((sparse for kind, sparse in SPARSE.items() if isinstance(there, kind)), type(layer))
    sizes = _sizes(there)
    if not isinstance(layer, kind) or (sizes is not None and sizes != _sizes(layer)):
        shape = "" if sizes is None else f" of {sizes[0]} x {sizes[1]}"
        return f"it is a {type(there).__name__}{shape} (out x in)"
    return ""


def _misfit_of_layouts(there: nn.Module, layer: nn.Module) -> str:
    own = {name: part for name, part in there.named_modules() if isinstance(part, BlockSparseLayer)}
    for name, part in layer.named_modules():
        if isinstance(part, BlockSparseLayer) and name in own and not _has_all(own[name].layout, part.layout):
            layout = own[name].layout
            return f"{name or 'it'} is {layout!r} (hash {hash_of(layout)})"
    return ""


def _has_all(layout: Layout, pruned: Layout) -> bool:
    """Whether a layout has all blocks of another."""
    if any(getattr(layout, name) != getattr(pruned, name) for name in ("sizes", "block_size", "transposed")):
        return False
    (out, in_), (rows, columns), width = layout.coordinates(), pruned.coordinates(), np.int64(layout.grid[1])
    return bool(np.isin(rows * width + columns, out * width + in_).all())


def _misfit_of_mlp(there: nn.Module, mlp: BlockSparseMLP) -> str:
    if isinstance(there, BlockSparseMLP):
        own, other = ([getattr(module, name) for name in _MLP[:4]] for module in (there, mlp))
        return "" if own == other else f"it is BlockSparseMLP{tuple(own)}"
    sizes = {mlp.in_features, mlp.out_features}, {mlp.hidden_features, 2 * mlp.hidden_features}
    for name, weight in there.named_parameters():  # [out, in] or [in, out]; gate and up may be one
        if weight.dim() == 2 and not any(
            a in sizes[0] and b in sizes[1] for a, b in (weight.shape, weight.shape[::-1])
        ):
            return f"{name} is {list(weight.shape)}, needs {mlp.in_features} x {mlp.hidden_features}"
    return ""


def hash_of(layout: Layout) -> str:
    """As messages show it."""
    return f"{hash(layout) & (1 << 64) - 1:016x}"


def _sizes(module: Any) -> tuple[int, int] | None:
    if hasattr(module, "out_features"):
        return module.out_features, module.in_features
    if hasattr(module, "out_channels"):
        return module.out_channels, module.in_channels
    return None


def _layout(tensors: Tensors, prefix: str = "") -> Layout:
    return Layout.from_pattern(tensors[f"{prefix}pattern"].cpu().double().numpy())


def _common(options: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    has = {"bias": "bias" in tensors, "gates": "gates" in tensors}
    return {**options, **has, "device": "meta", "dtype": tensors["weight"].dtype}


def _make_linear(options: dict[str, Any], tensors: Tensors) -> nn.Module:
    layout = _layout(tensors)
    return BlockSparseLinear(layout.in_features, layout.out_features, layout, **_common(options, tensors))


def _conv_options(conv: BlockSparseConv) -> dict[str, Any]:
    options = {name: getattr(conv, name) for name in _CONV}
    if conv.transposed:
        options["output_padding"] = conv.output_padding
    return {**options, "activation": conv.activation}


def _make_conv(kind: type[BlockSparseConv]) -> Callable[[dict[str, Any], Tensors], nn.Module]:
    def made(options: dict[str, Any], tensors: Tensors) -> nn.Module:
        layout = _layout(tensors)
        order = None if "order" not in tensors else saved_integers(tensors["order"])
        sizes = {name: _tuples(value) for name, value in options.items() if name not in ("kernel_size", "activation")}
        more = {"activation": options["activation"], "channel_order": order, **sizes}
        kernel = _tuples(options["kernel_size"])
        return kind(layout.in_features, layout.out_features, kernel, layout, **_common(more, tensors))

    return made


def _tuples(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _make_lstm(options: dict[str, Any], tensors: Tensors) -> nn.Module:
    layers = range(options["num_layers"])
    layouts = [_layout(tensors, f"recurrent.{i}.") for i in layers]
    sparse = [f"input.{i}.pattern" in tensors for i in layers]
    inputs: Any = [_layout(tensors, f"input.{i}.") if sparse[i] else None for i in layers]
    size, hidden = options.pop("input_size"), options.pop("hidden_size")
    more: dict[str, Any] = {"bias": "input.0.bias" in tensors, "device": "meta"}
    more |= {"dtype": tensors["recurrent.0.weight"].dtype, "input_layout": inputs if any(sparse) else None}
    return BlockSparseLSTM(size, hidden, layouts, **options, **more)


def _lstm_options(lstm: BlockSparseLSTM) -> dict[str, Any]:
    return {name: getattr(lstm, name) for name in _LSTM}


def _make_glu(options: dict[str, Any], tensors: Tensors) -> nn.Module:
    layout = _layout(tensors)
    return BlockSparseGLU(layout.in_features, options.pop("hidden_features"), layout, **_common(options, tensors))


def _mlp_options(mlp: BlockSparseMLP) -> dict[str, Any]:
    names = ("dropout", "hidden_dropout")
    dropouts = {name: drop.p for name in names if isinstance(drop := getattr(mlp, name), nn.Dropout)}
    return {name: getattr(mlp, name) for name in _MLP} | {"dropout": 0.0} | dropouts


def _make_mlp(options: dict[str, Any], tensors: Tensors) -> nn.Module:
    more: dict[str, Any] = {name: f"up.{name}" in tensors for name in ("bias", "gates")}
    more |= {"layout": _layout(tensors, "up."), "down_layout": _layout(tensors, "down.")}
    return BlockSparseMLP(**options, **more, device="meta", dtype=tensors["up.weight"].dtype)


KINDS["BlockSparseGLU"] = (
    BlockSparseGLU,
    Kind(lambda glu: {"activation": glu.activation, "hidden_features": glu.hidden_features}, _make_glu),
)
KINDS["BlockSparseMLP"] = (BlockSparseMLP, Kind(_mlp_options, _make_mlp))
KINDS["BlockSparseLinear"] = (
    BlockSparseLinear,
    Kind(lambda layer: {"activation": layer.activation}, _make_linear),
)
KINDS["BlockSparseLSTM"] = (BlockSparseLSTM, Kind(_lstm_options, _make_lstm))
for _kind in SPARSE.values():
    if issubclass(_kind, BlockSparseConv):
        KINDS[_kind.__name__] = (_kind, Kind(_conv_options, _make_conv(_kind)))
