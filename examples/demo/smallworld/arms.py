"""The networks that are compared: one dense, three sparse, all with as many parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blocksparse import Layout, graphs

from .model import Model, Shape, count_parameters, dense_twin


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, but for the text and the number of steps."""

    width: int = 544  # units of the sparse networks
    block: int = 8
    links: int = 8  # a block row has 2 links + 1 blocks, on average
    inner: int = 2  # matrices before the gates
    rows: int = 64
    time: int = 16
    seed: int = 1
    test: int = 1 << 16  # bytes


@dataclass(frozen=True)
class Kind:
    """A kind of network: its name in files and in the table, its graph, and its learning rate."""

    name: str
    title: str
    graph: str  # a name of `blocksparse.graphs` with the fields of Settings in it; "" if dense
    rate: float
    color: str


# Bits per byte of the test after 900 steps (0.92 MB), by rate. 4e-3, 8e-3, 1.6e-2: ba 2.244, 2.178, 2.179; dense 2.272,
# 2.232, 2.229. 8e-3, 1.6e-2: ws 2.208, 2.206; diagonal 2.255, 2.221. With 3.2e-2 ba of 720 units and 4 links was worse.
# Width at rate 1.6e-2 for about as many parameters: 720 units with 4 links 2.220. The form of 2017 (896 units, four
# matrices, every second unit reads and writes) after 300 steps: 2.70, where 512 units with 8 links need 2.53.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("ba", "Barabasi-Albert", "ba({nodes},{links},{extra})", 1.6e-2, "tab:blue"),
        Kind("dense", "dense", "", 1.6e-2, "black"),
        Kind("ws", "Watts-Strogatz 20 %", "ws({nodes},{neighbours},0.2)", 1.6e-2, "tab:green"),
        Kind("diagonal", "block-diagonal", "diagonal({nodes},{degree})", 1.6e-2, "tab:red"),
    )
}


@dataclass(frozen=True)
class Arm:
    """One network, before it has weights."""

    kind: Kind
    shape: Shape
    layouts: tuple[Layout, ...] | None  # of the inner matrices, and of the gates

    @property
    def parameters(self) -> int:
        layout = None if self.layouts is None else self.layouts[-1]
        return count_parameters(self.shape, None if layout is None else layout.blocks * layout.block_size**2)

    @property
    def mix(self) -> list[float]:
        """Share of blocks that one block has reached after each matrix."""
        if self.layouts is None:
            return [1.0] * (self.shape.inner + 1)
        return graphs.mix(self.layouts)

    def model(self, seed: int) -> Model:
        """The network with the weights to start from. Arms of one seed share nothing but the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Model(self.shape, self.layouts)


def make(kind: Kind, settings: Settings) -> Arm:
    """A fresh graph for each inner matrix, and one more for the gates; dense: as wide as the parameters allow."""
    shape = Shape(settings.width, settings.inner)
    if kind.graph:
        return Arm(kind, shape, _layouts(kind.graph, settings))
    blocks = _layouts(KINDS["ba"].graph, settings)[0].blocks
    total = count_parameters(shape, blocks * settings.block**2)
    return Arm(kind, dense_twin(total, shape), None)


def as_wide(settings: Settings) -> Arm:
    """The dense network with the same state as the sparse ones: what width costs without sparsity."""
    return Arm(Kind("wide", "dense, as wide", "", 0.0, "gray"), Shape(settings.width, settings.inner), None)


def _layouts(graph: str, settings: Settings) -> tuple[Layout, ...]:
    m = settings.links
    name = graph.format(
        nodes=settings.width // settings.block,
        links=m,
        extra=m * (m + 1) // 2,  # brings it to the blocks of the others
        neighbours=2 * m,
        degree=2 * m + 1,
    )
    seeds = range(settings.inner + 1)
    return tuple(Layout.from_graph(name, settings.block, seed=settings.seed * 100 + seed) for seed in seeds)
