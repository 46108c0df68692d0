"""Trains every arm of a configuration, one after the other, and writes their curves as lines of JSON.

    python experiments/pixelcnn/run.py configs/cifar.json --data FOLDER --out out/cifar --device cuda --minutes 9

The same command goes on after a stop, at the last checkpoint; what is complete is left alone. With --minutes it stops
by itself. An arm and seed that is complete has a line in the results, and drawn images beside them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from blocksparse import __version__, cpu_isa
from blocksparse.models.bars import counting_bar
from blocksparse.models.files import write_whole
from blocksparse.models.images import write_png
from blocksparse.models.lines import add_line, read_lines
from blocksparse.models.loop import train
from blocksparse.models.pixelcnn import data, layouts
from blocksparse.models.pixelcnn.architecture import count
from blocksparse.models.pixelcnn.config import PRESETS, ModelConfig, TrainConfig
from blocksparse.models.pixelcnn.sampling import sample
from blocksparse.models.pixelcnn.training import Trainer
from blocksparse.program import finish

HERE = Path(__file__).parent
KEYS = ("images", "seconds", "train", "curve")  # of a point of a curve


def machine(device: str) -> str:
    """What it runs on."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in about.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {cpu_isa()}, {torch.get_num_threads()} threads"


def model_of(config: dict[str, Any], arm: str, seed: int) -> ModelConfig:
    """An arm's model; the seed is of its graphs and weights, too."""
    what = dict(config["arms"][arm])
    return replace(PRESETS[what.pop("preset")], **what, seed=seed)


def images_of(config: dict[str, Any], folder: Path, cache: Path) -> tuple[Tensor, Tensor]:
    """Images to train and to test, decoded once: 60,000 JPEG files take as long as an epoch of the dense arm."""
    paths = [folder / name for name in config["data"]]
    seen = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    key = json.dumps([seen, config.get("shrink", 1)])
    with suppress(OSError, ValueError, KeyError, BadZipFile), np.load(cache) as kept:
        if str(kept["key"]) == key:
            return data.tensor_of(kept["train"]), data.tensor_of(kept["test"])
    found = data.read(paths, 3, config.get("shrink", 1), "skip")
    write_whole(cache, lambda file: np.savez(file, key=np.array(key), train=found.train, test=found.test), "pixelcnn")
    return data.tensor_of(found.train), data.tensor_of(found.test)


def stem_of(arm: str, seed: int) -> str:
    """The folder of an arm and a seed, and what its drawn images are called."""
    return f"{arm.replace('/', '-').replace(' ', '-')}-seed{seed}"


class Arm:
    """One training of an arm with a seed."""

    def __init__(
        self, name: str, seed: int, config: dict[str, Any], images: tuple[Tensor, Tensor], device: str
    ) -> None:
        self.name, self.seed, self.config, self.test = name, seed, config, images[1]
        self.curve = data.spread(self.test, config["curve_images"])
        updates = round(config["epochs"] * len(images[0]) / config["training"]["batch"])
        self.training = TrainConfig(**config["training"], updates=updates, seed=seed)
        self.trainer = Trainer(model_of(config, name, seed), self.training, images[0], device)

    def evaluate(self, stop: Any) -> dict[str, float]:
        """On the same test images at each point of the curve, and at the end on all of them, too."""
        curve = self.trainer.evaluate(self.curve, stop, raw=False)["valid"]
        ends = self.trainer.update >= self.training.updates
        return {"valid": curve} | (self.trainer.evaluate(self.test, stop) if ends else {}) | {"curve": curve}

    def go_on(self, folder: Path, deadline: float) -> bool:
        """Trains to the end, if that comes before the deadline; whether it is there."""
        last = folder / "last.safetensors"
        if last.exists():
            self.trainer.resume(last)
        each, t = -(-self.training.updates // self.config["evaluations"]), self.trainer
        print(f"\n{self.name}, seed {self.seed}: {sum(p.numel() for p in t.model.parameters())} parameters", flush=True)
        batch = self.training.batch
        with counting_bar(self.training.updates * batch, t.update * batch, " images", "images") as done:

            def report(line: dict[str, Any]) -> None:
                done(line["images"], f"{line['train']:.3f} bits/dim")

            def stop() -> bool:
                return time.monotonic() > deadline

            return train(t, folder, self.evaluate, save_every=each, report=report, stop=stop)

    def line(self, log: list[dict[str, Any]], device: str) -> dict[str, Any]:
        """Its line of results."""
        model, size = self.trainer.model_config, tuple(self.test.shape[2:])
        counts = count(model, layouts.density_of(model), (size[0], size[1]))
        return {
            "arm": self.name,
            "seed": self.seed,
            "valid": log[-1]["valid"],
            "valid_raw": log[-1]["valid_raw"],
            "seconds": log[-1]["seconds"],
            "images": log[-1]["images"],
            "step_ms": round(
                1000 * (log[-1]["seconds"] - log[0]["seconds"]) / (log[-1]["update"] - log[0]["update"]), 3
            ),
            "parameters": counts.parameters,
            "macs": counts.macs,
            "curve": [[entry[k] for k in KEYS] for entry in log],
            "curve_of": f"{len(self.curve)} of {len(self.test)} test images, evenly",
            "machine": machine(device),
            "versions": f"blocksparse {__version__}, PyTorch {torch.__version__}",
            "date": time.strftime("%Y-%m-%d"),
        }


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files that the configuration names")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and logs")
    parser.add_argument("--results", type=Path, help="JSON lines (default: results/CONFIG.jsonl)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many, to go on later")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these")
    parser.add_argument("--epochs", type=float, help="in place of the configuration's")
    parser.add_argument("--untimed", action="store_true", help="beside other work: lines say that seconds do not count")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    path = options.config if options.config.exists() else HERE / options.config
    config = json.loads(path.read_text())
    config["epochs"] = options.epochs or config["epochs"]
    results = options.results or HERE / "results" / f"{path.stem}.jsonl"
    unknown = set(options.arms or []) - set(config["arms"])
    if unknown:
        parser.error(f"{path} has no arm {', '.join(unknown)}, but {', '.join(config['arms'])}")
    begin = time.monotonic()
    train_images, test = images_of(config, options.data, options.out / "images.npz")
    images = train_images[: config.get("train_images")], test
    print(
        f"{len(images[0])} images to train, {len(images[1])} to test, read in {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    for seed in options.seeds or config["seeds"]:
        for name in options.arms or config["arms"]:
            if any((line["arm"], line["seed"]) == (name, seed) for line in read_lines(results)):
                continue
            begin, arm = time.monotonic(), Arm(name, seed, config, images, options.device)
            stem = stem_of(name, seed)
            if not arm.go_on(options.out / stem, deadline):
                print(f"stopped at update {arm.trainer.update} of {arm.training.updates}: the same command goes on")
                return 0
            log = read_lines(options.out / stem / "log.jsonl")
            line = arm.line(log, options.device) | {"timed": not options.untimed}
            with arm.trainer.averaged():
                size = (images[1].size(2), images[1].size(3))
                drawn = sample(arm.trainer.model, config["samples"], size, bf16=arm.training.bf16)
            write_png(results.with_name(f"{results.stem}-{stem}.png"), data.arrays_of(drawn))
            add_line(results, line)  # last: what has a line is not done again
            took = time.monotonic() - begin
            print(
                f"{name}, seed {seed}: {line['valid']:.4f} bits/dim, {line['step_ms']} ms a step, {took:.0f} s in all",
                flush=True,
            )
            del arm
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
