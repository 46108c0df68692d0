"""Tables of layouts as arrays of JAX."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import jax

from .._core import library, structs
from ..layout import Layout, need_layout


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the ops know of a layout beside its tables; of the layout that the tables describe, transposed or not."""

    block_size: int
    out_features: int
    in_features: int
    blocks: int
    words: int  # of the tables
    transposed: bool = False

    @property
    def outputs(self) -> int:
        """Features of y."""
        return self.in_features if self.transposed else self.out_features

    @property
    def inputs(self) -> int:
        """Features of x."""
        return self.out_features if self.transposed else self.in_features

    def numbers(self) -> tuple[int, ...]:
        """As handlers take them."""
        return int(self.transposed), self.block_size, self.out_features, self.in_features, self.blocks

    def card_view(self) -> structs.LayoutView:
        """A view of tables on a card by which the core tells sizes of workspaces; it is not read."""
        somewhere = 1 << 20
        view = structs.LayoutView(
            somewhere, library.CUDA, 0, 0, self.block_size, self.out_features, self.in_features, self.blocks
        )
        library.call("bs_layout_view_on_device", self.words, ctypes.byref(view))
        view.transposed = int(self.transposed)
        return view


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["sizes"])
@dataclasses.dataclass(frozen=True)
class Tables:
    """A layout as an argument of compiled functions: its tables are an array like others, its sizes are static.

    All functions of `blocksparse.jax` take one in the place of a `Layout`. A `Layout` that a compiled function meets
    becomes a constant of its program; `Tables` that are given to the function are not copied into it, may differ from
    call to call, and may be divided between devices (see `split_rows`) or scanned over where their sizes are equal.
    """

    words: jax.Array  # int32 [sizes.words]
    sizes: Sizes

    def t(self) -> Tables:
        """The transposed weight over the same tables and the same values."""
        return Tables(self.words, dataclasses.replace(self.sizes, transposed=not self.sizes.transposed))


def sizes_of(layout: Layout) -> Sizes:
    """What is static of a layout."""
    host = layout.host()
    out, in_ = reversed(host.sizes) if host.transposed else host.sizes
    return Sizes(host.block_size, out, in_, host.blocks, host.index_memory().size, host.transposed)


def tables_of(layout: Layout | Tables, device: jax.Device | None = None, *, op: str = "tables_of") -> Tables:
    """The layout's tables on a device, moved there once; `Tables` are returned as they are.

    Args:
        layout: which blocks there are.
        device: where the tables are to lie. None: on JAX's default device, from which they follow other arrays.
        op: what a message begins with.

    Raises:
        TypeError: it is no layout.
    """
    if isinstance(layout, Tables):
        return layout
    made, transposed = need_layout(op, layout).tables, layout.transposed  # which a transposed view shares
    tables: Tables | None = made.get(("jax", device, transposed))
    if tables is None:
        other: Tables | None = made.get(("jax", device, not transposed))
        tables = Tables(_move(layout, device), sizes_of(layout)) if other is None else other.t()
        made["jax", device, transposed] = tables
    return tables


def _move(layout: Layout, device: jax.Device | None) -> jax.Array:
    on_card = (jax.default_backend() if device is None else device.platform) != "cpu"
    with jax.core.eval_context():  # an array, although a function is being traced, or divided between devices
        return jax.device_put(layout.index_for_card() if on_card else layout.index_memory(), device)


def tables_for(op: str, layout: Layout | Tables, x: Any) -> Tables:
    """`tables_of` where x is, if it is bound to one device."""
    device = None
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and getattr(x, "committed", False):
        devices = x.devices()
        device = next(iter(devices)) if len(devices) == 1 else None
    return tables_of(layout, device, op=op)
