"""How long layers take on this device, for the shapes that a model feeds them."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import timeit
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

from ...modes import evaluating
from ...modules.conv import DENSE, DENSE_TRANSPOSED, BlockSparseConv
from ..batches import Forward, feed

SECONDS = 0.003  # of a sample; waiting for a card takes 0.01 ms of it
FEW = 20  # calls tell how many a sample has
SHORT = 2e-3  # seconds of a call, the host's part included, below which it is timed without that part on a card
HZ = 3e9  # of a card's clock, at most: cards sleep for cycles
MOST_SLEEP = 0.1  # seconds
SAMPLES = 9  # of each layer, in turn
LEAST, ENOUGH = 3, 0.5  # so many suffice for layers that have been timed for so many seconds


@dataclass(frozen=True)
class Seen:
    """What a layer was fed.

    Attributes:
        shape: of x.
        dtype: of x.
        autocast: the dtype of autocast around it, None where there was none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # a list has no hash, which layers that are alike need


@dataclass(frozen=True)
class Timing:
    """A layer's time before and after, in seconds of a forward call.

    Attributes:
        name: of the module.
        shape: of x.
        before_s: of the layer as it was.
        after_s: of the block-sparse layer.
        density: of the block-sparse layer's blocks.
        converted: whether it is block-sparse now: by a layer in its place, or as part of a `BlockSparseMLP`, which has
            a timing of its own.
        measured: name of the module that was timed: this one, or one alike that has as many blocks or a few more.
    """

    name: str
    shape: tuple[int, ...]
    before_s: float
    after_s: float
    density: float
    converted: bool
    measured: str

    @property
    def speedup(self) -> float:
        """How many times faster it became, or would have become."""
        return self.before_s / self.after_s


def watch(modules: Mapping[str, nn.Module], model: nn.Module, example: Any, forward: Forward = None) -> dict[str, Seen]:
    """What modules are fed, by name, while the model runs over an example in eval mode; of several calls the last."""
    seen: dict[str, Seen] = {}

    def of(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                x, kind = inputs[0], inputs[0].device.type
                cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                seen[name] = Seen(tuple(x.shape), x.dtype, cast)

        return hook

    handles = [module.register_forward_pre_hook(of(name)) for name, module in modules.items()]
    try:
        with evaluating(model):
            feed(model, example, forward)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def guess(module: Any, tokens: int) -> Seen:
    """An input of about so many tokens, or pixels, for a layer that nobody has seen at work."""
    parameter = next(module.parameters())
    if isinstance(module, (*DENSE, *DENSE_TRANSPOSED, BlockSparseConv)):
        rank = len(module.kernel_size)
        side = max(
            round(tokens ** (1 / rank)), *(k * d for k, d in zip(module.kernel_size, _each(module), strict=True))
        )
        return Seen((1, module.in_channels, *(side,) * rank), parameter.dtype)
    if isinstance(module, nn.LSTM):
        steps = (16, max(1, tokens // 16))
        return Seen((*(reversed(steps) if module.batch_first else steps), module.input_size), parameter.dtype)
    features = module.in_features if hasattr(module, "in_features") else module.weight.size(0)  # of Conv1D
    return Seen((tokens, features), parameter.dtype)


def _each(module: Any) -> tuple[int, ...]:
    dilation = module.dilation
    return dilation if isinstance(dilation, tuple) else (dilation,) * len(module.kernel_size)


def input_for(seen: Seen, device: torch.device) -> Tensor:
    """Random numbers of that shape, from a generator of their own."""
    x = torch.randn(seen.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return x.to(device, seen.dtype)


def time_layers(before: nn.Module, after: nn.Module, seen: Seen) -> tuple[float, float]:
    """Seconds of a forward call of both, in eval mode, with PyTorch's threads: medians of samples taken in turn.

    A sample is of as many calls as take 3 ms, behind one that brings weights into the cache. So a pair takes 0.1 s,
    however short a call is, and half a second or eight calls of both where calls are long.

    On a card the host takes 20 to 100 us for a call, whatever the layer. So where calls are short the card is kept busy
    until some wait in its queue, and its clock is read between them.

    `Timer.blocked_autorange` goes on until waiting for the device is 0.01 % of a sample. If that takes 10 us, as on a
    card, and a call 18 us, a sample takes 0.4 s.
    """
    device = next(after.parameters()).device
    x = input_for(seen, device)
    timers: list[timeit.Timer | Queued] = [timeit.Timer(partial(layer, x), timer=timer) for layer in (before, after)]
    cast: Any = contextlib.nullcontext()
    if seen.autocast is not None:
        # A model's forward narrows a weight once. Kept, that would be left out: 0.9 ms in place of 2.7 (2048 x 2048, 1
        # token, bfloat16, one thread, a shared machine, 2026-11-26), of weights that want gradients alone.
        cast = torch.autocast(device.type, seen.autocast, cache_enabled=False)
    samples: list[list[float]] = []
    with evaluating(before), evaluating(after), cast, torch.cuda.device_of(x):  # the current card is waited for
        calls = [_calls(one) for one in timers]
        if x.is_cuda and SECONDS / max(calls) < SHORT and (few := _asleep_for(layers := [before, after], x)):
            timers, calls = [Queued(layer, x) for layer in layers], [few, few]
        start = time.perf_counter()
        while len(samples) < SAMPLES and (len(samples) < LEAST or time.perf_counter() - start < ENOUGH):
            samples.append([_sample(one, n) for one, n in zip(timers, calls, strict=True)])
    return statistics.median(s[0] for s in samples), statistics.median(s[1] for s in samples)


class Queued:
    """Times calls on a card as `timeit.Timer` does, without the time that the host takes for them.

    The card first sleeps for as long as the host needs to queue them, twice over.
    """

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self.layer, self.x = layer, x
        self.host_s = min(self._queue(1) for _ in range(3))  # of a call; one may be interrupted
        self.slept = False  # whether the card still did when the last calls were queued
        torch.cuda.synchronize(x.device)

    def timeit(self, calls: int) -> float:
        """Seconds of so many calls."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(min(2 * calls * self.host_s, MOST_SLEEP) * HZ))
        start.record()
        self._queue(calls)
        self.slept = not start.query()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _queue(self, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            self.layer(self.x)
        return time.perf_counter() - began


def _asleep_for(layers: list[nn.Module], x: Tensor) -> int:
    """How many calls of both can be queued while a card sleeps; 0: not even one.

    A queue holds about 1000 kernels, and whoever fills it waits. A layer that waits for the card itself is never done
    before. Both layers are timed in one way: with the host's part or without.
    """
    queued = [Queued(layer, x) for layer in layers]
    for calls in (FEW, FEW // 4, 1):
        for one in queued:
            one.timeit(calls)
        if all(one.slept for one in queued):
            return calls
    return 0


def _calls(of: timeit.Timer | Queued) -> int:
    """So many calls take the time of a sample. A single one may have been interrupted, so several are asked, too."""
    few = min(FEW, _fill(_sample(of, 1)))
    return few if few == 1 else _fill(_sample(of, few))


def _fill(seconds: float) -> int:
    return math.ceil(SECONDS / max(seconds, 1e-7))


def _sample(of: timeit.Timer | Queued, calls: int) -> float:
    """Seconds of a call, behind one more that is not timed."""
    of.timeit(1)
    return of.timeit(calls) / calls
