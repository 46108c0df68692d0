"""How dense each layer of a model is to be, for a density of all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...._core.arguments import to_int, to_number


def uniform_densities(shapes: Mapping[str, Sequence[int]], density: float) -> dict[str, float]:
    """Every layer as dense as the whole."""
    _check("uniform_densities", shapes, density)
    return dict.fromkeys(shapes, float(density))


def erk_densities(shapes: Mapping[str, Sequence[int]], density: float) -> dict[str, float]:
    """Erdos-Renyi-kernel densities: proportional to (sum of a weight's sizes) / (their product), at most 1.

    Small and narrow layers become denser than large ones; all together have the density that is asked for. ::

        densities = bss.erk_densities({name: layer.weight.shape for name, layer in dense.items()}, 0.1)
        made = bst.BlockSparseLinear.from_dense(dense["fc1"], density=densities["fc1"], block_size=32)

    Args:
        shapes: of dense weights by name: [out, in], or a filter's [out, in, size...]; or of grids of blocks.
        density: share of all weights, in (0, 1].

    Raises:
        ValueError: the density is out of range, or a shape is none.

    Source: Evci et al., arXiv:1911.11134 (2019); Mocanu et al., Nature Communications 9:2383 (2018).
    """
    _check("erk_densities", shapes, density)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    full: set[str] = set()
    while True:
        rest = density * sum(sizes.values()) - sum(sizes[name] for name in full)
        scale = rest / max(sum(raw[name] * sizes[name] for name in shapes if name not in full), 1e-300)
        over = {name for name in shapes if name not in full and scale * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in full else scale * raw[name] for name in shapes}
        full |= over


def _check(op: str, shapes: Mapping[str, Sequence[int]], density: float) -> None:
    if not 0 < to_number(op, "density", density) <= 1:
        raise ValueError(f"[{op}] density is {density}, needs more than 0 and at most 1")
    for name, shape in shapes.items():
        if len(shape) < 2 or min(to_int("a size", size, op=op) for size in shape) < 1:
            raise ValueError(f"[{op}] the shape of {name} is {list(shape)}, needs [out, in] or [out, in, size...]")
