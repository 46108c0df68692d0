"""Processes with ranks, as `torchrun` starts them, but forked of one that has imported what they need.

An import of PyTorch takes three seconds of a core, and `torchrun` and each of its processes need one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
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
    "blocksparse.models.language.training",
]


# Globals of programs, which end with their process: a DistributedDataParallel that is taken down behind its process
# group waits for a thread of gloo's, which may wait for Python's lock.
_kept: dict[str, Any] = {}


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
    """What `python program.py WORDS` does, where that is the source."""
    sys.argv = ["program.py", *map(str, words)]
    _kept["__name__"] = "__main__"
    exec(compile(source, "program.py", "exec"), _kept)


def run_script(path: Path, *words: object) -> None:
    """What `python PATH WORDS` does."""
    sys.argv, sys.path[0:0] = [str(path), *map(str, words)], [str(path.parent)]
    runpy.run_path(str(path), run_name="__main__")


def run_package(*words: object) -> None:
    """What `python -m blocksparse WORDS` does."""
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


def run_ranks(run: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[Ended]:
    """run(*arguments) in each of the processes, all of one thread; a function of a module, by whose name it is found.

    Where one fails, the others are ended soon after, for they may wait for it.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return _fork(run, arguments, [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)])


def run_forked(run: Callable[..., Any], *arguments: Any) -> Ended:
    """run(*arguments) in one process without a rank."""
    (ended,) = _fork(run, arguments, [{}])
    return ended


def _fork(run: Callable[..., Any], arguments: tuple[Any, ...], environments: list[dict[str, str]]) -> list[Ended]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i, more in enumerate(environments):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
            given = (run, arguments, environment, f"{folder}/{i}")
            started.append(context.Process(target=_begin, args=given, daemon=True))
            started[-1].start()
        end = time.monotonic() + 200
        while running := [process for process in started if process.exitcode is None]:
            if any(process.exitcode for process in started):
                end = min(end, time.monotonic() + 10)
            if time.monotonic() > end:
                for process in running:
                    process.kill()
            running[0].join(0.05)
        return [
            Ended(
                process.exitcode or 0,
                *(Path(f"{folder}/{i}.{name}").read_bytes().decode() for name in ("stdout", "stderr")),
            )
            for i, process in enumerate(started)
        ]
