"""What a pruned layer's time is, and what it would be as a block-sparse one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..weights.targets import Target
from .storage import grouped, obstacle, sparse_layer
from .timing import Seen, guess, time_layers


def layer_times(
    targets: Sequence[Target], masks: Mapping[str, Tensor], seen: Mapping[str, Seen] | None = None, tokens: int = 512
) -> dict[str, tuple[float, float]]:
    """(now, expected) seconds of a forward call of each layer, by the names of targets.

    Layers without a block-sparse form have no times, nor have those that do not run, on a device without kernels, say:
    a warning tells why.

    Args:
        targets: what was pruned.
        masks: of all of them.
        seen: what layers are fed, by the names of modules: see `watch`.
        tokens: rows of x for layers that it does not tell of; pixels of a convolution.
    """
    times: dict[str, tuple[float, float]] = {}
    failed: dict[str, list[str]] = {}
    for group in grouped(list(targets)):
        module = group[0].module
        if obstacle(group):
            continue
        layer = sparse_layer(group, masks)
        fed = (seen or {}).get(group[0].path) or guess(module, tokens)
        try:
            pair = time_layers(module, layer, fed)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failed.setdefault(f"{type(error).__name__}: {error}".splitlines()[0], []).append(group[0].module_name)
            continue
        times.update(dict.fromkeys((target.name for target in group), pair))
    for why, paths in failed.items():
        warnings.warn(f"[report] not timed: {', '.join(paths)} ({why})", stacklevel=4)
    return times
