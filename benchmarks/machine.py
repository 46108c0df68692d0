"""What a file of results begins with, as blocksparse-bench writes it, of what is timed through PyTorch."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import blocksparse
from records import Record, device


def header(on_card: bool, samples: int, opponents: dict[str, str]) -> Record:
    """What was measured and with what."""
    found: Record = {"header": 1, "device": device()}
    if on_card:
        card = torch.cuda.get_device_properties(0)
        text = read("/proc/driver/nvidia/version")
        driver = re.search(r"Kernel Module\D*([\d.]+)", text)
        found["device"] = f"cuda: {torch.cuda.get_device_name()}"
        found |= {"driver": driver[1] if driver else "unknown", "cuda": torch.version.cuda}
        found |= {"compute_capability": f"{card.major}.{card.minor}", "multiprocessors": card.multi_processor_count}
        found |= {"memory_gb": card.total_memory >> 30, "host": device().removeprefix("cpu: ")}
    else:
        found |= {"isa": blocksparse.cpu_isa(), "processors": sorted(os.sched_getaffinity(0))}
    found |= {"os": f"{platform.system()} {platform.release()} {platform.machine()}"}
    found |= {"library": blocksparse.__version__, "commit": commit(), "opponents": opponents, "samples": samples}
    found["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return found


def read(path: str) -> str:
    """A file; nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def commit() -> str:
    """Of the folder that this file lies in, not of the library that is installed; nothing outside of a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        made = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        what = ["--untracked-files=no", "--", ":/src", ":/include", ":/python"]
        changed = subprocess.run([*git, "status", "--porcelain", *what], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return made.stdout.strip() + (" with changes" if changed.stdout else "")
