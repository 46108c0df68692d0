"""A block-sparse layer whose blocks change their places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ....layout import Layout
from ...device_layout import DeviceLayout, changing_layout
from ...modules.conv import BlockSparseConv
from ...modules.layer import BlockSparseLayer
from ..optimizer.moments import YOUNG, Moments, move_blocks
from .exchange import Exchange
from .grow_scores import conv_grow_scores, grow_bound, grow_scores, score_strips

MANY_PLACES = 1 << 24  # of a grid whose scores are not in memory at once: 64 MB
START, SETTLED = -1, -2  # births of blocks that were there at the start, and of those that are young no more


class RewiredLayer:
    """The places of a layer's blocks and when each was grown, beside the layer, on its device.

    Places are in the grid of the matrix whose blocks are numbered: of `layout.t()` where the layout is a view.

    Args:
        name: of the layer in its model.
        module: its layout then changes in place on a card, and is another one after each change elsewhere.
        alpha: the largest share of its blocks that are exchanged at once.
    """

    def __init__(self, name: str, module: BlockSparseLayer, alpha: float) -> None:
        self.name, self.module = name, module
        layout, device = module.layout, module.weight.device
        self.blocks, self.transposed = layout.blocks, layout.transposed
        self.grid = layout.grid[::-1] if layout.transposed else layout.grid
        self.sizes = layout.sizes[::-1] if layout.transposed else layout.sizes
        self.most = most_exchanged(layout, alpha)
        self.places = places_of(layout).to(device)
        self.births = torch.full_like(self.places, START)  # the step after which each was grown, while it is young
        self.young = (self.places[:0], self.places[:0])  # rows of all young blocks, and perhaps others; their births
        if device.type == "cuda":
            module.relayout(changing_layout(layout, device))
        self._inside = self._make_inside(device)

    @property
    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weight, and gates if there are any, by their names in the model."""
        for name in ("weight", "gates"):
            if getattr(self.module, name, None) is not None:
                yield f"{self.name}.{name}" if self.name else name, getattr(self.module, name)

    def check_device(self, op: str) -> None:
        """Raises RuntimeError if the layer was moved since."""
        if self.module.weight.device != self.places.device:
            raise RuntimeError(
                f"[{op}] {self.name} is on {self.module.weight.device}, was prepared on {self.places.device}: "
                "prepare a model where it is to be trained"
            )

    # ---- What decides -----------------------------------------------------------------------------------------------

    def _make_inside(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """1 for rows and columns that are in the matrix, [row blocks, b] and [column blocks, b]; None: all are."""
        b = self.module.layout.block_size
        if all(size % b == 0 for size in self.sizes):
            return None
        rows, columns = (
            (torch.arange(n * b, device=device) < size).view(n, b).float()
            for n, size in zip(self.grid, self.sizes, strict=True)
        )
        return rows, columns

    def norms(self) -> Tensor:
        """Squares of the blocks' Frobenius norms, [blocks]: of what is in the matrix, gates multiplied in."""
        squares = self.module.weight.detach().float().square()
        if self._inside is not None:
            rows, columns = (
                part.index_select(0, index).view(self.blocks, *(1,) * (squares.dim() - 3), -1)
                for part, index in zip(
                    self._inside, (self.places // self.grid[1], self.places % self.grid[1]), strict=True
                )
            )
            squares = squares * rows.unsqueeze(-1) * columns.unsqueeze(-2)
        sums = squares.flatten(1).sum(1)
        return sums if self.module.gates is None else sums * self.module.gates.detach().square()

    def scores(self, xs: list[Tensor], dys: list[Tensor], grow: str) -> Tensor:
        """Grow scores of all places, [grid], of what the layer was given and the gradients of what it gave."""
        b = self.module.layout.block_size
        if isinstance(self.module, BlockSparseConv):
            geometry, order = self.module.geometry, self.module.channel_order
            if len({x.shape[1:] for x in xs}) == 1:
                xs, dys = [torch.cat(xs)], [torch.cat(dys)]
            ordered = [x if order is None else x[:, order.long()] for x in xs]
            scores = [conv_grow_scores(x, dy, geometry, b, grow=grow) for x, dy in zip(ordered, dys, strict=True)]
            # Images of several sizes in one backward pass: the norm of the sum is taken to be that of its parts.
            made = scores[0] if len(scores) == 1 else torch.stack(scores).square().sum(0).sqrt()
        else:
            x, dy = _rows(xs), _rows(dys)
            made = grow_scores(x, dy, b) if grow == "exact" else grow_bound(x, dy, b)
        return (made.t() if self.transposed else made).flatten()

    @property
    def has_many_places(self) -> bool:
        """Whether scores of all places are too many to be in memory at once: see `strips`."""
        return self.grid[0] * self.grid[1] > MANY_PLACES and not isinstance(self.module, BlockSparseConv)

    def strips(self, xs: list[Tensor], dys: list[Tensor], grow: str) -> Iterator[Tensor]:
        """`scores`, some rows of blocks at a time."""
        x, dy = (_rows(dys), _rows(xs)) if self.transposed else (_rows(xs), _rows(dys))
        return score_strips(x, dy, self.module.layout.block_size, grow)

    # ---- Changes ----------------------------------------------------------------------------------------------------

    def apply(self, change: Exchange, step: Tensor, moments: Moments) -> None:
        """Moves blocks, their gradients and moments; new ones are 0, their gates 1."""
        self.settle(step, YOUNG, moments)
        for name, parameter in self.parameters:
            move_blocks(parameter.detach(), change.source, change.kept, 1 if name.endswith("gates") else 0)
            if parameter.grad is not None:
                move_blocks(parameter.grad, change.source, change.kept)
            moments.follow(parameter, change.source, change.kept)
        self.births.copy_(torch.where(change.kept, self.births.index_select(0, change.source), step))
        self.places.copy_(change.places)
        self._take()

    def settle(self, step: Tensor, youth: int, moments: Moments) -> None:
        """Blocks that were grown so many steps ago are young no more; see `Moments.settle`."""
        ages = torch.where(self.births >= 0, step - self.births, 0)
        ages = torch.where(ages >= youth, ages, 0)
        for _, parameter in self.parameters:
            moments.settle(parameter, ages)
        self.births.masked_fill_(ages > 0, SETTLED)

    def find_young(self, frequency: int) -> None:
        """Sets `young`. On a card, where they cannot be counted, there are as many rows as there may be at most.

        Args:
            frequency: of exchanges.
        """
        if not self.births.is_cuda:
            rows = (self.births >= 0).nonzero().flatten()
            self.young = rows, self.births[rows]
            return
        most = min(self.blocks, self.most * -(-YOUNG // frequency))
        rows = self.births.argsort(descending=True, stable=True)[:most]
        found = rows, self.births.index_select(0, rows)
        if self.young[0].numel() == most:  # in place, where graphs look for them
            for old, new in zip(self.young, found, strict=True):
                old.copy_(new)
        else:
            self.young = found

    def adopt(self, layout: Layout) -> bool:
        """Takes a layout of the same shape for weights that are loaded; False if it has another."""
        own = self.module.layout
        if (layout.sizes, layout.values_shape) != (own.sizes, own.values_shape):
            return False
        if layout.transposed != self.transposed:
            return False
        self.restore(places_of(layout), torch.full((self.blocks,), START))
        return True

    def restore(self, places: Tensor, births: Tensor) -> None:
        """Puts the layer's layout and the ages of its blocks back."""
        self.places.copy_(places)
        self.births.copy_(births)
        self._take()

    def _take(self) -> None:
        """Has the module's layout say where blocks are."""
        layout = self.module.layout
        if isinstance(layout, DeviceLayout):
            layout.remake_at(self.places)
            return
        rows, columns = self.places.numpy() // self.grid[1], self.places.numpy() % self.grid[1]
        crow = np.searchsorted(rows, np.arange(self.grid[0] + 1))
        out, in_ = self.sizes
        made = Layout.from_csr(crow, columns, self.grid[1], layout.block_size, out_features=out, in_features=in_)
        self.module.relayout(made.t() if self.transposed else made)


def _rows(parts: list[Tensor]) -> Tensor:
    """[tokens, features] of all of them."""
    rows = [part.reshape(-1, part.size(-1)) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def most_exchanged(layout: Layout, alpha: float) -> int:
    """How many blocks may change their places at once: the share, and no more than there are empty places."""
    return min(int(alpha * layout.blocks + 0.5), layout.grid[0] * layout.grid[1] - layout.blocks)


def places_of(layout: Layout) -> Tensor:
    """int64 [blocks] on the host: row * columns + column in the matrix whose blocks are numbered."""
    crow, col = layout.csr()
    columns = layout.grid[0] if layout.transposed else layout.grid[1]
    rows = np.repeat(np.arange(crow.size - 1, dtype=np.int64), np.diff(crow))
    return torch.from_numpy(rows * columns + col)
