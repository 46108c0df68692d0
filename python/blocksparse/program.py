"""The process of a command: Ctrl-C while it starts, and how a script ends.

Imports little, for until it has, Ctrl-C is a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn


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


def positive(text: str) -> int:
    """A whole number of 1 or more, for the `type` of an option.

    Raises:
        argparse.ArgumentTypeError: it is less.
        ValueError: it is no whole number.
    """
    from argparse import ArgumentTypeError  # scripts have imported it; see the module

    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"is {number}, needs 1 or more")
    return number


def write_to_nobody() -> None:
    """For the flush at exit, where whoever reads standard output has seen enough, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finish(main: Callable[[], int | None], *, goes_on: bool = False) -> NoReturn:
    """Runs a script's main and exits with its status; what a user can put right is a line in the place of a trace.

    Args:
        main: of the script.
        goes_on: whether the same command goes on after Ctrl-C, whose status is 130.
    """
    try:
        status = main()
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:
        write_to_nobody()
        sys.exit(141)  # 128 and the number of SIGPIPE, as programs without Python end
    except (OSError, ValueError, FloatingPointError, ModuleNotFoundError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from here." if goes_on else "\nStopped.", file=sys.stderr)
        sys.exit(130)
