"""The folder of a training: of one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .files import remove_leftovers

_held: set[Path] = set()  # by this process


@contextmanager
def locked(folder: Path, op: str = "lm") -> Iterator[None]:
    """Nobody else trains into the folder while it lasts; what killed processes have left there is removed.

    The lock ends with its process, however that ends. Inside of another one of the same process it does nothing.

    Raises:
        ValueError: another process has it; the message says which.
        OSError: the folder cannot be written.
    """
    path = folder.resolve() / ".lock"
    if path in _held:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _take(path, folder, op)
    except OSError as error:
        raise OSError(f"[{op}] {folder} cannot be written: {error}") from error
    _held.add(path)
    try:
        remove_leftovers(folder)
        yield
    finally:
        _held.remove(path)
        with suppress(OSError):
            path.unlink()  # before the lock ends, so that nobody has the next one by then
        file.close()


def _take(path: Path, folder: Path, op: str) -> IO[str]:
    """The file, locked."""
    while True:
        file = open(path, "a+")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise ValueError(f"[{op}] {folder} is in use by {_owner(file)}; another --out is free") from None
        except OSError as error:  # a file system without locks
            warnings.warn(f"{folder} cannot be locked ({error}): let nothing else train into it", stacklevel=4)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # its owner has removed it in between
    about = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        file.truncate(0)
        file.write(json.dumps(about))
        file.flush()
    except OSError:
        path.unlink()
        with suppress(OSError):
            file.close()  # which writes once more
        raise
    return file


def _owner(file: IO[str]) -> str:
    file.seek(0)
    try:
        about = json.loads(file.read())
        return f"process {about['process']} on {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # which has not said more yet
