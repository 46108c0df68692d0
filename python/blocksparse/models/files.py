"""Files that are complete or not there at all."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

AnyPath = str | os.PathLike[str]

LONGEST = 255  # bytes of a name, of Linux's usual file systems


def paths_of(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """One path or several."""
    return [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def named_files(words: Iterable[str], option: str, taken: Iterable[str] = ()) -> dict[str, Path]:
    """Files by their names, of the words NAME=FILE of an option.

    Raises:
        ValueError: a word is none, or its name is there twice or taken by something else.
    """
    found: dict[str, Path] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise ValueError(f"{option} is {word}, needs NAME=FILE")
        if name in taken:
            raise ValueError(f"{option} is {word}, needs another name: {name} is taken")
        if name in found:
            raise ValueError(f"{option} {name} is both {found[name]} and {path}, needs a name for each")
        found[name] = Path(path)
    return found


def check_name(path: AnyPath, op: str = "lm") -> None:
    """Raises OSError where a file's name is longer than file systems have them."""
    size = len(os.fsencode(Path(path).name))
    if size > LONGEST:
        raise OSError(f"[{op}] {path} has a name of {size} bytes, needs {LONGEST} or fewer")


def check_writable(path: AnyPath, op: str = "lm") -> None:
    """Whether `write_whole` can write there: asked before hours of computing, not behind them. Makes the folder.

    Raises:
        OSError: it cannot.
    """
    path = Path(path)
    check_name(path, op)
    if path.is_dir():
        raise IsADirectoryError(f"[{op}] {path} is a folder, needs to be a file to be written")
    if is_device(path):
        return
    beside = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.lstat()  # the file system may refuse this name and take the shorter one beside it
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


def is_device(path: Path) -> bool:
    """Whether it is standard output, or there and no file, such as /dev/null."""
    return is_stdout(path) or (path.exists() and not path.is_file() and not path.is_dir())


HOST = re.sub(r"[^\w-]", "-", socket.gethostname())
_PARTS = re.compile(r"\.(.+)\.(?P<host>[\w-]+)\.(?P<process>[1-9]\d*)\.(part|dir)")
_OLD_PARTS = re.compile(r"\.(last\.safetensors|log\.jsonl)\.(?P<process>[1-9]\d*)")  # as they were called before


def _beside(path: Path) -> Path:
    """Of a long name there is the beginning and a digest: with host and process it has 255 bytes at most."""
    name, data = path.name, os.fsencode(path.name)
    if len(data) > 100:
        name = f"{name[:40]}-{hashlib.sha256(data).hexdigest()[:12]}"  # 40 letters are 160 bytes at most
    return path.with_name(f".{name}.{HOST}.{os.getpid()}.part")


def remove_leftovers(folder: Path) -> None:
    """Removes what processes of this host have begun to write there and have not lived to end."""
    for path in folder.iterdir():
        part = _PARTS.fullmatch(path.name) or _OLD_PARTS.fullmatch(path.name)
        if part and part.groupdict().get("host", HOST) == HOST and not _lives(int(part["process"])):
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


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
    path = _target(path)
    in_place, beside = is_device(path), _beside(path)
    try:
        with _said(path, op):
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
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def write_whole_by(path: AnyPath, writer: Callable[[Path], Any], op: str = "lm") -> None:
    """`write_whole` where only a library can write the file: `writer` gets a path in a folder beside.

    It may leave files of its own in that folder when it is stopped. Not for devices.

    Raises:
        OSError: the disk is full, say; the old file is then still there.
    """
    path = _target(path)
    folder = _beside(path).with_suffix(".dir")  # no longer than the name that `check_writable` has tried
    made = folder / path.name
    try:
        with _said(path, op):
            folder.mkdir(parents=True, exist_ok=True)
            made.touch()
            mode = made.stat().st_mode  # what files have here, which the writer may not know
            writer(made)
            with suppress(OSError):  # shares on which all files are somebody else's forbid it
                made.chmod(mode)
            with open(made, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(made, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _target(path: AnyPath) -> Path:
    """Where a symbolic link leads."""
    path = Path(path)
    return Path(os.path.realpath(path)) if not is_stdout(path) and path.is_symlink() else path


@contextmanager
def _said(path: Path, op: str) -> Iterator[None]:
    """Errors that name the file."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except OSError as error:
        kept = ", what was there is kept" if path.is_file() else ""
        raise OSError(f"[{op}] {path} could not be written{kept}: {error}") from error


def _write(file: IO[bytes], content: bytes | Callable[[IO[bytes]], Any]) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content)
