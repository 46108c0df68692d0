"""The command line: python -m blocksparse lm train|eval|sample|compress|decompress|features|export."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from ..bars import bytes_bar
from ..distributed import joined
from ..files import STDIN, STDOUT, check_name, check_writable, is_device, is_stdout, read_whole, write_whole
from ..sentiment.features import cell_states, save_features
from ..sentiment.texts import read_labelled
from . import train_command
from .compression import Header, compress, decompress, digest_of
from .network import LanguageModel, bits_per_byte
from .options import add_parser as add_parser
from .stepping import sample
from .train_command import VALID_BYTES as VALID_BYTES
from .training import read_text
from .weights import load_model, save_model

SUFFIX = ".bslm"


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked for; the exit status. Raises ValueError or OSError with what is wrong."""
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() and arguments.lm_command != "export" else "cpu"
    if arguments.lm_command == "train":
        with joined(arguments.device) as (world, device):
            return train_command.run(arguments, world, device)
    if arguments.lm_command in ("compress", "decompress"):
        _compress(arguments)
        return 0
    if arguments.lm_command == "export":
        _export(arguments)
        return 0
    model = load_model(arguments.checkpoint, arguments.device)
    if arguments.lm_command == "eval":
        _evaluate(arguments, model)
    elif arguments.lm_command == "sample":
        prompt = os.fsencode(arguments.prompt)  # bytes that are no UTF-8 come out as they were typed
        made = sample(model, prompt, arguments.length, arguments.temperature, arguments.seed)
        sys.stdout.buffer.write(prompt + made + b"\n")
    else:
        _features(arguments, model)
    return 0


def _evaluate(arguments: argparse.Namespace, model: LanguageModel) -> None:
    text = read_text(arguments.text).to(arguments.device)
    if arguments.batch < 1:
        raise ValueError(f"[lm] batch is {arguments.batch}, needs 1 or more")
    with bytes_bar(text.numel()) as done:
        bits = bits_per_byte(model, text, arguments.batch, bf16=arguments.bf16, progress=done)
    print(json.dumps({"bytes": text.numel(), "bits_per_byte": round(bits, 4)}))


def _check_out(arguments: argparse.Namespace, out: Path, read: Path) -> None:
    """Refuses to overwrite a file unasked, and ever what is read."""
    check_name(out)
    if out.is_file() and any(path.exists() and out.samefile(path) for path in (read, arguments.checkpoint)):
        raise ValueError(f"[lm] {out} is read, needs to be another file to be written")
    if out.is_file() and not arguments.force:  # in devices and pipes there is nothing to lose
        raise ValueError(f"[lm] {out} is there already: --force overwrites it, --out names another")


def _features(arguments: argparse.Namespace, model: LanguageModel) -> None:
    if str(arguments.out) == "-":
        raise ValueError("[lm] --out is -, needs a file: features are not written to standard output")
    _check_out(arguments, arguments.out, arguments.labels)
    skip = arguments.bad_rows == "skip"
    examples = read_labelled(arguments.labels, skip_bad_rows=skip, tokenised=arguments.tokenised)
    for line in examples.left_out:
        print(f"left out: {line}", file=sys.stderr)
    check_writable(arguments.out)
    with bytes_bar(sum(map(len, examples.texts))) as done:
        features = cell_states(model, examples.texts, batch=arguments.batch, bf16=arguments.bf16, progress=done)
    about = {"model": digest_of(model).hex(), "texts": arguments.labels.name}
    save_features(arguments.out, features, examples.y(), about)
    left_out = {"left_out": len(examples.left_out)}
    print(json.dumps({"file": str(arguments.out), "texts": len(examples), "features": features.shape[1], **left_out}))


def _export(arguments: argparse.Namespace) -> None:
    """The path is tried before the model is loaded."""
    if str(arguments.out) == "-" or is_device(arguments.out):
        raise ValueError(f"[lm] --out is {arguments.out}, needs a file: a model is not written to devices and pipes")
    _check_out(arguments, arguments.out, arguments.checkpoint)
    check_writable(arguments.out)
    model = load_model(arguments.checkpoint, arguments.device)
    save_model(arguments.out, model, bf16=arguments.bf16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    about = {"file": str(arguments.out), "parameters": parameters, "bytes": arguments.out.stat().st_size}
    print(json.dumps(about))


def _compress(arguments: argparse.Namespace) -> None:
    """Both ways. The paths are tried before the model is loaded."""
    forward = arguments.lm_command == "compress"
    out = arguments.out or _out_of(arguments.file, forward)
    if not is_stdout(out):
        _check_out(arguments, out, arguments.file)
    data = read_whole(arguments.file)
    check_writable(out)
    length = len(data) if forward else Header.unpack(data)[0].length
    model = load_model(arguments.checkpoint, arguments.device)
    with bytes_bar(length) as done:
        if forward:
            made = compress(model, data, streams=arguments.streams, bf16=arguments.bf16, progress=done)
        else:
            made = decompress(model, data, progress=done)
    write_whole(out, made)
    text, small = (data, made) if forward else (made, data)
    share = {"bits_per_byte": round(8 * len(small) / len(text), 4)} if text else {}
    about = {"file": "-" if is_stdout(out) else str(out), "bytes": len(text), "compressed": len(small), **share}
    print(json.dumps(about), file=sys.stderr if is_stdout(out) else sys.stdout)


def _out_of(file: Path, forward: bool) -> Path:
    """Where the result goes unless one says so."""
    if file == STDIN:
        return STDOUT
    if not file.name or file.is_dir():
        raise IsADirectoryError(f"[lm] {file} is a folder, needs to be a file")
    if forward:
        return file.with_name(file.name + SUFFIX)
    if file.suffix != SUFFIX:
        raise ValueError(f"[lm] {file} does not end with {SUFFIX}: name the file to write with --out")
    return file.with_suffix("")
