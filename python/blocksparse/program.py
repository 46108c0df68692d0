"""The process of the command line: Ctrl-C while it starts, and work that takes long without a word."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType


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
