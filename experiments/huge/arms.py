"""What the experiments of this folder share: arms one after the other, a line of JSON for each that is complete."""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blocksparse
from blocksparse.models.lines import add_line, need_known, read_lines
from blocksparse.program import positive

Options = argparse.Namespace
Line = dict[str, Any]
POINTS = 24  # of a curve, at most


@dataclass(frozen=True)
class Arm:
    """What is trained, and what tells its line from others. `cost` is its time beside that of others, roughly."""

    settings: Mapping[str, Any]
    cost: float = field(default=1.0, compare=False)

    def __str__(self) -> str:
        """Its name, and what others of that name may differ in."""
        others = ("task", "rate", "seed")
        return ", ".join(
            [self.settings["arm"], *(f"{key} {self.settings[key]}" for key in others if key in self.settings)]
        )


def options_of(about: str | None, sizes: Mapping[str, tuple[float, float, str]], **files: str) -> Options:
    """The command line.

    Args:
        about: the script's docstring.
        sizes: {name: (on a CPU, on a card, help)}: numbers that depend on the device, and belong to each line.
        files: {name: help} of files that are needed.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; what it holds is not done again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no arm is begun that would end later")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", nargs="+", help="only these")
    for name, text in files.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    for name, (cpu, card, text) in sizes.items():
        kind = float if isinstance(cpu, float) else positive
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{text}: {cpu:g}, or {card:g} on a card")
    options = parser.parse_args()
    for name, pair in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, pair[on_card(options)])
    return options


def on_card(options: Options) -> bool:
    """Whether it runs on one."""
    return bool(options.device.startswith("cuda"))


def autocast(options: Options) -> Any:
    """bf16 on a card."""
    return torch.autocast("cuda", torch.bfloat16, enabled=on_card(options))


def run_all(arms: Iterable[Arm], do: Callable[[Arm], Line], options: Options, sizes: Iterable[str]) -> None:
    """Does each arm that the file has no line of, in turn, as far as there is time.

    Raises:
        ValueError: `--arms` names one that there is not, or some have failed.
    """
    arms = list(arms)
    chosen = need_known(options.arms, dict.fromkeys(arm.settings["arm"] for arm in arms))
    began, pace = time.monotonic(), 0.0  # seconds that the last arm took for a cost of 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    left: list[str] = []
    failed: list[str] = []
    done, common = read_lines(options.output), {name: getattr(options, name) for name in sizes}
    for arm in arms:
        wanted = {**arm.settings, **common}
        if any(wanted.items() <= line.items() for line in done):
            continue
        if arm.settings["arm"] not in chosen:
            continue
        begin = time.monotonic()
        if begin - began + pace * arm.cost > 60 * options.minutes:
            left.append(str(arm))
            continue
        gc.collect()  # what the last arm left, whose hooks make rings
        if on_card(options):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            made = do(arm)
        except RuntimeError as error:  # a card whose memory does not do, say: others may fit
            print(f"{arm}: failed, {error}", file=sys.stderr, flush=True)
            failed.append(str(arm))
            continue
        assert not wanted.keys() & made.keys()  # or the line would not be found again
        line = {**wanted, **made}
        if on_card(options):
            line["peak_bytes"] = torch.cuda.max_memory_allocated()
        versions = {"torch": torch.__version__, "blocksparse": blocksparse.__version__}
        line |= {"machine": machine(options), **versions, "date": time.strftime("%Y-%m-%d")}
        add_line(options.output, line)
        pace = (time.monotonic() - begin) / arm.cost
        told = ", ".join(f"{key} {line[key]}" for key in line if key in ("loss", "reached", "ms"))
        print(f"{arm}: {told}, {time.monotonic() - begin:.0f} s", flush=True)
    if left:
        print(f"Left for another run, as {options.minutes:g} minutes would be over:", *left, sep="\n  ")
    if failed:
        raise ValueError(f"{len(failed)} arms have failed: {'; '.join(failed)}")


def machine(options: Options) -> str:
    """What it runs on."""
    if on_card(options):
        return str(torch.cuda.get_device_name())
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in about.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {blocksparse.cpu_isa()}, {torch.get_num_threads()} threads"


def curve_of(losses: list[Tensor], scale: float = 1.0) -> list[list[float]]:
    """[[step, mean loss of the steps since the point before], ...] of the losses of all steps."""
    values, points = torch.stack(losses).float().cpu() * scale, min(POINTS, len(losses))
    ends = [len(losses) * i // points for i in range(points + 1)]
    return [[end, round(values[begin:end].mean().item(), 4)] for begin, end in itertools.pairwise(ends)]
