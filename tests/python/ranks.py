"""Processes with ranks, as `torchrun` starts them, but forked of one that has imported what they need.

An import of PyTorch takes three seconds of a core, and `torchrun` and each of its processes need one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PRELOAD = [
    "pytest",
    "torch.distributed",
    "torch.nn.parallel",
    "blocksparse.torch.sparsify",
    "blocksparse.models.training",
]


@dataclass
class Ended:
    """How one of them ended."""

    status: int
    stdout: str
    stderr: str


def free_port() -> int:
    """One that nobody listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run_program(source: str, *words: object) -> None:
    """What `python program.py WORDS` does, for `run_ranks`."""
    sys.argv = ["program.py", *map(str, words)]
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})


def run_package(*words: object) -> None:
    """What `python -m blocksparse WORDS` does, for `run_ranks`."""
    from blocksparse.__main__ import main

    sys.exit(main([str(word) for word in words]))


def _begin(run: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], out: str) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{out}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    torch.set_num_threads(1)
    run(*arguments)


def run_ranks(run: Callable[..., Any], *arguments: Any, processes: int = 2, timeout: float = 200) -> list[Ended]:
    """run(*arguments) in each of the processes, all of one thread; a function of a module, by whose name it is found.

    Where one fails, the others are ended soon after, for they may wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(processes):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = (run, arguments, environment, f"{folder}/{rank}")
            started.append(context.Process(target=_begin, args=given, daemon=True))
            started[-1].start()
        end = time.monotonic() + timeout
        while any(process.exitcode is None for process in started):
            if any(process.exitcode for process in started):
                end = min(end, time.monotonic() + 10)
            if time.monotonic() > end:
                for process in started:
                    process.kill()
                break
            started[0].join(0.02) if started[0].exitcode is None else started[-1].join(0.02)
        for process in started:
            process.join()
        said = [
            [Path(f"{folder}/{rank}.{name}").read_text() for name in ("stdout", "stderr")] for rank in range(processes)
        ]
        return [Ended(process.exitcode or 0, *words) for process, words in zip(started, said, strict=True)]
