"""What a pruned layer's time is, and what it would be as a block-sparse one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..weights.targets import Target
from .alike import alike, kind_of_group
from .storage import grouped, obstacle, sparse_layer
from .timing import Seen, guess, time_layers


def layer_times(
    targets: Sequence[Target], masks: Mapping[str, Tensor], seen: Mapping[str, Seen] | None = None, tokens: int = 512
) -> dict[str, tuple[float, float]]:
    """(now, expected) seconds of a forward call of each layer, by the names of targets.

    Layers that are alike are timed once, as in `convert`.

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
    groups = [group for group in grouped(list(targets)) if not obstacle(group)]
    fed = {id(group): (seen or {}).get(group[0].path) or guess(group[0].module, tokens) for group in groups}
    lists = alike(
        groups,
        lambda group: kind_of_group(group, fed[id(group)]),
        lambda group: [sum(int(masks[target.name].sum()) for target in group)],
    )
    for members in lists:
        first = members[0]
        try:
            pair = time_layers(first[0].module, sparse_layer(first, masks), fed[id(first)])
        except (RuntimeError, ValueError, NotImplementedError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.setdefault(why, []).extend(group[0].module_name for group in members)
            continue
        times.update(dict.fromkeys((target.name for group in members for target in group), pair))
    for why, paths in failed.items():
        warnings.warn(f"[report] not timed: {', '.join(paths)} ({why})", stacklevel=4)
    return times
