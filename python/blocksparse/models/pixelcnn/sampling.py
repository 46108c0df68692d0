"""Drawing images from a PixelCNN++, pixel by pixel: computing only what each new pixel needs.

The plain way runs the whole network for every pixel. But each convolution has then one more pixel of input, and owes
one more of output. So

- u, which sees the rows above alone, is computed once a row: a row of each convolution at a time, from that row of its
  input and the one before, which is kept;
- ul is computed once a pixel: a pixel of each convolution at a time, from the row before and the pixel to the left;
- a level of half the size is computed where its pixels begin, in every second row and column, and one of a quarter in
  every fourth. What is doubled of it is kept for the pixels that follow.

Every convolution is computed once for each of its pixels, as in one whole pass, and the results are the same up to
rounding: the order of the terms of a sum may depend on the size of an image.

Source: Ramachandran et al., Fast Generation for Convolutional Autoregressive Models, arXiv:1704.06001.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ...torch.modes import evaluating
from . import likelihood
from .architecture import LEVELS, Layer, Stream
from .config import check_seed
from .network import Kept, PixelCNN, Whole, run_u, run_ul

CAPTURES = True  # on a card; False: every operation by itself


@torch.no_grad()
def sample(
    model: PixelCNN,
    number: int,
    size: tuple[int, int],
    *,
    seed: int = 0,
    given: Tensor | None = None,
    rows: int = 0,
    bf16: bool = False,
    plain: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """Images, or what follows in given ones.

    Args:
        model: on any device.
        number: of images.
        size: (height, width).
        seed: another one, other images. The random numbers are made on the CPU: the same for any device.
        given: bytes [number, channels, height, width], whose first `rows` rows are kept.
        rows: see `given`.
        bf16: convolutions in bfloat16, by autocast.
        plain: the whole network for every pixel, to compare with.
        progress: is told after each pixel how many are done.

    Returns:
        Bytes [number, channels, height, width].

    Raises:
        ValueError: a size or the seed is wrong, or the model gives no probabilities.
    """
    channels, mixture = model.config.channels, model.config.mixture
    height, width = size
    if number < 1 or height < 1 or width < 1:
        raise ValueError(f"[pixelcnn] {number} images of {height} x {width} pixels, needs 1 or more of each")
    if given is not None and given.shape != (number, channels, height, width):
        raise ValueError(f"[pixelcnn] images are {list(given.shape)}, needs {[number, channels, height, width]}")
    check_seed(seed)
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    numbers = likelihood.random_numbers(number, channels, mixture, size, generator).to(parameter.device)
    x = torch.zeros(number, channels, height, width, device=parameter.device, dtype=parameter.dtype)
    begin = 0
    if given is not None:
        begin = min(rows, height)
        x[:, :, :begin] = likelihood.to_range(given[:, :, :begin]).to(x)
    with evaluating(model):
        way: _Plain | _Cached = (_Plain if plain else _Cached)(model, x, bf16)
        for i in range(height):
            way.row(i)
            for j in range(width):
                way.pixel(i, j, numbers[:, :, i : i + 1, j : j + 1] if i >= begin else None)
                progress(i * width + j + 1)
    if not bool(x.isfinite().all()):
        raise ValueError("[pixelcnn] the model gives no probabilities, but NaN: its training has failed")
    return likelihood.to_bytes(x)


class _Plain:
    """The whole network for every pixel."""

    def __init__(self, model: PixelCNN, x: Tensor, bf16: bool) -> None:
        self.model, self.x, self.bf16 = model, x, bf16
        with torch.autocast(x.device.type, torch.bfloat16, bf16):
            self.weights = model.weights(torch.bfloat16 if bf16 else None)

    def row(self, i: int) -> None:
        """Nothing to prepare."""

    def pixel(self, i: int, j: int, numbers: Tensor | None) -> None:
        """Draws it from random numbers, if it is not given."""
        if numbers is not None:
            with torch.autocast(self.x.device.type, torch.bfloat16, self.bf16):
                outputs = self.model.run(Whole(self.model, self.weights), self.x)[:, :, i : i + 1, j : j + 1]
            self.x[:, :, i, j] = likelihood.draw(outputs, numbers, self.x.size(1))[:, :, 0, 0]


class _Cached:
    """What is new alone. On a card, what is done for a pixel is a CUDA graph for each column and each row of four.

    Whatever graphs read and write lies in the same tensors for all rows.
    """

    def __init__(self, model: PixelCNN, x: Tensor, bf16: bool) -> None:
        self.model, self.x, self.bf16 = model, x, bf16
        n, channels, _, width = x.shape
        weights = model.weights(torch.bfloat16 if bf16 else None)
        self.rows, self.pixels = _Rows(model, weights), _Pixels(model, weights, width)
        self.known = x.new_zeros(n, channels + 1, 2, width)  # the row before and this one, with ones
        self.numbers = x.new_zeros(n, model.config.mixture + channels, 1, 1)
        self.drawn = x.new_zeros(n, channels)
        self.kept = Kept()
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def row(self, i: int) -> None:
        """The stream u in row i, of what lies above it."""
        plan, n, width = self.model.plan, self.x.size(0), self.x.size(3)
        with torch.autocast(self.x.device.type, torch.bfloat16, self.bf16):
            if i > 0:
                above = self.known[:, :, 1:].clone()  # which is kept, while `known` changes
                first, from_row = (self.rows.conv(layer, above) for layer in (plan.u_first, plan.ul_row))
            else:
                zeros = self.x.new_zeros(n, self.model.config.filters, 1, width)
                first = from_row = zeros.to(torch.bfloat16) if self.bf16 else zeros
            new = Kept()
            self.rows.i = i
            run_u(self.rows, plan.u, first, new)
        if i == 0:  # where all levels are computed
            self.from_row = torch.empty_like(from_row)
            for mine, made in zip(self.kept.lists(), new.lists(), strict=True):
                mine += [torch.empty_like(t) for t in made]
        self.from_row.copy_(from_row)
        for mine, made in zip(self.kept.lists(), new.lists(), strict=True):
            for t, value in zip(mine, made, strict=False):  # of levels that are not computed in this row, none are made
                t.copy_(value)
        self.known[:, :, 0] = self.known[:, :, 1]
        self.known[:, :-1, 1], self.known[:, -1, 1] = 0, 1

    def pixel(self, i: int, j: int, numbers: Tensor | None) -> None:
        """Draws it from random numbers, or takes what is given."""
        self.pixels.i, self.pixels.j = i, j
        if numbers is None:
            self._outputs(j)  # for the caches
            self.known[:, :-1, 1, j] = self.x[:, :, i, j]
            return
        self.numbers.copy_(numbers)
        if self.x.is_cuda and CAPTURES and i > 0:  # the first row makes the caches
            self._captured(i, j).replay()
        else:
            self._draw(j)
        self.x[:, :, i, j] = self.drawn

    def _captured(self, i: int, j: int) -> torch.cuda.CUDAGraph:
        key = (i % (1 << (LEVELS - 1)), j)
        if key not in self.graphs:
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            self.graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[key], pool=pool):
                self._draw(j)
        return self.graphs[key]

    def _draw(self, j: int) -> None:
        """A pixel of `known` and `drawn`, from `numbers`."""
        pixel = likelihood.draw(self._outputs(j), self.numbers, self.x.size(1))[:, :, 0, 0]
        self.drawn.copy_(pixel)
        self.known[:, :-1, 1, j] = pixel

    def _outputs(self, j: int) -> Tensor:
        """The model's, [n, outputs, 1, 1]."""
        plan, here = self.model.plan, Kept()
        with torch.autocast(self.x.device.type, torch.bfloat16, self.bf16):
            ul = self.from_row[..., j : j + 1]
            if j > 0:
                ul = ul + self.pixels.of_window(plan.ul_column, self.known[..., j - 1 : j])
            for mine, theirs in ((here.down, self.kept.down), (here.up, self.kept.up)):
                for level, tensors in enumerate(theirs):
                    mine[level] = [t[..., j >> level : (j >> level) + 1] for t in tensors]
            last = functional.elu(run_ul(self.pixels, plan.ul, ul, here))
            return self.pixels.of_window(plan.head, last)


class _Part(Whole):
    """Convolutions of a part of the images."""

    def of_window(self, layer: Layer, x: Tensor) -> Tensor:
        """Of x that holds all that the result sees."""
        name, i = layer.kind.name, layer.index
        y: Tensor = self.model.stack(layer)(x, self.weights[name][i], self.biases[name][i], i, pads=False)
        return y


class _Rows(_Part):
    """The next row of each convolution of u. `i` is the row of the images."""

    def __init__(self, model: PixelCNN, weights: dict[str, list[Tensor]]) -> None:
        super().__init__(model, weights)
        self.i = 0
        self.before: dict[Layer, Tensor] = {}  # the last row that a layer has read
        self.doubled: dict[Layer, Tensor] = {}  # the last two rows that it has made

    def _with_row_before(self, layer: Layer, x: Tensor) -> Tensor:
        left, right, above, _ = layer.kind.pads
        if above:
            before = self.before.get(layer)
            before, self.before[layer] = torch.zeros_like(x) if before is None else before, x
            x = torch.cat((before, x), 2)
        return functional.pad(x, (left, right))

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """x [n, inputs, 1, width] -> [n, outputs, 1, width]."""
        return self.of_window(layer, self._with_row_before(layer, x) if layer.kind.taps > 1 else x)

    def coarser(self, stream: Stream, level: int, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Run`: computed in even rows of the level, of two rows at once."""
        halve, double = stream.halve[level], stream.double[level]
        window = self._with_row_before(halve, x)
        odd = (self.i >> level) % 2
        if not odd:
            self.doubled[double] = super().conv(double, inner(self.of_window(halve, window)))[..., : x.size(3)]
        return self.doubled[double][:, :, odd : odd + 1]


class _Pixels(_Part):
    """The next pixel of each convolution of ul. `i` and `j` are its row and column in the images."""

    def __init__(self, model: PixelCNN, weights: dict[str, list[Tensor]], width: int) -> None:
        super().__init__(model, weights)
        self.i = self.j = 0
        self.width = width
        self.read: dict[Layer, Tensor] = {}  # the row before and this one, right of a column of zeros
        self.doubled: dict[Layer, Tensor] = {}  # the last two rows that a layer has made

    def _two_rows(self, rows: dict[Layer, Tensor], layer: Layer, x: Tensor) -> Tensor:
        if layer not in rows:
            shape = (x.size(0), x.size(1), 2, -(-self.width >> layer.level) + 2)
            rows[layer] = x.new_zeros(shape).contiguous(memory_format=torch.channels_last)
        return rows[layer]

    def _window(self, layer: Layer, x: Tensor) -> Tensor:
        rows, j = self._two_rows(self.read, layer, x), self.j >> layer.level
        if j == 0:
            rows[:, :, 0] = rows[:, :, 1]
        rows[:, :, 1, j + 1] = x[:, :, 0, 0]
        return rows[..., j : j + 2]

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """x [n, inputs, 1, 1] -> [n, outputs, 1, 1]."""
        return self.of_window(layer, self._window(layer, x) if layer.kind.taps > 1 else x)

    def coarser(self, stream: Stream, level: int, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Run`: computed where rows and columns of the level are even, of four pixels at once."""
        halve, double = stream.halve[level], stream.double[level]
        window = self._window(halve, x)
        i, j = self.i >> level, self.j >> level
        rows = self._two_rows(self.doubled, double, x)
        if i % 2 == 0 and j % 2 == 0:
            rows[..., j : j + 2] = super().conv(double, inner(self.of_window(halve, window)))
        return rows[:, :, i % 2 : i % 2 + 1, j : j + 1]
