"""`EdgeBias`: a bias for pixels whose window reaches beyond the image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._core.arguments import to_int
from .._core.geometry import Padding, Sizes, check_geometry, make_geometry, output_size
from .modules.conv import DENSE, DENSE_TRANSPOSED, BlockSparseConv
from .modules.leaf import as_leaf


class EdgeBias(nn.Module):
    """Adds to each pixel the sum of a learned bias for every tap of its window that lies outside of the image.

    Padding tells a convolution with zeros that there is nothing; this lets it answer what it would have seen there,
    without a channel that says where the image is. It works behind dense convolutions as well::

        conv = BlockSparseConv2d(64, 64, 3, layout, padding="same")
        edge = EdgeBias.of(conv)
        y = edge(conv(x), x)

    `weight` [taps, channels] begins with zeros and does not depend on the size of images. It is the additive part of
    what the 2017 release had, which had a bias for every combination of taps outside: sums of these here.

    Args:
        channels: of y.
        kernel_size: a number for each size.
        stride: see `blocksparse.torch.conv2d`.
        padding: see there.
        dilation: see there.
        transposed: whether the convolution is.
        output_padding: of transposed convolutions alone.
        device: of the parameter.
        dtype: of the parameter.

    Raises:
        ValueError: the geometry or the count of channels is wrong.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Sequence[int],
        *,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        transposed: bool = False,
        output_padding: Sizes = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(kernel_size, Sequence) or not 1 <= len(kernel_size) <= len(DENSE):
            raise ValueError(f"[EdgeBias] kernel_size is {kernel_size!r}, needs a number for each of 1 to 3 sizes")
        channels, rank = to_int("channels", channels, op="EdgeBias"), len(kernel_size)
        if channels < 0:
            raise ValueError(f"[EdgeBias] channels is {channels}, needs 0 or more")
        self.geometry = make_geometry(rank, kernel_size, stride, padding, dilation, output_padding, transposed)
        check_geometry(self.geometry)
        weight = torch.zeros(math.prod(kernel_size), channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)

    @classmethod
    def of(cls, conv: nn.Module) -> EdgeBias:
        """The one that fits behind a convolution, block-sparse or dense.

        Raises:
            ValueError: the convolution has an activation, which belongs behind the bias, or pads with other than zeros.
            TypeError: it is none.
        """
        layer: Any = conv
        if not isinstance(conv, (BlockSparseConv, *DENSE, *DENSE_TRANSPOSED)):
            raise TypeError(f"[EdgeBias] a {type(conv).__name__}, needs a convolution")
        if (activation := getattr(layer, "activation", "none")) != "none":
            raise ValueError(f"[EdgeBias] the layer has activation {activation!r}, needs 'none': apply it afterwards")
        if (mode := getattr(layer, "padding_mode", "zeros")) != "zeros":
            raise ValueError(f"[EdgeBias] padding_mode is {mode!r}, needs 'zeros'")
        names = ("stride", "padding", "dilation", "transposed", "output_padding")
        options = {name: getattr(layer, name) for name in names}
        where = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        return cls(layer.out_channels, layer.kernel_size, **options, **where)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """y [n, channels, size'...], what the convolution made of x [n, in, size...], with the bias. Both or no n."""
        if (node := as_leaf(self, y, x)) is not None:
            return cast(Tensor, node)
        transposed, rank = self.geometry[0], len(self.geometry) // 6
        if y.dim() == x.dim() == rank + 1:
            return self(y.unsqueeze(0), x.unsqueeze(0)).squeeze(0)
        if y.dim() != x.dim() or x.dim() != rank + 2 or y.size(1) != self.weight.size(1) or y.size(0) != x.size(0):
            raise ValueError(
                f"[EdgeBias] y is {list(y.shape)} and x {list(x.shape)}, needs [n, {self.weight.size(1)}, size...] and "
                f"[n, in, size...] of {rank} sizes"
            )
        if list(y.shape[2:]) != (sizes := output_size(self.geometry, x.shape[2:])):
            raise ValueError(f"[EdgeBias] y has sizes {list(y.shape[2:])}, needs {sizes}, what x {list(x.shape)} gives")
        inside: Tensor | None = None  # [taps, pixels...]
        for i in range(rank):
            kernel, stride, dilation, before = (self.geometry[1 + field * rank + i] for field in range(4))
            pixel = torch.arange(y.size(2 + i), device=y.device)
            tap = torch.arange(kernel, device=y.device).unsqueeze(1) * dilation
            at = (pixel + before - tap) if transposed else (pixel * stride - before + tap)
            here = (at >= 0) & (at < (x.size(2 + i) - 1) * stride + 1 if transposed else at < x.size(2 + i))
            if transposed:
                here = here | (at % stride != 0)  # a hole between pixels is not beyond the edge
            inside = here if inside is None else _outer(inside, here)
        assert inside is not None
        outside = (~inside).to(y.dtype).flatten(1)
        bias = (self.weight.t().to(y.dtype) @ outside).view(-1, *y.shape[2:])
        return y + bias


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """[taps, pixels...] and [taps', pixels'] -> [taps * taps', pixels..., pixels']: both are true."""
    a = a.unsqueeze(1).unsqueeze(-1)
    return (a & b.view(1, b.size(0), *(1,) * (a.dim() - 3), b.size(1))).flatten(0, 1)
