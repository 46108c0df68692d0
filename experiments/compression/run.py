"""Sizes and seconds of files made small by language models and by packers.

    python experiments/compression/run.py --file domain=reviews.txt --file wikitext-2=wikitext-2.test.txt \
        --packers --model dense=out/dense/last.safetensors --device cuda --bf16 \
        --results experiments/compression/results/NAME.jsonl

A packer is a program that must be installed. Of each file and packer or checkpoint there is one line, which is not
made again. Every packed file is unpacked and compared, a model's as far as --check says.

Packers know nothing of the domain, a model has read it. With --behind TEXT the packers' lines are of what a file adds
behind that text: the size of both together less that of the text alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from blocksparse import __version__
from blocksparse.models.bars import bytes_bar
from blocksparse.models.files import named_files
from blocksparse.models.language import LanguageModel
from blocksparse.models.language.compression import compress, decompress, digest_of, environment, streams_of
from blocksparse.models.language.weights import load_model
from blocksparse.models.lines import add_line, read_lines
from blocksparse.program import finish, positive

# Name: (command that packs FILE into OUT, command that unpacks OUT into BACK, how it tells its version).
PACKERS = {
    "xz -9e": ("xz -9e -k -c FILE > OUT", "xz -d -c OUT > BACK", "xz --version"),
    "zstd --ultra -22 --long": (
        "zstd -q --ultra -22 --long -c FILE > OUT",
        "zstd -q -d --long -c OUT > BACK",
        "zstd --version",
    ),
    "brotli -q 11": ("brotli -q 11 -w 24 -c FILE > OUT", "brotli -d -c OUT > BACK", "brotli --version"),
    "zpaq -m5": (
        "zpaq add OUT.zpaq FILE -m5 -t1 && mv OUT.zpaq OUT",
        "mv OUT OUT.zpaq && zpaq x OUT.zpaq FILE -to BACK && mv OUT.zpaq OUT",
        "zpaq | grep zpaq",
    ),
}


def processor() -> str:
    """Its name."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in about.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run(command: str, places: dict[str, str], folder: Path) -> float:
    """Seconds of a command of a shell, with the places' names replaced; raises OSError with what it said.

    The shell and what it has begun have a session of their own, which ends with this function.
    """
    for name, path in places.items():
        command = command.replace(name, path)
    start, pipe = time.perf_counter(), subprocess.PIPE
    shell = subprocess.Popen(
        command, shell=True, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        said, complaint = shell.communicate()
    except BaseException:  # Ctrl-C reaches this process alone
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()  # until all have ended, for their folder is removed next
        raise
    seconds = time.perf_counter() - start
    if shell.returncode != 0:
        raise OSError(f"{command}: {complaint.strip() or said.strip()}")
    return seconds


def pack(name: str, data: bytes, check: bool = True) -> dict[str, Any]:
    """A packer's line; checked by unpacking."""
    forward, backward, about = PACKERS[name]
    places = {"FILE": "text", "OUT": "packed", "BACK": "back"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "text").write_bytes(data)
        seconds = run(forward, places, folder)
        size = (folder / "packed").stat().st_size
        back = run(backward, places, folder) if check else 0.0
        if check and (folder / "back").read_bytes() != data:
            raise ValueError(f"{name} did not give the file back")
    version = subprocess.run(about, shell=True, capture_output=True, text=True)
    said = [line for line in (version.stdout + version.stderr).splitlines() if line.strip()]
    return {
        "compressed": size,
        "seconds": round(seconds, 2),
        "back_seconds": round(back, 2),
        "checked": len(data),
        "machine": processor(),
        "versions": said[0].strip() if said else "",
    }


def pack_behind(name: str, data: bytes, text: bytes) -> dict[str, Any]:
    """A packer's line of what a file adds behind a text."""
    alone, both = pack(name, text, check=False), pack(name, text + data)
    return {**both, "compressed": both["compressed"] - alone["compressed"]}


def by_model(model: LanguageModel, data: bytes, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """A model's line: the whole file, and its first bytes, as a file of their own, both ways."""
    with bytes_bar(len(data)) as done:
        start = time.perf_counter()
        made = compress(model, data, streams=streams, bf16=options.bf16, progress=done)
        seconds = time.perf_counter() - start
    piece = data[: options.check]
    small = made if len(piece) == len(data) else compress(model, piece, streams=streams, bf16=options.bf16)
    start = time.perf_counter()
    if decompress(model, small) != piece:
        raise ValueError("the model did not give the file back")
    back = time.perf_counter() - start
    parameters = sum(p.numel() for p in model.parameters())
    where = processor() if options.device == "cpu" else torch.cuda.get_device_name()
    return {
        "compressed": len(made),
        "seconds": round(seconds, 2),
        "back_seconds": round(back, 2),
        "checked": len(piece),
        "parameters": parameters,
        "model_bytes": {"bf16": 2 * parameters, "f32": 4 * parameters},
        "machine": where,
        "versions": environment(model),
    }


def is_known(line: dict[str, Any], record: Path) -> bool:
    """Whether there is a line of this already.

    Older ones do not say of which model, and of which bytes, and have null where --streams was not given.

    Raises:
        ValueError: there is one with these names that is of something else.
    """
    names = ("file", "by", "device", "behind")
    for known in read_lines(record, (*names, "bytes")):
        if any(known[name] != line[name] for name in names):
            continue
        differs = [what for what, value in line.items() if known.get(what) not in (None, value)]
        if not differs:
            return True
        if "bytes" not in differs:  # with --first parts of a file have lines of their own
            text = f"has {line['by']} of {line['file']} with other {', '.join(differs)}"
            raise ValueError(f"{record} {text}: give it another name, or --results another file")
    return False


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--file", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--first", type=positive, help="bytes of each file, in place of all")
    parser.add_argument("--packers", nargs="*", choices=PACKERS, help="these, or all of them")
    parser.add_argument("--behind", type=Path, help="text that the packers have read before")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=FILE", help="checkpoints, a name for each"
    )
    parser.add_argument("--results", type=Path, required=True, help="JSON lines")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=positive, help="parts side by side (default: one for 8 kB, 64 at most)")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--check", type=positive, help="bytes of a model's file that come back, too (default: all)")
    parser.add_argument("--threads", type=positive, help="of PyTorch")
    options = parser.parse_args()
    options.file = named_files(options.file, "--file")
    options.model = named_files(options.model, "--model", PACKERS)
    if options.packers is None and not options.model:
        raise ValueError("neither --packers nor --model is given, needs one of them")
    return options


def end(number: int, frame: FrameType | None) -> None:
    """For signals: packers are ended and their folders are removed first."""
    sys.exit(128 + number)


def main() -> int:
    """Returns the exit status."""
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, end)
    if options.threads:
        torch.set_num_threads(options.threads)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    behind = options.behind.read_bytes() if options.behind else b""
    about_behind = {"behind": len(behind), "behind_sha256": hashlib.sha256(behind).hexdigest()[:12] if behind else ""}
    packers = [] if options.packers is None else options.packers or list(PACKERS)
    added = 0
    for name, path in options.file.items():
        data = path.read_bytes()[: options.first]
        if not data:
            raise ValueError(f"{path} is empty, needs a byte or more")
        content = hashlib.sha256(data).hexdigest()[:12]
        for by in [*packers, *options.model]:
            key: dict[str, Any] = {"file": name, "bytes": len(data), "sha256": content}
            if by in PACKERS:
                key |= {"by": by, "device": "cpu", **about_behind}
            else:
                model = load_model(options.model[by], options.device)
                key |= {"by": by, "device": options.device, "behind": 0, "model": digest_of(model).hex()}
                key |= {"streams": streams_of(len(data), options.streams), "bf16": options.bf16}
            if is_known(key, options.results):
                continue
            if by not in PACKERS:
                about = by_model(model, data, key["streams"], options)
            else:
                about = pack_behind(by, data, behind) if behind else pack(by, data)
            line = {**key, **about, "bits_per_byte": round(8 * about["compressed"] / len(data), 4)}
            line |= {"blocksparse": __version__, "date": time.strftime("%Y-%m-%d")}
            add_line(options.results, line)
            added += 1
            print(f"{name}, {key['by']}: {len(data)} -> {line['compressed']} bytes, {line['seconds']} s", flush=True)
    if not added:
        print(f"nothing is left to do: all that was asked for is in {options.results}")
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
