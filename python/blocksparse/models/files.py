"""Files that are complete or not there at all."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

AnyPath = str | os.PathLike[str]


def paths_of(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """One path or several."""
    return [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def check_writable(path: AnyPath, op: str = "lm") -> None:
    """Whether `write_whole` can write there: asked before hours of computing, not behind them. Makes the folder.

    Raises:
        OSError: it cannot.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"[{op}] {path} is a folder, needs to be a file to be written")
    if _is_device(path):
        return
    beside = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()
        remove_leftovers(path.parent)
    except OSError as error:
        raise OSError(f"[{op}] {path} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


STDIN, STDOUT = Path("/dev/stdin"), Path("/dev/stdout")  # as shells have them; also by the name of "-"
_STDINS, _STDOUTS = ({path, Path(f"/dev/fd/{i}"), Path(f"/proc/self/fd/{i}")} for i, path in enumerate((STDIN, STDOUT)))


def is_stdout(path: Path) -> bool:
    """Whether it names standard output."""
    return path in _STDOUTS


def read_whole(path: AnyPath) -> bytes:
    """All bytes of a file, or of standard input.

    Raises:
        OSError: it cannot be read.
    """
    path = Path(path)
    if path in _STDINS:
        return sys.stdin.buffer.read()
    if path.is_dir():
        raise IsADirectoryError(f"[lm] {path} is a folder, needs to be a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise type(error)(f"[lm] {path} could not be read: {error.strerror}") from error


def _is_device(path: Path) -> bool:
    return is_stdout(path) or (path.exists() and not path.is_file() and not path.is_dir())


HOST = re.sub(r"[^\w-]", "-", socket.gethostname())
_PARTS = re.compile(r"\.(.+)\.(?P<host>[\w-]+)\.(?P<process>[1-9]\d*)\.part")
_OLD_PARTS = re.compile(r"\.(last\.safetensors|log\.jsonl)\.(?P<process>[1-9]\d*)")  # as they were called before


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{HOST}.{os.getpid()}.part")


def remove_leftovers(folder: Path) -> None:
    """Removes what processes of this host have begun to write there and have not lived to end."""
    for path in folder.iterdir():
        part = _PARTS.fullmatch(path.name) or _OLD_PARTS.fullmatch(path.name)
        if part and part.groupdict().get("host", HOST) == HOST and not _lives(int(part["process"])):
            with suppress(OSError):
                path.unlink()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def write_whole(path: AnyPath, content: bytes | Callable[[IO[bytes]], Any], op: str = "lm") -> None:
    """Writes beside the file, then puts it in its place: whoever is stopped in between finds the last one.

    What is there and no file, such as /dev/null, is written to, and so is standard output. A symbolic link stays one.

    Raises:
        OSError: the disk is full, say; the old file is then still there.
    """
    path = Path(path)
    if not is_stdout(path) and path.is_symlink():
        path = Path(os.path.realpath(path))
    in_place, beside = _is_device(path), _beside(path)
    try:
        if is_stdout(path):
            _write(sys.stdout.buffer, content)
            sys.stdout.buffer.flush()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path if in_place else beside, "wb") as file:
            _write(file, content)
            if in_place:
                return
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except OSError as error:
        kept = ", what was there is kept" if path.is_file() else ""
        raise OSError(f"[{op}] {path} could not be written{kept}: {error}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _write(file: IO[bytes], content: bytes | Callable[[IO[bytes]], Any]) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content)
