"""PixelCNN++: two streams of gated resnets over three levels. See `architecture` for what is where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import layouts
from .architecture import LEVELS, Architecture, Layer, Resnet, Stream, architecture_of, count
from .config import ModelConfig
from .elementwise import biased_gate, concat_elu, gate, is_fused
from .weights import Convolutions

LEAST_VARIANCE = 1e-8


class Run(Protocol):
    """Who does a network's convolutions: on whole images, on rows or on pixels (see `sampling`)."""

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """The layer's results for x, which is the next part of what the layer reads."""

    def elu_conv(self, layer: Layer, *parts: Tensor, drops: bool = False) -> Tensor:
        """The same for concat_elu of tensors behind one another, if it `drops` with dropout."""

    def resnet(self, resnet: Resnet, x: Tensor, *aux: Tensor) -> Tensor:
        """`gated_resnet`."""

    def coarser(self, stream: Stream, level: int, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """x of a level, halved, through `inner`, doubled."""


# ---- The streams, whoever runs them ----------------------------------------------------------------------------------
# No function here holds itself, as a recursive one inside of another would: what it saw, activations above all, would
# stay until Python looks for cycles.


def gated_resnet(run: Run, resnet: Resnet, x: Tensor, *aux: Tensor) -> Tensor:
    """x + p sigmoid(q); [p, q] = second(dropout(concat_elu(first(concat_elu(x)) + nin(concat_elu(aux)))))."""
    inner = run.elu_conv(resnet.first, x)
    if resnet.aux is not None:
        inner = inner + run.elu_conv(resnet.aux, *aux)
    return gate(x, run.elu_conv(resnet.second, inner, drops=True))


class Kept:
    """Outputs of the stream u, by levels, that ul reads."""

    def __init__(self) -> None:
        self.down: list[list[Tensor]] = [[] for _ in range(LEVELS)]
        self.up: list[list[Tensor]] = [[] for _ in range(LEVELS)]

    def lists(self) -> list[list[Tensor]]:
        """Those of all levels, down and up."""
        return [*self.down, *self.up]


def run_u(run: Run, stream: Stream, x: Tensor, kept: Kept, i: int = 0) -> Tensor:
    """The stream u from its first convolution's output on, or level i of it; its own output, which is not used."""
    skips = [x]
    for resnet in stream.down[i]:
        x = run.resnet(resnet, x)
        kept.down[i].append(x)
        skips.append(x)
    if i + 1 < LEVELS:
        x = run.coarser(stream, i, x, lambda y: run_u(run, stream, y, kept, i + 1))
    else:
        skips.pop()
    for resnet in stream.up[i]:
        x = run.resnet(resnet, x, skips.pop() if len(skips) > 1 else skips[0])
        kept.up[i].append(x)
    return x


def run_ul(run: Run, stream: Stream, x: Tensor, kept: Kept, i: int = 0) -> Tensor:
    """The stream ul from its first convolutions' output on, or level i of it; its own output."""
    skips = [x]
    for resnet, u in zip(stream.down[i], kept.down[i], strict=True):
        x = run.resnet(resnet, x, u)
        skips.append(x)
    if i + 1 < LEVELS:
        x = run.coarser(stream, i, x, lambda y: run_ul(run, stream, y, kept, i + 1))
    else:
        skips.pop()
    for resnet, u in zip(stream.up[i], kept.up[i], strict=True):
        x = run.resnet(resnet, x, u, skips.pop() if len(skips) > 1 else skips[0])
    return x


# ---- The model -------------------------------------------------------------------------------------------------------


class PixelCNN(nn.Module):
    """Images -> the mixture that each pixel is drawn from, given those above and to the left of it.

    Its parameters are those of `convolutions`, by kinds. A new model's gains and biases are of use only after
    `initialise`.

    Source: Salimans et al., PixelCNN++, arXiv:1701.05517.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.plan: Architecture = architecture_of(config)
        self.convolutions = nn.ModuleDict()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            for place, (kind, number) in enumerate(self.plan.kinds.items()):
                sparse = kind.sparse and bool(config.layout)
                made = layouts.layouts_of(config, kind, number, place) if sparse else []
                self.convolutions[kind.name] = Convolutions(kind, number, made, layouts.order_of(config, kind))
        expected = count(config, layouts.density_of(config)).parameters
        assert sum(p.numel() for p in self.parameters()) == expected, (config, expected)

    def layouts_digest(self) -> str:
        """See `layouts.digest_of`."""
        return layouts.digest_of(layout for name in self.convolutions for layout in self.stack_of(name).layouts)

    def stack(self, layer: Layer) -> Convolutions:
        """Those of the layer's kind."""
        return self.stack_of(layer.kind.name)

    def stack_of(self, name: str) -> Convolutions:
        """Those of the kind of that name."""
        found = self.convolutions[name]
        assert isinstance(found, Convolutions)
        return found

    def weights(self, dtype: torch.dtype | None = None, *, unit: bool = False) -> dict[str, list[Tensor]]:
        """Weights of all convolutions, by kinds; see `Convolutions.weights`."""
        return {name: self.stack_of(name).weights(dtype, unit=unit) for name in self.convolutions}

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, channels, h, w] in [-1, 1] -> what `likelihood` takes, [n, outputs, h, w], channels-last."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self.run(Whole(self, self.weights(dtype)), x)

    def run(self, run: Whole, x: Tensor) -> Tensor:
        """`forward` by another one than the usual."""
        if x.dim() != 4 or x.size(1) != self.config.channels:
            raise ValueError(f"[pixelcnn] images are {list(x.shape)}, needs [n, {self.config.channels}, height, width]")
        plan, kept = self.plan, Kept()
        x = with_ones(x)
        run_u(run, plan.u, down_shift(run.conv(plan.u_first, x)), kept)
        ul = down_shift(run.conv(plan.ul_row, x)) + right_shift(run.conv(plan.ul_column, x))
        return run.conv(plan.head, functional.elu(run_ul(run, plan.ul, ul, kept)))

    @torch.no_grad()
    def initialise(self, x: Tensor) -> None:
        """Gains and biases such that each convolution's outputs for these images have mean 0 and the kind's deviation.

        Each is set before what follows is computed from its outputs, in the order of the network. Nothing is left out,
        as in evaluation.
        """
        self.run(_Initialising(self, self.weights(unit=True)), x)


def with_ones(x: Tensor) -> Tensor:
    """With one more channel of ones, by which convolutions tell an image from what is around it."""
    ones = x.new_ones(x.size(0), 1, *x.shape[2:])
    return torch.cat((x, ones), 1).contiguous(memory_format=torch.channels_last)


def down_shift(x: Tensor) -> Tensor:
    """By a row; zeros come in above."""
    return functional.pad(x, (0, 0, 1, 0))[:, :, :-1].contiguous(memory_format=torch.channels_last)


def right_shift(x: Tensor) -> Tensor:
    """By a column; zeros come in from the left."""
    return functional.pad(x, (1, 0))[..., :-1]


class Whole:
    """Whole images at once."""

    def __init__(self, model: PixelCNN, weights: dict[str, list[Tensor]]) -> None:
        self.model, self.weights = model, weights
        self.dropout = model.config.dropout if model.training else 0.0
        self.biases = {name: model.stack_of(name).bias.to(made[0].dtype).unbind() for name, made in weights.items()}
        self.elus: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # see `_elu`

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """See `Run`."""
        name, i = layer.kind.name, layer.index
        y: Tensor = self.model.stack(layer)(x, self.weights[name][i], self.biases[name][i], i)
        return y

    def elu_conv(self, layer: Layer, *parts: Tensor, drops: bool = False) -> Tensor:
        """See `Run`."""
        x = concat_elu(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        return self.conv(layer, functional.dropout(x, self.dropout) if drops and self.dropout > 0 else x)

    def resnet(self, resnet: Resnet, x: Tensor, *aux: Tensor) -> Tensor:
        """See `Run`."""
        return self._fused(resnet, x, aux) if is_fused(x) else gated_resnet(self, resnet, x, *aux)

    def _fused(self, resnet: Resnet, x: Tensor, aux: tuple[Tensor, ...]) -> Tensor:
        """`gated_resnet` of few passes over memory: what lies between convolutions adds their biases, too."""
        elu, x = self._elu(resnet.first, x)
        terms, biases = [self._product(resnet.first, elu)], [self._bias(resnet.first)]
        if resnet.aux is not None:
            elu, _ = self._elu(resnet.aux, *aux)
            terms.append(self._product(resnet.aux, elu))
            biases.append(self._bias(resnet.aux))
        inner = self.model.stack(resnet.second).inner_elu(tuple(terms), tuple(biases), self.dropout)
        return biased_gate(x, self._product(resnet.second, inner), self._bias(resnet.second))

    def _elu(self, layer: Layer, *parts: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer reads of tensors, and the first of these for whoever reads it next.

        A resnet and, later, the nin of another one that read the same tensor alike have it made once.
        """
        stack = self.model.stack(layer)
        key = (stack.reads, *parts)
        if key in self.elus:
            return self.elus[key]
        first, second, x = stack.elu(parts)
        self.elus[key] = second, x
        return first, x

    def _bias(self, layer: Layer) -> Tensor:
        return self.biases[layer.kind.name][layer.index]

    def _product(self, layer: Layer, x: Tensor) -> Tensor:
        """The layer's results without bias for what `elu` or `inner_elu` made."""
        stack, weight = self.model.stack(layer), self.weights[layer.kind.name][layer.index]
        y: Tensor = stack(x, weight, None, layer.index, pads=bool(stack.layouts), orders=False)
        return y

    def coarser(self, stream: Stream, level: int, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Run`. Of sizes that are odd, what was doubled is a row or a column too large."""
        y = self.conv(stream.double[level], inner(self.conv(stream.halve[level], x)))
        return y[..., : x.size(-2), : x.size(-1)]


class _Initialising(Whole):
    """Sets gain and bias of each convolution from its outputs by V / |V|.

    What is the same in all pixels of all images has no deviation that could be made 1.
    """

    def __init__(self, model: PixelCNN, weights: dict[str, list[Tensor]]) -> None:
        super().__init__(model, weights)
        self.dropout = 0.0

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        name, i = layer.kind.name, layer.index
        stack = self.model.stack(layer)
        y = stack(x, self.weights[name][i], None, i)
        variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
        deviation = torch.where(variance > LEAST_VARIANCE, variance, 1.0).sqrt()
        gain = layer.kind.scale / deviation
        stack.gain[i], stack.bias[i] = gain, -mean * gain
        return (y - mean.view(-1, 1, 1)) * gain.view(-1, 1, 1)
