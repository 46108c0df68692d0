"""The kernels of a call on a card, as CUPTI records them: by PyTorch's profiler or by JAX's.

Either profiler sees all kernels of its process, whoever starts them. CUPTI serves one profiler of a process.
"""

from __future__ import annotations

import contextlib
import glob
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

CALLS = 20  # recorded at a time


@dataclass(frozen=True)
class Kernel:
    """One launch, or a copy or memset. Times are in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class Calls:
    """What was recorded of many equal calls."""

    busy: list[float] = field(default_factory=list)  # microseconds of each call in which a kernel of it ran
    names: list[str] = field(default_factory=list)  # of the kernels of a call, in order

    def add(self, kernels: list[Kernel], calls: int) -> None:
        """So many calls, which ran one after the other.

        Raises:
            RuntimeError: the kernels do not divide into so many equal calls.
        """
        kernels = sorted(kernels, key=lambda kernel: kernel.start)
        each, left = divmod(len(kernels), calls)
        parts = [kernels[i : i + each] for i in range(0, each * calls, each)] if each else []
        names = [kernel.name for kernel in parts[0]] if parts else []
        if left or not parts or any([kernel.name for kernel in part] != names for part in parts):
            found = sorted({kernel.name for kernel in kernels})
            raise RuntimeError(f"{calls} equal calls ran {len(kernels)} kernels: {', '.join(found) or 'none was seen'}")
        self.names = names
        self.busy += map(_busy, parts)

    def median(self) -> float:
        """Of all calls."""
        return statistics.median(self.busy)


def _busy(kernels: list[Kernel]) -> float:
    """How long at least one of them ran: a kernel may start before the one in front of it has ended."""
    total, last = 0.0, -1.0
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, last))
        last = max(last, kernel.end)
    return total


@contextlib.contextmanager
def _by_torch() -> Iterator[list[Kernel]]:
    import torch

    found: list[Kernel] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
        torch.cuda.synchronize()
    for event in profile.events() or []:
        if event.device_type.name == "CUDA":
            found.append(Kernel(event.name, event.time_range.start, event.time_range.end))


@contextlib.contextmanager
def _by_jax() -> Iterator[list[Kernel]]:
    import jax

    found: list[Kernel] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield found
        for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            found += kernels_of_planes(jax.profiler.ProfileData.from_file(path).planes)


def kernels_of_planes(planes: Any) -> list[Kernel]:
    """Those of a trace of JAX: of a GPU's plane the lines that are streams; others repeat them by module and op."""
    lines = [line for plane in planes if "/device:GPU" in plane.name for line in plane.lines if "Stream" in line.name]
    events = [event for line in lines for event in line.events]
    return [Kernel(e.name, e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3) for e in events]


PROFILERS = {"torch": _by_torch, "jax": _by_jax}


def record(profiler: str, call: Callable[[], object], into: Calls, calls: int = CALLS) -> None:
    """Records equal calls. Each waits until it has ended, so a call finds the caches as the one before has left them.

    Raises:
        RuntimeError: the profiler has not seen the same kernels of each.
    """
    with PROFILERS[profiler]() as kernels:
        for _ in range(calls):
            call()
    into.add(kernels, calls)
