"""Groups of processes for tests of what runs in several, on the CPU with Gloo."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120  # seconds that a collective waits for a process

Body = Callable[..., Any]

_context = multiprocessing.get_context("forkserver")  # PyTorch is imported once, in a process without threads
_context.set_forkserver_preload(
    ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "blocksparse.torch"]
)


def run(bodies: list[Body], processes: int, folder: Path, joined: bool = True) -> dict[str, list[str]]:
    """What each body raised, by its name, in each process: "" if nothing, "not run" behind one that raised.

    A body is called as body(rank, processes, folder), within an initialised process group if `joined`.
    """
    pipes, group = [], []
    for rank in range(processes):
        mine, its = _context.Pipe(duplex=False)
        process = _context.Process(target=_work, args=(bodies, rank, processes, folder, its, joined), daemon=True)
        process.start()
        its.close()
        pipes.append(mine)
        group.append(process)
    found = [_received(pipe) for pipe in pipes]
    for process in group:
        process.join(TIMEOUT)
        process.kill()
    return {body.__name__: [one.get(body.__name__, "not run") for one in found] for body in bodies}


def _received(pipe: Connection) -> dict[str, str]:
    found: dict[str, str] = {}
    while True:
        try:
            found |= pipe.recv()
        except EOFError:  # it is done, or has died
            return found


def _work(bodies: list[Body], rank: int, processes: int, folder: Path, pipe: Connection, joined: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, patience = f"file://{folder}/store-{processes}", datetime.timedelta(seconds=TIMEOUT)
    if joined:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=patience)
    for body in bodies:
        torch.manual_seed(0)
        try:
            body(rank, processes, folder)
        except BaseException:
            pipe.send({body.__name__: traceback.format_exc()})
            os._exit(1)  # the others are to hear of it, and shall not wait
        pipe.send({body.__name__: ""})
    pipe.close()
    os._exit(0)  # without a word with the others, of whom some may be dead
