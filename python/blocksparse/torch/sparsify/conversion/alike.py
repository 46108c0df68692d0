"""Which layers are so much alike that one of them is timed for all.

Where the blocks are matters less than how many they are. A tenth of the blocks of 576 x 1536, b = 32: six random
layouts, full rows and full columns take 1.8 to 2.4 ms, dense takes 22 ms (512 tokens, f32, one thread, AVX2, a shared
machine, 2026-11-26).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from torch import nn

from .storage import Group
from .timing import Seen

NEARLY = 0.9  # as many blocks as another. A layer's time is at most in proportion to them.

T = TypeVar("T")


def alike(items: Iterable[T], kind: Callable[[T], Hashable], blocks: Callable[[T], int]) -> list[list[T]]:
    """The items of each kind, apart where their numbers of blocks differ by more than a tenth; the most blocks first.

    So the first of a list takes the longest, as far as blocks decide, and no other is taken for faster than it is.
    """
    kinds: dict[Hashable, list[T]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    lists: list[list[T]] = []
    for members in kinds.values():
        members.sort(key=blocks, reverse=True)
        current: list[T] = []
        for member in members:
            if not current or blocks(member) < NEARLY * blocks(current[0]):
                current = []
                lists.append(current)
            current.append(member)
    return lists


def kind_of_layer(module: nn.Module) -> Hashable:
    """What a layer's time depends on, but for its input and which blocks are live: class, options, sizes, dtypes."""
    tensors = tuple((name, tuple(p.shape), p.dtype, p.device) for name, p in module.named_parameters())
    return type(module), module.extra_repr(), tensors


def kind_of_group(group: Group, fed: Seen) -> Hashable:
    """That of a pruned layer and of its block-sparse form."""
    pruned = tuple((target.parameter_name, target.block_size) for target in group)
    return kind_of_layer(group[0].module), pruned, fed
