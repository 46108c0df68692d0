"""Stopping when it suits: Ctrl-C and SIGTERM ask for an end, a second Ctrl-C does not ask."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORWARDED_SECONDS = 1.0  # in which a signal may reach a process of several twice: from the terminal and from torchrun


class Stopped(Exception):  # noqa: N818
    """What was asked to end has done so, without a result."""


class Stop:
    """Whether an end was asked for, and by which signal (0: not yet)."""

    def __init__(self) -> None:
        self.number = 0
        self._asked = threading.Lock()

    def ask(self, number: int) -> None:
        """Asks for it, by a signal. Says so the first time, before the update can have ended."""
        if self._asked.acquire(blocking=False):
            self.number = number
            _say("stops after this update and writes a checkpoint; Ctrl-C again stops at once")

    def __call__(self) -> bool:
        """Whether it was."""
        return self.number != 0

    @property
    def status(self) -> int:
        """With which the process should exit. SIGTERM stands for a signal that has reached other processes alone."""
        return 128 + (self.number or signal.SIGTERM)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """While it lasts, the first Ctrl-C or SIGTERM sets what is yielded; a Ctrl-C after it ends the process.

    A thread reads the signals' numbers, for Python calls its handlers between two operations of the main thread only,
    and one may be a product that takes seconds. Outside of the main thread, nothing is set: signals are not its affair.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        stop.ask(number)

    read, write = os.pipe()
    os.set_blocking(write, False)
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup has it
    before = {number: signal.signal(number, handle) or signal.SIG_DFL for number in heard}
    wakeup = signal.set_wakeup_fd(write)
    watcher = threading.Thread(target=_watch, args=(read, stop), daemon=True)
    watcher.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write)
        watcher.join()
        os.close(read)


def _watch(read: int, stop: Stop) -> None:
    """Until the other end of the pipe is closed."""
    first, since = 0, 0.0
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    while data := os.read(read, 1):
        number = data[0]
        if number not in SIGNALS:
            continue
        if not first:
            first, since = number, time.monotonic()
            stop.ask(number)
        elif signal.SIGINT in (first, number) and (alone or time.monotonic() - since > FORWARDED_SECONDS):
            _say("stopped at once")
            os._exit(128 + number)


def _say(text: str) -> None:
    """On a line of its own, behind a bar or the terminal's ^C; of several processes the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"\nblocksparse: {text}\n".encode())
