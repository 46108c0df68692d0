"""Pruned feed-forward parts of transformers as one block-sparse module, where that is faster than their layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...functional.glu import GLU_ACTIVATIONS
from ...mlp_parts import MLPParts
from ...mlp_surgery import find_mlps, is_called_whole
from ...modules.mlp import BlockSparseMLP
from .storage import keeping_random

Layers = Mapping[nn.Module, nn.Module]  # by the dense ones


class Composed(nn.Module):
    """What an MLP computes, of its layers or of others in their places.

    Args:
        parts: of the dense MLP.
        places: layers by those that they take the places of; others stay.
    """

    def __init__(self, parts: MLPParts, places: Layers) -> None:
        super().__init__()
        self.up, self.down = places.get(parts.up, parts.up), places.get(parts.down, parts.down)
        self.gate = None if parts.gate is None else places.get(parts.gate, parts.gate)
        self.activation, self.joined = GLU_ACTIVATIONS[parts.activation], parts.joined

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], without the dropout behind it."""
        up = self.up(x)
        if self.joined:
            gate, up = up.chunk(2, -1)
            return cast(Tensor, self.down(self.activation(gate) * up))
        if self.gate is not None:
            return cast(Tensor, self.down(self.activation(self.gate(x)) * up))
        return cast(Tensor, self.down(self.activation(up)))


def pruned_mlps(
    model: nn.Module, paths: Mapping[nn.Module, str], called: Collection[nn.Module] | None
) -> dict[str, MLPParts]:
    """The model's MLPs by name, those all of whose layers were pruned, and that it calls as a whole.

    Args:
        model: is not changed.
        paths: the names of modules that were pruned and have a block-sparse form.
        called: the modules that it has called. None: nobody has seen it run, see `is_called_whole`.
    """
    found = {}
    for name, parts in find_mlps(model).items():
        layers = [layer for layer in (parts.up, parts.down, parts.gate) if layer is not None]
        whole = is_called_whole(model, parts.whole) if called is None else parts.whole in called
        if name and whole and all(layer in paths for layer in layers):
            found[name] = parts
    return found


@torch.no_grad()
def sparse_mlp(
    parts: MLPParts, masks: Mapping[str, Tensor], paths: Mapping[nn.Module, str], block_size: int
) -> BlockSparseMLP | None:
    """One module with the live blocks; gate and up keep those that either has. None: it cannot be told which those are.

    Args:
        parts: of the dense MLP, whose dead blocks are zeros.
        masks: by the names of its weights.
        paths: those names.
        block_size: edge of the blocks.
    """
    chosen = {"up": masks[paths[parts.up]], "down": masks[paths[parts.down]]}
    if parts.gate is not None:
        chosen["gate"] = masks[paths[parts.gate]]
    if parts.joined:
        rows = chosen["up"].size(0)
        if parts.weights()["up"].size(0) % block_size or rows % 2:
            return None  # a block has rows of both
        chosen["gate"], chosen["up"] = chosen["up"].chunk(2)
    with keeping_random(parts.weights()["up"].device):
        made = BlockSparseMLP.from_dense(parts, masks=chosen, block_size=block_size)
    kept = {name: value.clone() for name, value in parts.weights().items()}
    for name, mask in chosen.items():  # what a mask drops is zero, also where the other one of gate and up is live
        live = mask.repeat_interleave(block_size, 0)[: kept[name].size(0)]
        kept[name] *= live.repeat_interleave(block_size, 1)[:, : kept[name].size(1)].to(kept[name])
    made.set_weights(kept)
    return made
