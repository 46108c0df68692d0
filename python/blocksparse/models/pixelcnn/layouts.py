"""How channels are connected: layouts and orders of channels for convolutions behind concat-ELU.

The streams have n = F / b blocks of channels. Behind concat-ELU, elu([x, -x]), the channels c and c + F are one
channel's two halves, so a pattern over F x F channels is repeated for each half, for each tensor of a concatenation,
and for both halves [p, q] of a gate. `balanced` alone is drawn over all of these blocks at once.

`diagonal` is what groups are: group k of g has the channels k F/g to (k + 1) F/g. Between two convolutions a shuffle
brings channel c to c mod g * F/g + c div g, so that each group reads some of every one. The shuffle costs no pass over
the images: it is the order in which the next convolution reads its channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ...layout import Layout
from .architecture import Kind
from .config import ModelConfig

_STEP = 1009  # between the seeds of two layers


def layouts_of(config: ModelConfig, kind: Kind, count: int, place: int) -> list[Layout]:
    """Of so many sparse layers of a kind: one each, or a single one that all share.

    Raises:
        ValueError: a graph is none, is of another number of nodes, or differs in blocks from seed to seed.
    """
    n, b = config.nodes, config.block
    rows, columns = kind.outputs // b, kind.inputs // b
    if config.layout == "diagonal":
        group = np.arange(n) * config.groups // n
        mask = np.tile(group[:, None] == group, (rows // n, columns // n))
        return [Layout.from_mask(mask, b)]
    seeds = [config.seed * _STEP * _STEP + place * _STEP + i for i in range(count)]
    if config.layout == "balanced":
        name = f"balanced({rows},{columns},{columns // config.groups})"
        return [Layout.from_graph(name, b, seed=seed) for seed in seeds]
    made = []
    for seed in seeds:
        try:
            graph = Layout.from_graph(config.layout, b, seed=seed)
        except ValueError as error:
            needed = f"needs diagonal, balanced, or a graph of filters / block = {n} nodes"
            example = f' such as "ba({n},{min(2, n - 1)})"' if n > 1 else ""
            raise ValueError(f"[pixelcnn] layout is {config.layout}, {needed}{example}: {error}") from error
        if graph.grid != (n, n):
            raise ValueError(
                f"[pixelcnn] layout {config.layout} is of {graph.grid[0]} x {graph.grid[1]} blocks, needs "
                f"filters / block = {n} on both sides"
            )
        made.append(Layout.from_mask(np.tile(graph.mask(), (rows // n, columns // n)), b))
    if len({layout.blocks for layout in made}) > 1:
        raise ValueError(
            f"[pixelcnn] layout {config.layout} has other numbers of blocks with other seeds: give blocks="
        )
    return made


def digest_of(layouts: Iterable[Layout]) -> str:
    """Of where their blocks are: graphs of the same name and seed may differ from version to version."""
    digest = hashlib.sha256()
    for layout in layouts:
        for part in (np.array([*layout.grid, layout.block_size]), *layout.coordinates()):
            digest.update(part.astype("<i4").tobytes())
    return digest.hexdigest()


def order_of(config: ModelConfig, kind: Kind) -> Tensor | None:
    """The shuffle, as the order in which a sparse layer reads its channels, int32; or None."""
    if not kind.sparse or config.layout != "diagonal" or config.groups == 1:
        return None
    f, g = config.filters, config.groups
    once = torch.arange(f).view(f // g, g).t().flatten()  # group k reads k, k + g, k + 2 g, ...
    return torch.cat([once + part * f for part in range(kind.inputs // f)]).to(torch.int32)


def density_of(config: ModelConfig) -> float:
    """Share of the connections that sparse layers have."""
    if not config.layout:
        return 1.0
    if config.layout in ("diagonal", "balanced"):
        return 1 / config.groups
    return Layout.from_graph(config.layout, config.block, seed=config.seed).density
