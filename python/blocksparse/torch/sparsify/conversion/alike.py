"""Which layers are so much alike that one of them is timed for all.

Where the blocks are matters less than how many they are. A tenth of the blocks of 576 x 1536, b = 32: six random
layouts, full rows and full columns take 1.8 to 2.4 ms, dense takes 22 ms (512 tokens, f32, one thread, AVX2, a shared
machine, 2026-11-26).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from torch import nn

from .storage import Group
from .timing import Seen

NEARLY = 0.9  # as many blocks as another. A layer's time is at most in proportion to them.

T = TypeVar("T")


def alike(items: Iterable[T], kind: Callable[[T], Hashable], blocks: Callable[[T], Sequence[int]]) -> list[list[T]]:
    """The items of each kind, apart where a number of blocks differs by more than a tenth; the most blocks first.

    So the first of a list takes the longest, as far as their number decides.

    Args:
        items: layers, or parts of several ones.
        kind: what all of a list have in common.
        blocks: of whatever is timed: of one layer; or of a module, and of the layers that it is compared with.
    """
    counted = sorted(((tuple(blocks(item)), item) for item in items), key=lambda pair: sum(pair[0]), reverse=True)
    kinds: dict[Hashable, list[tuple[tuple[int, ...], list[T]]]] = {}
    for counts, item in counted:
        lists = kinds.setdefault(kind(item), [])
        members = next((members for first, members in lists if _near(first, counts)), None)
        if members is None:
            lists.append((counts, [item]))
        else:
            members.append(item)
    return [members for lists in kinds.values() for _, members in lists]


def _near(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(min(a, b) >= NEARLY * max(a, b) for a, b in zip(one, other, strict=True))


def kind_of_layer(module: nn.Module) -> Hashable:
    """What a layer's time depends on, but for its input and which blocks are live.

    These are its class and options, and its parameters' sizes, strides and dtypes. A weight that is every other row and
    column of a larger one takes 50 times as long as one without gaps.
    """
    tensors = tuple((name, p.shape, p.stride(), p.dtype, p.device) for name, p in module.named_parameters())
    return type(module), module.extra_repr(), tensors


def kind_of_group(group: Group, fed: Seen) -> Hashable:
    """That of a pruned layer and of its block-sparse form."""
    pruned = tuple((target.parameter_name, target.block_size) for target in group)
    return kind_of_layer(group[0].module), pruned, fed
