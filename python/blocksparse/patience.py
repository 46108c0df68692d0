"""Work that takes long: it is not silent, and Ctrl-C ends it."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import TypeVar

from .program import end

PAUSES = (3.0, 10.0, 30.0)  # seconds of silence while work takes long; the last one again and again

Made = TypeVar("Made")


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
            end(signal.SIGINT)
    raise AssertionError  # pauses have no end
