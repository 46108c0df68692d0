"""Eight threads in each of two processes, all at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path


def eight_threads(work: Callable[[int], bool]) -> list[bool]:
    """What work(0), ..., work(7) return, or False where one fails."""
    right, start = [False] * 8, threading.Barrier(8)

    def run(i: int) -> None:
        start.wait()
        right[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return right


def two_processes(module: str, name: str) -> list[bool]:
    """The function of that name in a module of tests, in eight threads here and, at once, in another process."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import {module}, side_by_side
print("ready", flush=True)
sys.stdin.readline()
print(*map(int, side_by_side.eight_threads({module}.{name})))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("go\n")
        child.stdin.flush()
        mine = eight_threads(getattr(sys.modules[module], name))
        theirs = [bool(int(word)) for word in child.stdout.read().split()]
    assert len(theirs) == 8
    return mine + theirs
