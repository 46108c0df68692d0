"""The process of the command line: Ctrl-C while it starts, and work that takes long without a word."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from pathlib import Path
from types import FrameType
from typing import TypeVar

PAUSES = (3.0, 10.0, 30.0)  # seconds of silence while work takes long; the last one again and again

Made = TypeVar("Made")


def is_ours() -> bool:
    """Whether this process is `python -m blocksparse` or the script of that name, not a program that imports us."""
    begins = sys.argv[0] if getattr(sys, "argv", None) else ""
    looked_for = begins == "-m" and "blocksparse" in sys.orig_argv  # "-m" until Python has found the module
    return looked_for or Path(begins).name == "blocksparse"


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends the process without a traceback: imports take seconds, and there is nothing to lose yet.

    Nothing happens where the signal is ignored, as it is for a shell's jobs in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Back to KeyboardInterrupt, so that files are put away."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nblocksparse: stopped\n")
    os._exit(128 + number)


def patiently(what: str, work: Callable[[], Made]) -> Made:
    """What the work returns or raises; says from time to time that it goes on.

    It is done in another thread, for Python hears of Ctrl-C only between two calls of the core, and one may take hours.
    Ctrl-C then ends the process: there is no other way out of such a call.
    """
    future: Future[Made] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    begin = time.monotonic()
    threading.Thread(target=run, daemon=True).start()
    for pause in itertools.chain(PAUSES, itertools.repeat(PAUSES[-1])):
        try:
            return future.result(pause)
        except NotYetError:
            if not future.done():
                print(f"blocksparse: {what}: {time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            _end(signal.SIGINT, None)
    raise AssertionError  # pauses have no end
