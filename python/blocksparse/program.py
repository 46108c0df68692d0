"""The process of the command line: Ctrl-C while it starts. Imports little, for until it has, Ctrl-C is a traceback."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def is_ours() -> bool:
    """Whether this process is `python -m blocksparse` or the script of that name, not a program that imports us."""
    begins = sys.argv[0] if getattr(sys, "argv", None) else ""
    looked_for = begins == "-m" and "blocksparse" in sys.orig_argv  # "-m" until Python has found the module
    return looked_for or os.path.basename(begins) == "blocksparse"


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends the process without a traceback: imports take seconds, and there is nothing to lose yet.

    Nothing happens where the signal is ignored, as it is for a shell's jobs in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def raise_on_interrupt() -> None:
    """Back to KeyboardInterrupt, so that files are put away."""
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(number: int, frame: FrameType | None = None) -> None:
    """Ends the process at once, without a traceback."""
    os.write(2, b"\nblocksparse: stopped\n")
    os._exit(128 + number)
