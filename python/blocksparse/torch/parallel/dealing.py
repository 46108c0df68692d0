"""`Deal`: which features each process of a group has, so that all have equally many blocks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..._core.arguments import shown, to_int
from ..modules import BlockSparseGLU, BlockSparseLinear

Int64 = npt.NDArray[np.int64]
Layer = BlockSparseLinear | BlockSparseGLU

_SWAPS = 1000  # at most, after the deal: on barabasi_albert(32768, 8) of 8 processes 20 suffice
_CANDIDATES = 1024  # units of a process that a swap looks at
_EVEN = 1e-3  # a difference between processes that no swap is worth


@dataclass(frozen=True)
class Deal:
    """Features dealt to processes in units of `unit` consecutive ones; each process keeps its units in rising order.

    Args:
        features: how many there are.
        unit: how many stay together.
        hands: the units of each process.
    """

    features: int
    unit: int
    hands: tuple[Int64, ...]

    @property
    def processes(self) -> int:
        """How many they are dealt to."""
        return len(self.hands)

    def features_of(self, process: int) -> Int64:
        """The features of a process, in the order that it has them."""
        features = (self.hands[process][:, None] * self.unit + np.arange(self.unit)).reshape(-1)
        return features[features < self.features]

    def digest(self) -> int:
        """63 bits of the content."""
        hashed = hashlib.sha256(repr((self.features, self.unit)).encode())
        for hand in self.hands:
            hashed.update(hand.size.to_bytes(8, "little") + hand.astype("<i8").tobytes())
        return int.from_bytes(hashed.digest()[:8], "little") >> 1

    def __hash__(self) -> int:
        return self.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Deal):
            return NotImplemented
        same = (self.features, self.unit, self.processes) == (other.features, other.unit, other.processes)
        return same and all(map(np.array_equal, self.hands, other.hands))


def deal(
    processes: int,
    *,
    outputs_of: Layer | Iterable[Layer] = (),
    inputs_of: Layer | Iterable[Layer] = (),
    group: int = 1,
) -> Deal:
    """Deals the features between layers to processes: each has equal shares of the blocks of each layer.

    Rows of blocks differ: in a scale-free layout the largest has ten times the median. So they are dealt like cards, a
    round at a time and the heaviest first, each to the process that has least so far; then processes swap what evens
    them out. All have equally many features, up to one unit. A unit is a row of blocks, or what `group` asks for.

    The same arguments give the same deal everywhere.

    Args:
        processes: how many.
        outputs_of: layers whose outputs the features are.
        inputs_of: layers whose inputs they are.
        group: features that stay together: those of one head of an attention, say.

    Raises:
        TypeError: a layer is neither a `BlockSparseLinear` nor a `BlockSparseGLU`.
        ValueError: no layers, layers of different numbers of features, or more processes than units.
    """
    makers, takers = _layers(outputs_of), _layers(inputs_of)
    widths = [outputs(layer) for layer in makers] + [layer.in_features for layer in takers]
    processes, group = to_int("processes", processes, op="deal"), to_int("group", group, op="deal")
    if not widths or len(set(widths)) > 1:
        raise ValueError(f"[deal] layers have {', '.join(map(str, widths)) or 'no'} features, needs layers of as many")
    if processes < 1 or group < 1:
        raise ValueError(f"[deal] processes is {processes} and group {group}, needs 1 or more")
    features, unit = widths[0], math.lcm(group, *(layer.layout.block_size for layer in (*makers, *takers)))
    units = -(-features // unit)
    if units < processes:
        raise ValueError(
            f"[deal] {features} features are {units} units of {unit}, fewer than the {processes} processes: needs at "
            "least as many rows (or columns) of blocks as processes"
        )
    loads = [_blocks_by_unit(rows_of(layer), blocks_per_unit(layer, unit), units) for layer in makers]
    loads += [
        _blocks_by_unit(layer.layout.coordinates()[1], unit // layer.layout.block_size, units) for layer in takers
    ]
    return Deal(features, unit, _dealt(np.stack(loads, 1).astype(np.float64), processes))


def outputs(layer: Layer) -> int:
    """Features that come out of a layer."""
    return layer.hidden_features if isinstance(layer, BlockSparseGLU) else layer.out_features


def rows_of(layer: Layer) -> npt.NDArray[np.int32]:
    """The row of each block."""
    return layer.layout.coordinates()[0]


def blocks_per_unit(layer: Layer, unit: int) -> int:
    """Rows of blocks that make `unit` outputs; of a gated linear unit, two make each: its gate and its up."""
    return unit // layer.layout.block_size * (2 if isinstance(layer, BlockSparseGLU) else 1)


def need_layer(op: str, layer: object) -> Layer:
    """The layer; raises TypeError if it is none whose features can be dealt."""
    if not isinstance(layer, BlockSparseLinear | BlockSparseGLU):
        raise TypeError(
            f"[{op}] takes a BlockSparseLinear or BlockSparseGLU, given {shown(layer)}; DistributedDataParallel and "
            "fully_shard take all layers"
        )
    return layer


def _layers(given: Layer | Iterable[Layer]) -> list[Layer]:
    given = (given,) if isinstance(given, BlockSparseLinear | BlockSparseGLU) else given
    return [need_layer("deal", layer) for layer in given]


def _blocks_by_unit(places: npt.NDArray[np.int32], edge: int, units: int) -> Int64:
    return np.bincount(places // edge, minlength=units)


def _dealt(loads: npt.NDArray[np.float64], processes: int) -> tuple[Int64, ...]:
    """Units [n] to processes, from what each unit weighs in each layer, [n, layers]."""
    loads = loads * (processes / np.maximum(loads.sum(0), 1))  # a fair share is 1
    order = np.argsort(-loads.sum(1), kind="stable")
    sums = np.zeros((processes, loads.shape[1]))
    hands: list[list[int]] = [[] for _ in range(processes)]
    for start in range(0, order.size, processes):
        waiting = list(range(processes))
        for unit in order[start : start + processes]:
            # The sum of squares of all sums rises least with the process whose sums point least the unit's way.
            to = waiting.pop(int(np.argmin(sums[waiting] @ loads[unit])))
            hands[to].append(int(unit))
            sums[to] += loads[unit]
    arrays = [np.array(hand, np.int64) for hand in hands]
    for _ in range(_SWAPS):
        if not _swap(arrays, sums, loads):
            break
    return tuple(np.sort(hand) for hand in arrays)


def _swap(hands: list[Int64], sums: npt.NDArray[np.float64], loads: npt.NDArray[np.float64]) -> bool:
    """Swaps the two units of the two most different processes that even them out best; whether there were such."""
    apart = np.square(sums[:, None] - sums[None]).sum(2)
    one, other = np.unravel_index(int(np.argmax(apart)), apart.shape)
    if apart[one, other] <= _EVEN**2:
        return False
    mine, theirs = _some(hands[one]), _some(hands[other])
    moved = loads[hands[one][mine]][:, None] - loads[hands[other][theirs]][None]  # [mine, theirs, layers]
    left = np.square(sums[one] - sums[other] - 2 * moved).sum(2)
    i, j = np.unravel_index(int(np.argmin(left)), left.shape)
    if left[i, j] >= apart[one, other] * (1 - 1e-9):
        return False
    a, b = mine[i], theirs[j]
    hands[one][a], hands[other][b] = hands[other][b], hands[one][a]
    sums[one] -= moved[i, j]
    sums[other] += moved[i, j]
    return True


def _some(hand: Int64) -> Int64:
    """Places in a hand, evenly spaced if it has many."""
    return np.unique(np.linspace(0, hand.size - 1, min(hand.size, _CANDIDATES)).astype(np.int64))
