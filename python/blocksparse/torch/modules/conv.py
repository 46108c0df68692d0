"""`BlockSparseConv2d` and its like: `torch.nn.Conv2d` with a filter that is block-sparse over channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..._core.geometry import Padding, Sizes, check_geometry, make_geometry, per_size
from ...layout import Layout
from .. import convert
from ..arguments import need_sizes, need_tensor
from ..functional.conv import apply_conv, as_order
from .digits import Integers, digits_of, saved_integers
from .layer import BlockSparseLayer
from .leaf import as_leaf

DENSE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DENSE_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PAD = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)


class BlockSparseConv(BlockSparseLayer):
    """The base of all: see `BlockSparseConv2d`."""

    rank: ClassVar[int]
    transposed: ClassVar[bool]
    order: Tensor | None
    kernel: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        layout: Layout,
        *,
        stride: Sizes = 1,
        padding: Padding = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        bias: bool = True,
        channel_order: Tensor | Sequence[int] | None = None,
        gates: bool = False,
        activation: str | None = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        need_sizes(name, layout, out_channels, in_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = per_size("kernel_size", kernel_size, self.rank), stride
        self.padding, self.output_padding, self.dilation = padding, output_padding, dilation
        self.geometry = make_geometry(
            self.rank, kernel_size, stride, padding, dilation, output_padding, transposed=self.transposed
        )
        if min(self.kernel_size) < 1:
            raise ValueError(f"[{name}] kernel_size is {kernel_size}, needs 1 or more")
        check_geometry(self.geometry)
        blocks, b, _ = layout.values_shape
        options: Any = {"bias": bias, "gates": gates, "activation": activation, "device": device, "dtype": dtype}
        self._make_parameters(layout, (blocks, math.prod(self.kernel_size), b, b), **options)
        order = None if channel_order is None else as_order(channel_order)
        if order is not None and order.is_meta and not self.weight.is_meta:
            raise ValueError(f"[{name}] channel_order is on meta, needs to have values")
        if order is not None and not order.is_meta and (wrong := _not_a_permutation(order, in_channels)):
            raise ValueError(f"[{name}] {wrong}")
        digits = None if order is None else digits_of(order, in_channels).to(self.weight.device)
        self.register_buffer("order", digits)
        self._integers = None if order is None else Integers(torch.int32)
        self.register_buffer("kernel", self._kernel().to(self.weight.device))
        self.reset_parameters()

    @property
    def channel_order(self) -> Tensor | None:
        """The order of channels, int32 [in_channels], as `order` saves it; None: that of x."""
        return None if self._integers is None or self.order is None else self._integers.of(self.order)

    def _kernel(self) -> Tensor:
        """What is saved of it, for 3 x 3 and 1 x 9 have as many taps: whether it is transposed, and its sizes."""
        return digits_of(torch.tensor([int(self.transposed), *self.kernel_size], device="cpu"), 1 << 31)

    def place(self, device: torch.device) -> None:
        """See `BlockSparseLayer`; and the sizes of the kernel."""
        super().place(device)
        self.kernel = self._kernel().to(device)
        if self.order is not None:
            self.order = self.order.float()  # which .half() has narrowed, and any type holds

    def forward(self, x: Tensor) -> Tensor:
        """x [n, in_channels, size...] -> [n, out_channels, size'...]; see `blocksparse.torch.conv2d`."""
        return self._applied(x, self.geometry) if isinstance(x, Tensor) else self._of_no_tensor(x)

    def _of_no_tensor(self, *arguments: Any) -> Tensor:
        """The call as a node of `torch.fx`. Raises TypeError where it is no such call."""
        node = as_leaf(self, *arguments)
        if node is None:
            need_tensor(type(self).__name__, "x", arguments[0])
        return cast(Tensor, node)

    def _applied(self, x: Tensor, geometry: tuple[int, ...]) -> Tensor:
        gates = self.gates_now() if self._gated else None
        sizes = (self.out_channels, self.in_channels)
        order = None if self._integers is None else self.channel_order
        more = (self.bias, order, gates, None, self.activation)
        return apply_conv(x, self.weight, self.tables(x.device), geometry, sizes, self._transposed, *more)

    @classmethod
    def from_dense(
        cls,
        conv: nn.Module,
        *,
        density: float | None = None,
        block_size: int = 32,
        layout: Layout | None = None,
        activation: str | None = "none",
    ) -> BlockSparseConv:
        """A layer with the blocks of a dense one that have the largest norms, or with those of a given layout.

        A convolution with groups needs neither: its blocks are those that its groups touch.

        Raises:
            ValueError: not exactly one of density and layout is given, the sizes do not fit, or `conv` pads otherwise
                than with zeros.
            TypeError: `conv` is of another kind.
        """
        dense: Any = conv
        kind = (DENSE_TRANSPOSED if cls.transposed else DENSE)[cls.rank - 1]
        if not isinstance(dense, kind):
            raise TypeError(f"[from_dense] a {type(conv).__name__}, needs a torch.nn.{kind.__name__}")
        if dense.padding_mode != "zeros":
            raise ValueError(f"[from_dense] padding_mode is {dense.padding_mode!r}, needs 'zeros'")
        both, neither = None not in (density, layout), density is None and layout is None
        if both or (neither and dense.groups == 1):
            raise ValueError("[from_dense] needs density or layout, one of them")
        weight = _without_groups(dense)
        if density is not None:
            layout = convert.select_blocks(weight, density, block_size)
        elif layout is None:
            layout = _of_groups(dense, block_size)
        options: Any = {name: getattr(dense, name) for name in ("stride", "padding", "dilation")}
        if cls.transposed:
            options["output_padding"] = dense.output_padding
        options |= {"activation": activation, "device": weight.device, "dtype": weight.dtype}
        bias = dense.bias is not None
        layer = cls(dense.in_channels, dense.out_channels, dense.kernel_size, layout, bias=bias, **options)
        with torch.no_grad():
            layer.weight.copy_(convert.from_dense(weight, layout))
            if bias:
                layer.bias.copy_(dense.bias)  # type: ignore[union-attr,arg-type]
        return layer

    def to_dense(self) -> nn.Module:
        """The same layer as nn.Conv2d or its like, behind a nn.ConstantPad2d where padding before and after differ.

        Gates are multiplied into the weight and the order of channels is applied to it; an activation is left to the
        caller.

        Raises:
            ValueError: a transposed convolution takes more pixels off one side, which the dense one cannot.
        """
        weight = convert.to_dense(self._gated_weight().detach(), self.layout, self.kernel_size)
        if (order := self.channel_order) is not None:
            weight = weight[:, order.long().argsort()]
        rank, numbers = self.rank, self.geometry[1:]
        stride, dilation, before, after, more = (numbers[i * rank : (i + 1) * rank] for i in range(1, 6))
        pads = [pad for pair in zip(reversed(before), reversed(after), strict=True) for pad in pair]
        options: Any = {"stride": stride, "dilation": dilation, "bias": self.bias is not None}
        options |= {"padding": before if before == after else 0, "device": weight.device, "dtype": weight.dtype}
        if self.transposed:
            if before != after:
                raise ValueError(f"[to_dense] padding is {before} before and {after} after, needs as much of each")
            weight, options["output_padding"] = weight.transpose(0, 1), more
        kind: Any = (DENSE_TRANSPOSED if self.transposed else DENSE)[rank - 1]
        pad: Any = _PAD[rank - 1]
        dense = kind(self.in_channels, self.out_channels, self.kernel_size, **options)
        with torch.no_grad():
            dense.weight.copy_(weight)
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense if before == after else nn.Sequential(pad(tuple(pads), 0.0), dense)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        kernel, name = state_dict.get(prefix + "kernel"), prefix + "channel_order"  # its name in files of version 0.1
        errors: list[str] = arguments[-1]
        if kernel is not None and not kernel.is_meta:
            saved, own = _kernel_text(kernel), _kernel_text(self._kernel())
            if saved != own:
                errors.append(f"{prefix}weight was saved with {saved}, this layer has {own}")
                return
            state_dict[prefix + "kernel"] = self._kernel().to(kernel.device)
        order = state_dict.get(name, state_dict.get(prefix + "order"))
        if order is not None and not order.is_meta and self.order is not None:
            try:
                order = saved_integers(order)
            except ValueError as error:
                errors.append(f"{prefix}order: channel_order is {error}")
                return
            if wrong := _not_a_permutation(order, self.in_channels):
                errors.append(f"{prefix}order: {wrong}")
                return
            state_dict[prefix + "order"] = digits_of(order, self.in_channels)
            state_dict.pop(name, None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """The sizes, the blocks and what else there is."""
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1)):
            given = getattr(self, name)
            if given != default and given != (default,) * self.rank:
                text += f", {name}={given}"
        return f"{text}, {self._describe()}" + (", channel_order" if self.channel_order is not None else "")


def _kernel_text(kernel: Tensor) -> str:
    try:
        transposed, *sizes = saved_integers(kernel).flatten().tolist() or [0]
    except ValueError as error:
        return f"a kernel that is {error}"
    return f"the {'transposed ' if transposed else ''}kernel {' x '.join(map(str, sizes))}"


def _not_a_permutation(order: Tensor, channels: int) -> str:
    """What is wrong with an order of channels."""
    if tuple(order.shape) != (channels,):
        return f"channel_order is {list(order.shape)}, needs [{channels}]"
    if order.dtype.is_floating_point or order.dtype.is_complex or order.dtype == torch.bool:
        return f"channel_order is {order.dtype}, needs integers"
    if not torch.equal(order.to("cpu", torch.int64).sort().values, torch.arange(channels, device="cpu")):
        return f"channel_order is no permutation of 0 to {channels - 1}"
    return ""


def _of_groups(dense: Any, b: int) -> Layout:
    """The blocks that the groups of a dense layer touch."""
    out, in_ = dense.out_channels, dense.in_channels
    mask = np.zeros((-(-out // b), -(-in_ // b)), np.bool_)
    for i in range(dense.groups):
        rows, columns = (range(i * n // dense.groups, (i + 1) * n // dense.groups) for n in (out, in_))
        mask[rows[0] // b : rows[-1] // b + 1, columns[0] // b : columns[-1] // b + 1] = True
    return Layout.from_mask(mask, b, out_features=out, in_features=in_)


def _without_groups(dense: Any) -> Tensor:
    """The filter [out, in, size...] of a dense layer."""
    weight: Tensor = dense.weight.detach()
    exchanged = isinstance(dense, DENSE_TRANSPOSED)
    if dense.groups > 1:
        width = weight.size(1)
        full = weight.new_zeros(weight.size(0), width * dense.groups, *weight.shape[2:])
        for i, (part, rows) in enumerate(zip(full.chunk(dense.groups), weight.chunk(dense.groups), strict=True)):
            part[:, i * width : (i + 1) * width] = rows
        weight = full
    return weight.transpose(0, 1) if exchanged else weight


class BlockSparseConv2d(BlockSparseConv):
    """`torch.nn.Conv2d` with a filter that is zero outside of blocks of channels; every block has all taps.

    `weight` [blocks, taps, b, b] is an ordinary dense parameter; `pattern` and `kernel` save the layout and the
    kernel's sizes with it, so that loading weights of others is refused, and `order` the order of channels.

    Args:
        in_channels: of x.
        out_channels: of the result.
        kernel_size: one number, or one for each size.
        layout: which blocks of channels there are, [out_channels, in_channels].
        stride: see `blocksparse.torch.conv2d`, as for all below.
        padding: numbers, pairs (before, after), "same", "causal" or "valid".
        output_padding: of transposed convolutions alone.
        dilation: one number, or one for each size.
        bias: whether to add one.
        channel_order: a permutation of the channels of x: channel c of the layout is channel_order[c] of x.
        gates: whether to have a parameter `gates` [blocks], all 1 at first: block i counts gates[i] times.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu", applied to the result.
        device: of the parameters.
        dtype: of the parameters: float32, float64, bfloat16 or float16. Gates are float32 (float64 for float64).

    Raises:
        ValueError: the layout has another size, or the geometry, the order or the activation is wrong.
    """

    rank, transposed = 2, False


class BlockSparseConv1d(BlockSparseConv):
    """`BlockSparseConv2d` over x [n, channels, width]."""

    rank, transposed = 1, False


class BlockSparseConv3d(BlockSparseConv):
    """`BlockSparseConv2d` over x [n, channels, depth, height, width]."""

    rank, transposed = 3, False


class BlockSparseConvTranspose(BlockSparseConv):
    """The base of transposed ones."""

    transposed = True

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """x [n, in_channels, size...] -> [n, out_channels, size'...]; see `blocksparse.torch.conv_transpose2d`.

        Args:
            x: with or without n.
            output_size: [size'...], or the whole shape of the result, in the place of the layer's output_padding.

        Raises:
            ValueError: no output_padding below the stride gives that size.
        """
        if not isinstance(x, Tensor):
            return self._of_no_tensor(x, output_size)
        return self._applied(x, self.geometry if output_size is None else self._geometry_for(x, output_size))

    def _geometry_for(self, x: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        rank, given = self.rank, tuple(output_size)
        sizes = given[-rank:]
        if x.dim() not in (rank + 1, rank + 2) or len(given) not in (rank, x.dim()):
            raise ValueError(
                f"[{type(self).__name__}] output_size is {list(given)} for x {list(x.shape)}, needs {rank} numbers"
            )
        kernel, stride, dilation, before, after, _ = (self.geometry[1 + i * rank :][:rank] for i in range(6))
        least = tuple(
            (x.size(i - rank) - 1) * stride[i] - before[i] - after[i] + dilation[i] * (kernel[i] - 1) + 1
            for i in range(rank)
        )
        more = tuple(size - smallest for size, smallest in zip(sizes, least, strict=True))
        if not all(0 <= padding < step for padding, step in zip(more, stride, strict=True)):
            most = [smallest + step - 1 for smallest, step in zip(least, stride, strict=True)]
            raise ValueError(
                f"[{type(self).__name__}] output_size is {list(sizes)}, needs {list(least)} to {most} for x "
                f"{list(x.shape)}"
            )
        return (*self.geometry[:-rank], *more)


class BlockSparseConvTranspose2d(BlockSparseConvTranspose):
    """`torch.nn.ConvTranspose2d` as `BlockSparseConv2d` is `torch.nn.Conv2d`; its blocks are [out, in], too."""

    rank = 2


class BlockSparseConvTranspose1d(BlockSparseConvTranspose):
    """`BlockSparseConvTranspose2d` over x [n, channels, width]."""

    rank = 1


class BlockSparseConvTranspose3d(BlockSparseConvTranspose):
    """`BlockSparseConvTranspose2d` over x [n, channels, depth, height, width]."""

    rank = 3
