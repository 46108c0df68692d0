"""The convolutions of a network, those of one kind as one parameter, with weight norm.

A deep model has hundreds of convolutions in a dozen of shapes. Kept apart, weight norm, Adam and the average of the
weights would be thousands of small operations an update; as one parameter for each shape they are some dozens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..._core.geometry import make_geometry
from ...layout import Layout
from ...torch.functional.conv import apply_conv
from ...torch.tables import index_of
from .architecture import Kind
from .elementwise import Pads, Places, inner_concat_elu, ordered_concat_elu, places_of

DEVIATION = 0.05  # of V at first
LEAST = 1e-12  # of |V|^2: outputs without blocks have no norm


class Convolutions(nn.Module):
    """`count` convolutions of a kind: W = gain V / |V| for each output channel, |V| over its live connections.

    Args:
        kind: their shape.
        count: how many.
        layouts: of a sparse kind, one for each or one for all; none: they are dense.
        order: the order in which sparse ones read the channels, int32 [inputs].

    Source: Salimans and Kingma, arXiv:1602.07868.
    """

    order: Tensor | None
    rows: Tensor
    source: Tensor
    sign: Tensor
    plus: Tensor
    minus: Tensor

    def __init__(self, kind: Kind, count: int, layouts: Sequence[Layout] = (), order: Tensor | None = None) -> None:
        super().__init__()
        self.kind, self.count, self.layouts = kind, count, list(layouts)
        kh, kw = kind.kernel
        if self.layouts:
            blocks, b, _ = self.layouts[0].values_shape
            shape: tuple[int, ...] = (blocks, kind.taps, b, b)
            rows = np.stack([np.arange(len(x.mask()))[:, None] == x.coordinates()[0] for x in self.layouts])
            self.register_buffer(
                "rows", torch.from_numpy(rows).float(), persistent=False
            )  # [1 or n, out blocks, blocks]
        else:
            shape = (kind.outputs, kind.inputs, kh, kw)
        self.register_buffer("order", order, persistent=False)
        # Convolutions that read the same channels in the same way, inside of the same zeros.
        pads = None if self.layouts else kind.pads
        self.reads = (kind.inputs, None if order is None else order.numpy().tobytes(), pads)
        places = places_of(kind.inputs // 2, order)
        for name, tensor in zip(("source", "sign", "plus", "minus"), places, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.v = nn.Parameter(torch.randn(count, *shape) * DEVIATION)
        self.gain = nn.Parameter(torch.ones(count, kind.outputs))
        self.bias = nn.Parameter(torch.zeros(count, kind.outputs))
        self.geometry, self.geometry_inside = _geometry(kind), _geometry(kind, pads=False)

    def extra_repr(self) -> str:
        """The kind, and how many."""
        k = self.kind
        how = f"{self.layouts[0].blocks} blocks of {self.layouts[0].block_size}" if self.layouts else "dense"
        return f"{self.count} x {k.inputs} -> {k.outputs}, {k.kernel[0]} x {k.kernel[1]}, {k.move}, {how}"

    def weights(self, dtype: torch.dtype | None = None, *, unit: bool = False) -> list[Tensor]:
        """W of each; `unit`: V / |V|. Computed in the parameters' type, then of `dtype`."""
        v = self.v
        gain = torch.ones_like(self.gain) if unit else self.gain
        with torch.autocast(v.device.type, enabled=False):
            if self.layouts:
                # Norms are sums over the blocks of a row: products with zeros and ones, always in the same order.
                squares = self.rows.to(v.dtype) @ v.square().sum((2, 4))  # [count, out blocks, b]
                scale = self.rows.to(v.dtype).mT @ (gain.view_as(squares) * squares.clamp(min=LEAST).rsqrt())
                w = v * scale[:, :, None, :, None]
            else:
                squares = v.square().sum((2, 3, 4), keepdim=True)
                w = v * (gain.view_as(squares) * squares.clamp(min=LEAST).rsqrt())
        w = w if dtype is None else w.to(dtype)
        if self.layouts or not w.is_cuda:
            return list(w.unbind())
        # As cuDNN takes them beside channels-last images. One copy here is two for each convolution less, and their
        # gradients come back side by side.
        return [one.permute(0, 3, 1, 2) for one in w.permute(0, 1, 3, 4, 2).contiguous().unbind()]

    def elu(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """`ordered_concat_elu` of what a convolution reads, for `forward` without pads and orders, on a card."""
        return ordered_concat_elu(parts, *self._ready())

    def inner_elu(self, terms: tuple[Tensor, ...], biases: tuple[Tensor, ...], dropout: float) -> Tensor:
        """`inner_concat_elu`, likewise."""
        places, pads = self._ready()
        return inner_concat_elu(terms, biases, places, 1 - dropout, pads)

    def _ready(self) -> tuple[Places, Pads]:
        pads = (0, 0, 0, 0) if self.layouts else self.kind.pads  # a sparse one has them in its geometry
        return Places(self.source, self.sign, self.plus, self.minus), pads

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: int,
        *,
        pads: bool = True,
        orders: bool = True,
    ) -> Tensor:
        """The `index`-th convolution of x [n, inputs, h, w], with a weight of `weights()`.

        Args:
            x: images, or a part of them.
            weight: see above.
            bias: [outputs].
            index: which one.
            pads: whether there are zeros around x, as around whole images; else x has all that the result sees.
            orders: whether channels are to be read in an order; else x has them so.
        """
        kind = self.kind
        if self.layouts:
            layout = self.layouts[index % len(self.layouts)]
            geometry = self.geometry if pads else self.geometry_inside
            sizes = (kind.outputs, kind.inputs)
            return apply_conv(
                x, weight, index_of(layout, x.device), geometry, sizes, False, bias, self.order if orders else None
            )
        kh, kw = kind.kernel
        if kind.move == "up":
            w, side = weight.transpose(0, 1), (kw - 1) // 2
            return functional.conv_transpose2d(x, w, bias, stride=2, padding=(0, side), output_padding=(0, side))
        if pads and kh * kw > 1:
            x = functional.pad(x, kind.pads)
        return functional.conv2d(x, weight, bias, stride=2 if kind.move == "down" else 1)


def _geometry(kind: Kind, pads: bool = True) -> tuple[int, ...]:
    if kind.move == "up":
        side = (kind.kernel[1] - 1) // 2
        return make_geometry(2, kind.kernel, 2, (0, (side, 0)), transposed=True)
    left, right, above, below = kind.pads if pads else (0, 0, 0, 0)
    return make_geometry(2, kind.kernel, 2 if kind.move == "down" else 1, ((above, below), (left, right)))
