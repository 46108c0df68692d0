"""What a training step of PixelCNN++ costs: block-sparse, dense, and by PyTorch's grouped convolutions.

    python benchmarks/pixelcnn.py steps [--device cuda] [--presets 128-2-dense 128-2-x4 ...]
    python benchmarks/pixelcnn.py host [--device cuda]
    python benchmarks/pixelcnn.py profile [--device cuda] [--presets 128-2-x4]
    python benchmarks/pixelcnn.py sampling [--device cuda]
    python benchmarks/pixelcnn.py sums [--device cuda]

steps: forward, backward and Adam, on a card from one CUDA graph, with bfloat16. Ways:

    ours       as `pixelcnn train` does it
    eager      the same, with PyTorch's operations between convolutions, and orders of channels by the convolutions
    torch      the same network of torch.nn.functional.conv2d (groups=), channels-last, each gated resnet compiled

host: what Python takes for a convolution's forward and backward where there is little to compute. sums: gradients of
biases beside `dy.sum(0)`, checked against float64 first; on a card 40 calls in a CUDA graph, whose dy stays in L2. On a
CPU both are PyTorch's. A line of JSON each.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import blocksparse.torch as bst
from blocksparse import graphs
from blocksparse.models.pixelcnn import elementwise, sampling
from blocksparse.models.pixelcnn.architecture import Layer, Resnet
from blocksparse.models.pixelcnn.config import PRESETS, ModelConfig, TrainConfig
from blocksparse.models.pixelcnn.network import PixelCNN, Whole
from blocksparse.models.pixelcnn.training import Trainer
from blocksparse.models.pixelcnn.weights import Convolutions
from blocksparse.torch.autograd.bias import sum_of_tokens

WARM_UPS, SAMPLES = 3, 9


# ---- The same network by PyTorch's convolutions ----------------------------------------------------------------------


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor, pads: tuple[int, ...], stride: int, groups: int) -> Tensor:
    """A convolution of x [n, C, h, w] whose groups lie behind one another."""
    return functional.conv2d(functional.pad(x, pads), weight, bias, stride, groups=groups)


class Grouped(nn.Module):
    """`Convolutions` of a kind by `torch.nn.functional.conv2d`, with as many weights.

    Group k reads its channels of every part of x, through the shuffle, and makes its channels of every part of y.
    """

    def __init__(self, of: Convolutions, config: ModelConfig) -> None:
        super().__init__()
        kind, f = of.kind, config.filters
        self.kind, self.groups = kind, config.groups if kind.sparse else 1
        self.layouts: list[Any] = []  # as of dense ones
        g = self.groups
        shape = (of.count, kind.outputs, kind.inputs // g, *kind.kernel)
        self.v = nn.Parameter(torch.randn(shape) * 0.05)
        self.gain, self.bias = nn.Parameter(torch.ones(shape[:2])), nn.Parameter(torch.zeros(shape[:2]))
        self.parts, self.made = kind.inputs // f, kind.outputs // f

    def weights(self, dtype: torch.dtype | None = None, *, unit: bool = False) -> list[Tensor]:
        """As `Convolutions.weights`."""
        scale = (1 if unit else self.gain[..., None, None, None]) * self.v.square().sum((2, 3, 4), keepdim=True).rsqrt()
        return list((self.v * scale).to(dtype or self.v.dtype).unbind())

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, index: int, **ready: bool) -> Tensor:
        """As `Convolutions.forward`, of x in the network's order."""
        kind, g = self.kind, self.groups
        if g > 1:
            x = torch.unflatten(x, 1, (self.parts, -1, g)).permute(0, 3, 1, 2, 4, 5).flatten(1, 3)
        if kind.move == "up":
            w = weight.view(g, -1, *weight.shape[1:]).transpose(1, 2).reshape(kind.inputs, -1, *kind.kernel)
            side = (kind.kernel[1] - 1) // 2
            how: dict[str, Any] = {"stride": 2, "padding": (0, side), "output_padding": (0, side), "groups": g}
            y = functional.conv_transpose2d(x, w, bias, **how)
        else:
            y = plain_conv(x, weight, bias, kind.pads, 2 if kind.move == "down" else 1, g)
        return torch.unflatten(y, 1, (g, self.made, -1)).transpose(1, 2).flatten(1, 3) if g > 1 and self.made > 1 else y


def _resnet(x: Tensor, aux: tuple[Tensor, ...], layers: tuple[Any, ...], dropout: float) -> Tensor:
    """A gated resnet of plain operations; layers: (module, weight, bias, index) of first, second and perhaps nin."""

    def conv(layer: tuple[Any, ...], y: Tensor) -> Tensor:
        module, *rest = layer
        made: Tensor = module(y, *rest)
        return made

    def concat_elu(y: Tensor) -> Tensor:
        return functional.elu(torch.cat((y, -y), 1))

    inner = conv(layers[0], concat_elu(x))
    if len(layers) > 2:
        inner = inner + conv(layers[2], concat_elu(torch.cat(aux, 1) if len(aux) > 1 else aux[0]))
    p, q = conv(layers[1], functional.dropout(concat_elu(inner), dropout)).chunk(2, 1)
    return x + p * q.sigmoid()


def allow_compiling(times: int) -> None:
    """Lets PyTorch compile a function at least so many times, for so many shapes; by default that is 8."""
    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before PyTorch 2.7
    setattr(config, name, max(times, getattr(config, name)))


class Plain(Whole):
    """Runs a network whose convolutions are `Grouped`, each gated resnet compiled on a card."""

    compiled: Callable[..., Tensor] | None = None

    def resnet(self, resnet: Resnet, x: Tensor, *aux: Tensor) -> Tensor:
        """See `Run`."""
        layers = tuple(self._parts(layer) for layer in (resnet.first, resnet.second, resnet.aux) if layer is not None)
        if Plain.compiled is None:
            allow_compiling(12 * len(PRESETS))  # four kinds of resnets on three levels
            Plain.compiled = torch.compile(_resnet, dynamic=False, fullgraph=True) if x.is_cuda else _resnet
        return Plain.compiled(x, aux, layers, self.dropout)

    def _parts(self, layer: Layer) -> tuple[Any, ...]:
        name = layer.kind.name
        return self.model.stack_of(name), self.weights[name][layer.index], self.biases[name][layer.index], 0


class PlainPixelCNN(PixelCNN):
    """A PixelCNN++ of PyTorch's convolutions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for name, stack in self.convolutions.items():
            self.convolutions[name] = Grouped(stack, config)  # type: ignore[arg-type]

    def stack_of(self, name: str) -> Any:
        """See `PixelCNN`."""
        return self.convolutions[name]

    def forward(self, x: Tensor) -> Tensor:
        """See `PixelCNN`."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self.run(Plain(self, self.weights(dtype)), x)

    def initialise(self, x: Tensor) -> None:
        """Gains as they are: only its speed is asked for."""


class PlainTrainer(Trainer):
    """Trains that one."""

    network = PlainPixelCNN


# ---- Steps -----------------------------------------------------------------------------------------------------------


@contextmanager
def way(name: str) -> Iterator[None]:
    """While it lasts, what lies between convolutions is done in that way."""
    compiles = elementwise.COMPILES
    elementwise.COMPILES = name == "ours"
    try:
        yield
    finally:
        elementwise.COMPILES = compiles


def trainer_of(preset: str, name: str, options: argparse.Namespace) -> Trainer:
    """One that trains on noise, which is of no matter for its speed."""
    config = PRESETS[preset]
    size = options.size
    images = torch.randint(0, 256, (2 * options.batch, config.channels, size, size), dtype=torch.uint8)
    training = TrainConfig(updates=1000, batch=options.batch, bf16=options.device.startswith("cuda"))
    return (PlainTrainer if name == "torch" else Trainer)(config, training, images, options.device)


def seconds_of(call: Callable[[], Any], device: str, samples: int = SAMPLES) -> list[float]:
    """Of each of so many calls."""
    times = []
    for _ in range(samples):
        begin = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times


def steps(options: argparse.Namespace) -> None:
    """A line for each preset and way."""
    for preset in options.presets:
        for name in options.ways:
            if options.device.startswith("cuda"):
                gc.collect()  # nothing of the last one is in this one's memory
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with way(name):
                begin = time.perf_counter()
                trainer = trainer_of(preset, name, options)
                for _ in range(WARM_UPS):
                    trainer.step()
                ready = time.perf_counter() - begin
                times = seconds_of(trainer.step, options.device, options.samples)
            line = {"preset": preset, "way": name, "ms": round(1000 * statistics.median(times), 3)}
            line |= {"least_ms": round(1000 * min(times), 3), "ready_s": round(ready, 1), "batch": options.batch}
            if options.device.startswith("cuda"):
                line["memory_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            say(line, options)
            del trainer


def profile(options: argparse.Namespace) -> None:
    """Time by kernel of one step; of a graph, too, each kernel is seen by its name."""
    cuda = options.device.startswith("cuda")
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if cuda else [])
    for preset in options.presets:
        for name in options.ways:
            with way(name):
                trainer = trainer_of(preset, name, options)
                for _ in range(WARM_UPS):
                    trainer.step()
                with torch.profiler.profile(activities=activities) as found:
                    trainer.step()
                    if cuda:
                        torch.cuda.synchronize()
            print(f"\n{preset}, {name}")
            by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            print(found.key_averages().table(sort_by=by, row_limit=options.rows, max_name_column_width=90))
            del trainer


# ---- Host time, sampling ---------------------------------------------------------------------------------------------


def host(options: argparse.Namespace) -> None:
    """Microseconds of Python for a convolution's forward and backward: a small one, many times, without waiting."""
    device = options.device
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    for inputs, outputs, kernel, pads in ((256, 128, (2, 3), ((1, 0), (1, 1))), (256, 128, (1, 1), (0, 0))):
        layout = graphs.balanced_random(outputs // 32, inputs // 32, degree=2, block_size=32)
        ours = bst.BlockSparseConv2d(inputs, outputs, kernel, layout, padding=pads).to(device, dtype)
        side = (1, 1) if kernel == (2, 3) else (0, 0)
        theirs: Any = nn.Conv2d(inputs, outputs, kernel, padding=side, groups=4)
        theirs = theirs.to(device, dtype, memory_format=torch.channels_last)
        x = torch.randn(1, inputs, 4, 4, device=device, dtype=dtype).to(memory_format=torch.channels_last)
        x.requires_grad_()
        calls: dict[str, nn.Module] = {"ours": ours, "torch": theirs}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(20):
            for name, layer in calls.items():
                y = layer(x)
                dy = torch.ones_like(y)
                parameters = [x, *layer.parameters()]
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(50):
                    torch.autograd.grad(layer(x), parameters, dy)
                found[name].append((time.perf_counter() - begin) / 50)
        us = {f"{name}_us": round(1e6 * statistics.median(times[5:]), 1) for name, times in found.items()}
        say({"host": f"{inputs}->{outputs} {kernel[0]}x{kernel[1]} forward + backward", **us}, options)


def sampling_times(options: argparse.Namespace) -> None:
    """Seconds for images: cached, and whole passes, of which some pixels are timed."""
    for preset in options.presets:
        model = PixelCNN(PRESETS[preset]).to(options.device)
        bf16, size = options.device.startswith("cuda"), (options.size, options.size)
        times: dict[str, float] = {}
        for plain in (False, True):
            ends: list[float] = []

            class Enough(Exception):  # noqa: N818
                pass

            def progress(done: int, ends: list[float] = ends, plain: bool = plain) -> None:
                if options.device.startswith("cuda"):
                    torch.cuda.synchronize()
                ends.append(time.perf_counter())
                if done >= (10 if plain else options.size**2):
                    raise Enough

            begin = time.perf_counter()
            with suppress(Enough):
                sampling.sample(model, options.images, size, bf16=bf16, plain=plain, progress=progress)
            each = (ends[-1] - ends[1]) / (len(ends) - 2)
            times["plain_s" if plain else "cached_s"] = round(each * options.size**2 + ends[1] - begin, 3)
        ratio = round(times["plain_s"] / times["cached_s"], 2)
        say({"sampling": preset, "images": options.images, "size": options.size, **times, "ratio": ratio}, options)


def sums(options: argparse.Namespace) -> None:
    """Microseconds of the gradient of a bias, for the levels of the network."""
    cuda, calls_of_graph = options.device.startswith("cuda"), 40
    dtype = torch.bfloat16 if cuda else torch.float32
    for side, features in ((32, 128), (32, 256), (16, 256), (8, 256)):
        dy = torch.randn(options.batch * side * side, features, device=options.device, dtype=dtype)
        exact, bound = dy.double().sum(0), torch.finfo(dtype).eps * dy.double().abs().sum(0)
        line: dict[str, Any] = {"bias_gradient": list(dy.shape), "dtype": str(dtype).removeprefix("torch.")}
        for name, call in (("ours", sum_of_tokens), ("torch", lambda dy: dy.sum(0))):
            if not ((call(dy).double() - exact).abs() <= bound).all():
                raise ArithmeticError(f"{name} is wrong for {list(dy.shape)}")
            many: Callable[[], None] = functools.partial(_repeat, call, dy, calls_of_graph)
            if cuda:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    many()
                many = graph.replay
                many()
            seconds = statistics.median(seconds_of(many, options.device, options.samples))
            line[f"{name}_us"] = round(1e6 * seconds / calls_of_graph, 1)
        say(line, options)


def _repeat(call: Callable[[Tensor], Tensor], dy: Tensor, times: int) -> None:
    for _ in range(times):
        call(dy)


def say(line: dict[str, Any], options: argparse.Namespace) -> None:
    """A line of JSON, to the terminal and the file."""
    cuda = options.device.startswith("cuda")
    line["machine"] = (
        torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    line |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    print(json.dumps(line), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with open(options.out, "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("steps", "host", "profile", "sampling", "sums"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--presets", nargs="+", choices=PRESETS, default=["128-2-dense", "128-2-x4", "128-2-x4-balanced"]
    )
    parser.add_argument("--ways", nargs="+", choices=("ours", "eager", "torch"), default=["ours", "eager", "torch"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="of images: so many pixels on both sides")
    parser.add_argument("--images", type=int, default=64, help="that are drawn")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--rows", type=int, default=30, help="of a profile")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="file of JSON lines, to which results are added")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    whats = {"steps": steps, "host": host, "profile": profile, "sampling": sampling_times, "sums": sums}
    whats[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
