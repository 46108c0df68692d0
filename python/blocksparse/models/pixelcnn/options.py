"""What `pixelcnn` can be asked for. Nothing here needs PyTorch, so that help and refusals come at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config_options import add_fields
from .config import PRESETS, ModelConfig, TrainConfig

CHECKPOINT = "file that `pixelcnn train` has written, such as OUT/last.safetensors"
IMAGES = (
    "folder of CIFAR-10's batches, of MNIST's files or of pictures, a tar file of pictures, or PNG sheets whose rows "
    "are images; those of a test part are evaluated"
)


def add_parser(commands: Any) -> None:
    """`pixelcnn` and its own commands."""
    command = commands.add_parser("pixelcnn", help="train and use PixelCNN++, a model of images")
    own = command.add_subparsers(dest="pixelcnn_command", required=True, metavar="COMMAND")
    _add_train(own)
    _add_eval(own)
    _add_sample(own)
    for part in own.choices.values():
        part.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one, else cpu)")


def _add_images(command: argparse.ArgumentParser, required: bool = True) -> None:
    add = command.add_argument
    add("--data", type=Path, nargs="+", required=required, metavar="PATH", help=IMAGES)
    add("--shrink", type=int, default=1, metavar="N", help="means of N x N pixels (default: %(default)s)")
    what = "pictures that are broken or of another size end it, or are left out (default: %(default)s)"
    add("--broken", choices=("stop", "skip"), default="stop", help=what)


def _add_train(own: Any) -> None:
    command = own.add_parser(
        "train",
        help="train a model, or go on",
        description="Writes OUT/last.safetensors, the checkpoint, and OUT/log.jsonl. Ctrl-C and SIGTERM end the "
        "update, write a checkpoint and stop; a second Ctrl-C stops at once.",
    )
    add = command.add_argument
    _add_images(command)
    add(
        "--test",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="images to be evaluated (default: the test part, or every tenth)",
    )
    add("--test-limit", type=int, metavar="N", help="evaluate N of them, spread evenly (default: all)")
    add("--out", type=Path, required=True, help="folder of the checkpoint and the log")
    add("--resume", action="store_true", help="go on from the checkpoint in OUT if there is one")
    add("--preset", choices=PRESETS, default="32-1-dense", help="what the model is made of (default: %(default)s)")
    add_fields(command, ModelConfig, "default: the preset's", "seed")
    add_fields(command, TrainConfig, "default: {}")
    every = "write a checkpoint, and evaluate it, after so many updates (default: %(default)s)"
    add("--save-every", type=int, default=500, metavar="UPDATES", help=every)
    add("--until", type=int, metavar="UPDATE", help="stop after this update, to go on later (default: the last)")
    add("--minutes", type=float, help="stop after so many minutes, to go on later (default: none)")
    add("--tensorboard", type=Path, metavar="FOLDER", help="folder for TensorBoard (default: nothing is written)")
    add(
        "--samples", type=int, default=16, help="images drawn for TensorBoard at each evaluation (default: %(default)s)"
    )


def _add_eval(own: Any) -> None:
    command = own.add_parser("eval", help="bits per dimension of images")
    command.add_argument("checkpoint", type=Path, help=CHECKPOINT)
    _add_images(command)
    part = "which of them; without a test part, test is every tenth (default: %(default)s)"
    command.add_argument("--part", choices=("test", "train", "all"), default="test", help=part)
    command.add_argument("--batch", type=int, default=128, help="images at once (default: %(default)s)")
    command.add_argument("--bf16", action="store_true", help="convolutions in bfloat16")
    command.add_argument("--raw", action="store_true", help="weights of the last update instead of averaged ones")


def _add_sample(own: Any) -> None:
    command = own.add_parser("sample", help="draw images, or the lower halves of given ones")
    add = command.add_argument
    add("checkpoint", type=Path, help=CHECKPOINT)
    add("-o", "--out", type=Path, required=True, help="PNG file: a grid of images")
    add("--force", action="store_true", help="overwrite OUT")
    add("--images", type=int, default=64, help="how many (default: %(default)s)")
    add("--complete", action="store_true", help="draw the lower halves of images of --data, which it needs")
    _add_images(command, required=False)
    add("--part", choices=("test", "train", "all"), default="test", help="which are completed (default: %(default)s)")
    add("--seed", type=int, default=0, help="another seed, other images (default: %(default)s)")
    add("--bf16", action="store_true", help="convolutions in bfloat16")
    add("--plain", action="store_true", help="whole passes for each pixel: the slow way, to compare with")
