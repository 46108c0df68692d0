"""The command line: python -m blocksparse lm train|eval|sample|compress|decompress|features."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from .bars import bytes_bar
from .compression import Header, compress, decompress, digest_of
from .distributed import World, joined
from .features import cell_states, save_features
from .files import check_writable, write_whole
from .language import PRESETS, LanguageModel, ModelConfig, bits_per_byte, sample
from .texts import read_labelled
from .training import TrainConfig, Trainer, load_model, read_text, train

VALID_BYTES = 2_000_000
SUFFIX = ".bslm"


def add_parser(commands: Any) -> None:
    """`lm` and its own commands."""
    lm = commands.add_parser("lm", help="train and use byte-level language models").add_subparsers(
        dest="lm_command", required=True, metavar="COMMAND"
    )
    command = lm.add_parser("train", help="train a model, or go on", description="Writes OUT/last.safetensors.")
    command.add_argument("--text", type=Path, nargs="+", required=True, help="files, of any kind")
    command.add_argument("--valid", type=Path, nargs="+", help="files to be evaluated (default: the end of the text)")
    command.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the log")
    command.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUT if there is one")
    command.add_argument("--preset", choices=PRESETS, default="small")
    _add_fields(command, ModelConfig, "seed")
    _add_fields(command, TrainConfig)
    command.add_argument("--save-every", type=int, default=200, metavar="UPDATES")
    command.add_argument("--until", type=int, help="stop after this update, to go on later", metavar="UPDATE")
    command.add_argument("--tensorboard", type=Path, help="folder for TensorBoard")
    for name, text in (("eval", "bits per byte of a text"), ("sample", "write text")):
        command = lm.add_parser(name, help=text)
        command.add_argument("checkpoint", type=Path)
        if name == "eval":
            command.add_argument("--text", type=Path, nargs="+", required=True)
            command.add_argument("--batch", type=int, default=16, help="streams side by side")
            command.add_argument("--bf16", action="store_true", help="products in bfloat16")
        else:
            command.add_argument("--prompt", default="\n ")
            command.add_argument("--length", type=int, default=500)
            command.add_argument("--temperature", type=float, default=1.0)
            command.add_argument("--seed", type=int, default=0)
    for name, text, default in (
        ("compress", "make a file smaller", "FILE.bslm"),
        ("decompress", "make the file again", "FILE without .bslm"),
    ):
        command = lm.add_parser(name, help=text)
        command.add_argument("checkpoint", type=Path)
        command.add_argument("file", type=Path)
        command.add_argument("-o", "--out", type=Path, help=f"default: {default}")
        command.add_argument("--force", action="store_true", help="overwrite OUT")
        if name == "compress":
            command.add_argument("--streams", type=int, help="parts side by side (default: one for 8 kB, 64 at most)")
            command.add_argument("--bf16", action="store_true", help="products in bfloat16")
    command = lm.add_parser(
        "features",
        help="what a model knows of labelled texts",
        description='Rows are "label text", or a CSV file with the columns label and sentence; labels are 0 and 1.',
    )
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--labels", type=Path, required=True, metavar="FILE")
    command.add_argument("-o", "--out", type=Path, required=True, help="safetensors file: features, labels")
    command.add_argument("--force", action="store_true", help="overwrite OUT")
    command.add_argument("--bad-rows", choices=("stop", "skip"), default="stop")
    command.add_argument("--tokenised", action="store_true", help="texts are tokens with spaces between")
    command.add_argument("--batch", type=int, default=128, help="texts side by side")
    command.add_argument("--bf16", action="store_true", help="products in bfloat16")
    for command in lm.choices.values():
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def _add_fields(command: argparse.ArgumentParser, config: type, *left_out: str) -> None:
    for field in fields(config):
        if field.name in left_out:
            continue
        if isinstance(field.default, bool):
            command.add_argument(f"--{field.name}", action="store_true")
        else:
            command.add_argument(f"--{field.name}", type=type(field.default))


def _given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    values = {field.name: getattr(arguments, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def run(arguments: argparse.Namespace) -> None:
    """Does what was asked for; raises ValueError or OSError with what is wrong."""
    if arguments.lm_command == "train":
        with joined(arguments.device) as (world, device):
            _train(arguments, world, device)
        return
    model = load_model(arguments.checkpoint, arguments.device)
    if arguments.lm_command == "eval":
        _evaluate(arguments, model)
    elif arguments.lm_command == "sample":
        prompt = os.fsencode(arguments.prompt)  # bytes that are no UTF-8 come out as they were typed
        made = sample(model, prompt, arguments.length, arguments.temperature, arguments.seed)
        sys.stdout.buffer.write(prompt + made + b"\n")
    elif arguments.lm_command == "features":
        _features(arguments, model)
    else:
        _compress(arguments, model)


def _evaluate(arguments: argparse.Namespace, model: LanguageModel) -> None:
    text = read_text(arguments.text).to(arguments.device)
    if arguments.batch < 1:
        raise ValueError(f"[lm] batch is {arguments.batch}, needs 1 or more")
    with bytes_bar(text.numel()) as done:
        bits = bits_per_byte(model, text, arguments.batch, bf16=arguments.bf16, progress=done)
    print(json.dumps({"bytes": text.numel(), "bits_per_byte": round(bits, 4)}))


def _check_out(arguments: argparse.Namespace, out: Path, read: Path) -> None:
    """Refuses to overwrite a file unasked, and ever what is read."""
    if out.is_file() and any(path.exists() and out.samefile(path) for path in (read, arguments.checkpoint)):
        raise ValueError(f"[lm] {out} is read, needs to be another file to be written")
    if out.exists() and not out.is_dir() and not arguments.force:
        raise ValueError(f"[lm] {out} is there already: --force overwrites it, --out names another")


def _features(arguments: argparse.Namespace, model: LanguageModel) -> None:
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


def _compress(arguments: argparse.Namespace, model: LanguageModel) -> None:
    forward = arguments.lm_command == "compress"
    out = arguments.out
    if out is None:
        if not forward and arguments.file.suffix != SUFFIX:
            raise ValueError(f"[lm] {arguments.file} does not end with {SUFFIX}: name the file to write with --out")
        out = arguments.file.with_name(arguments.file.name + SUFFIX) if forward else arguments.file.with_suffix("")
    _check_out(arguments, out, arguments.file)
    data = arguments.file.read_bytes()
    check_writable(out)
    with bytes_bar(len(data) if forward else Header.unpack(data)[0].length) as done:
        if forward:
            made = compress(model, data, streams=arguments.streams, bf16=arguments.bf16, progress=done)
        else:
            made = decompress(model, data, progress=done)
    write_whole(out, made)
    text, small = (data, made) if forward else (made, data)
    share = {"bits_per_byte": round(8 * len(small) / len(text), 4)} if text else {}
    print(json.dumps({"file": str(out), "bytes": len(text), "compressed": len(small), **share}))


def _train(arguments: argparse.Namespace, world: World, device: torch.device) -> None:
    model = replace(PRESETS[arguments.preset], **_given(arguments, ModelConfig))
    config = TrainConfig(**_given(arguments, TrainConfig))
    text = read_text(arguments.text)
    if arguments.valid:
        valid = read_text(arguments.valid)
        if valid.numel() < 2:
            raise ValueError(f"[lm] the text to be evaluated has {valid.numel()} bytes, needs 2 or more")
    else:
        cut = min(VALID_BYTES, text.numel() // 20)
        text, valid = text[: text.numel() - cut], text[text.numel() - cut :]
    trainer = Trainer(model, config, text, device, world)
    last = arguments.out / "last.safetensors"
    if arguments.resume and last.exists():
        trainer.resume(last)
    elif last.exists():
        raise ValueError(f"[lm] {last} is there already: --resume goes on from it, another --out begins anew")
    parameters = sum(p.numel() for p in trainer.model.parameters())
    if world.first:
        print(f"{parameters} parameters; mix {', '.join(f'{m:.1%}' for m in trainer.model.mix()) or '(dense)'}")
    with ExitStack() as stack:
        report = _reporter(arguments, trainer, stack) if world.first else _silent
        enough = valid if valid.numel() >= 2 else None
        options: dict[str, Any] = {"save_every": arguments.save_every, "until": arguments.until, "report": report}
        train(trainer, arguments.out, enough, **options)
    if world.first:
        print(last)


def _silent(line: dict[str, Any]) -> None:
    pass


def _reporter(arguments: argparse.Namespace, trainer: Trainer, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    """A progress bar if tqdm is there, else a line at each checkpoint; TensorBoard if asked for."""
    writer: Any = None
    if arguments.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = stack.enter_context(SummaryWriter(str(arguments.tensorboard)))
    bar: Any = None
    try:
        from tqdm import tqdm

        per_update = trainer.config.batch * trainer.config.steps
        total = (arguments.until or trainer.config.updates) * per_update
        bar = stack.enter_context(tqdm(total=total, initial=trainer.bytes_seen, unit="B", unit_scale=True))
    except ModuleNotFoundError:
        pass

    def report(line: dict[str, Any]) -> None:
        text = f"train {line['train']:.3f} bits/byte" + (f", valid {line['valid']:.3f}" if "valid" in line else "")
        if bar is not None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(line["bytes"] - bar.n)
        elif "valid" in line:
            print(f"{line['update']} updates, {line['seconds']:.0f} s: {text}", flush=True)
        if writer is not None:
            for name in ("train", "valid", "lr"):
                if name in line:
                    writer.add_scalar(name, line[name], line["bytes"])

    return report
