"""What a configuration can be asked for on a command line. Nothing here needs PyTorch."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import Any


def add_fields(command: argparse.ArgumentParser, config: type, default: str, *left_out: str) -> None:
    """An option for each field, explained by the docstring."""
    explained = dict(re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)$", config.__doc__ or "", re.MULTILINE))
    for field in fields(config):
        if field.name in left_out:
            continue
        text = " ".join(explained.get(field.name, field.name).split()).rstrip(".").replace("%", "%%").replace("`", "")
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            command.add_argument(flag, action="store_true", default=None, help=text)
        else:
            kind: Any = type(field.default)
            text = f"{text} ({default.format(field.default)})"
            command.add_argument(flag, type=kind, help=text)
