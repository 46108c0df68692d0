"""What a pruned layer's time is, and what it would be as a block-sparse one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .storage import grouped, obstacle, sparse_layer
from .targets import Target
from .timing import Seen, guess, time_layers


def layer_times(
    targets: Sequence[Target], masks: Mapping[str, Tensor], seen: Mapping[str, Seen] | None = None, tokens: int = 512
) -> dict[str, tuple[float, float]]:
    """(now, expected) seconds of a forward call of each layer, by the names of targets.

    Layers without a block-sparse form, and devices without kernels, have no times.

    Args:
        targets: what was pruned.
        masks: of all of them.
        seen: what layers are fed, by the names of modules: see `watch`.
        tokens: rows of x for layers that it does not tell of; pixels of a convolution.
    """
    times = {}
    for group in grouped(list(targets)):
        module = group[0].module
        if obstacle(group):
            continue
        layer = sparse_layer(group, masks)
        fed = (seen or {}).get(group[0].path) or guess(module, tokens)
        modes = module.training, layer.training
        module.train(False), layer.train(False)
        try:
            with torch.no_grad():
                pair = time_layers(module, layer, fed)
        except (RuntimeError, NotImplementedError):
            continue
        finally:
            module.train(modes[0]), layer.train(modes[1])
        times.update(dict.fromkeys((target.name for target in group), pair))
    return times
