"""What `lm` can be asked for. Nothing here needs PyTorch, so that help and refusals come at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config_options import add_fields
from ..files import STDIN, STDOUT
from .config import PRESETS, ModelConfig, TrainConfig

CHECKPOINT = "file that `lm train` has written, such as OUT/last.safetensors"


def add_parser(commands: Any) -> None:
    """`lm` and its own commands."""
    lm = commands.add_parser("lm", help="train and use byte-level language models").add_subparsers(
        dest="lm_command", required=True, metavar="COMMAND"
    )
    _add_train(lm)
    _add_eval(lm)
    _add_sample(lm)
    _add_compression(lm)
    _add_features(lm)
    _add_export(lm)
    for command in lm.choices.values():
        command.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one, else cpu)")


def _add_train(lm: Any) -> None:
    command = lm.add_parser(
        "train",
        help="train a model, or go on",
        description="Writes OUT/last.safetensors, the checkpoint, and OUT/log.jsonl. Ctrl-C and SIGTERM end the "
        "update, write a checkpoint and stop; a second Ctrl-C stops at once.",
    )
    add = command.add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="files, of any kind")
    add("--valid", type=Path, nargs="+", metavar="FILE", help="files to be evaluated (default: the end of the text)")
    add("--out", type=Path, required=True, help="folder of the checkpoint and the log")
    add("--resume", action="store_true", help="go on from the checkpoint in OUT if there is one")
    add("--preset", choices=PRESETS, default="small", help="what the model is made of (default: %(default)s)")
    add_fields(command, ModelConfig, "default: the preset's", "seed")
    add_fields(command, TrainConfig, "default: {}")
    every = "write a checkpoint, and evaluate it, after so many updates (default: %(default)s)"
    add("--save-every", type=int, default=200, metavar="UPDATES", help=every)
    add("--until", type=int, metavar="UPDATE", help="stop after this update, to go on later (default: the last)")
    add("--tensorboard", type=Path, metavar="FOLDER", help="folder for TensorBoard (default: nothing is written)")


def _add_eval(lm: Any) -> None:
    command = lm.add_parser("eval", help="bits per byte of a text")
    command.add_argument("checkpoint", type=Path, help=CHECKPOINT)
    command.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="files, of any kind")
    command.add_argument("--batch", type=int, default=16, help="streams side by side (default: %(default)s)")
    command.add_argument("--bf16", action="store_true", help="products in bfloat16")


def _add_sample(lm: Any) -> None:
    command = lm.add_parser("sample", help="write text")
    command.add_argument("checkpoint", type=Path, help=CHECKPOINT)
    command.add_argument("--prompt", default="\n ", help="what the text begins with (default: a new line and a space)")
    command.add_argument("--length", type=int, default=500, help="bytes that follow (default: %(default)s)")
    chance = "below 1 likely bytes come more often, at 0 the likeliest always (default: %(default)s)"
    command.add_argument("--temperature", type=float, default=1.0, help=chance)
    command.add_argument("--seed", type=int, default=0, help="another seed, another text (default: %(default)s)")


def _add_compression(lm: Any) -> None:
    for name, text, default in (
        ("compress", "make a file smaller", "FILE.bslm"),
        ("decompress", "make the file again", "FILE without .bslm"),
    ):
        command = lm.add_parser(name, help=text)
        command.add_argument("checkpoint", type=Path, help=CHECKPOINT)
        command.add_argument("file", type=_input, help="what is read; - is standard input")
        text = f"what is written; - is standard output (default: {default}, or - where FILE is -)"
        command.add_argument("-o", "--out", type=_output, help=text)
        command.add_argument("--force", action="store_true", help="overwrite OUT")
        if name == "compress":
            command.add_argument("--streams", type=int, help="parts side by side (default: one for 8 kB, 64 at most)")
            command.add_argument("--bf16", action="store_true", help="products in bfloat16")


def _input(text: str) -> Path:
    return STDIN if text == "-" else Path(text)


def _output(text: str) -> Path:
    return STDOUT if text == "-" else Path(text)


def _add_features(lm: Any) -> None:
    command = lm.add_parser(
        "features",
        help="what a model knows of labelled texts",
        description='Rows are "label text", or a CSV file with the columns label and sentence; labels are 0 and 1.',
    )
    command.add_argument("checkpoint", type=Path, help=CHECKPOINT)
    command.add_argument("--labels", type=Path, required=True, metavar="FILE", help="labelled texts")
    command.add_argument("-o", "--out", type=Path, required=True, help="safetensors file: features, labels")
    command.add_argument("--force", action="store_true", help="overwrite OUT")
    what = "rows without a label or text end it, or are left out (default: %(default)s)"
    command.add_argument("--bad-rows", choices=("stop", "skip"), default="stop", help=what)
    command.add_argument("--tokenised", action="store_true", help="texts are tokens with spaces between")
    command.add_argument("--batch", type=int, default=128, help="texts side by side (default: %(default)s)")
    command.add_argument("--bf16", action="store_true", help="products in bfloat16")


def _add_export(lm: Any) -> None:
    command = lm.add_parser(
        "export",
        help="write the model alone, a quarter of a checkpoint or less",
        description="The file holds the averaged weights. All commands but `train --resume` take it for a checkpoint.",
    )
    command.add_argument("checkpoint", type=Path, help=CHECKPOINT)
    command.add_argument("-o", "--out", type=Path, required=True, help="safetensors file")
    command.add_argument("--force", action="store_true", help="overwrite OUT")
    command.add_argument("--bf16", action="store_true", help="round matrices to bfloat16: half the size")
