"""Trains every arm of a configuration, one after the other, and writes a line of results for each.

    python experiments/small_world_lstm/run.py configs/cpu.json --text imdb.txt --out out/small_world
    python experiments/small_world_lstm/run.py configs/h200.json --text imdb.txt --out out/small_world --device cuda

The same command goes on after a stop: runs continue from their last checkpoint, those with a result are left alone.
Where a configuration has rates, each arm is first trained with each of them on the first seed, for `sweep_updates`,
and the best one on the held-out text is taken.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocksparse import __version__, cpu_isa
from blocksparse.models.bars import bytes_bar
from blocksparse.models.language import ModelConfig
from blocksparse.models.training import TrainConfig, Trainer, read_text, train

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One training: an arm with a seed and a rate. Sweeps are short ones."""

    arm: str
    model: ModelConfig
    training: TrainConfig
    sweep: bool = False

    @property
    def name(self) -> str:
        """Of its folder and its line."""
        kind = "sweep" if self.sweep else "run"
        training = self.training
        return f"{self.arm}-{kind}-{training.updates}-seed{training.seed}-lr{training.lr:g}"


class Results:
    """A file of JSON lines, one for each run that has ended; each is written once it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        """All complete ones."""
        lines = []
        for text in self.path.read_text().splitlines() if self.path.exists() else []:
            with suppress(json.JSONDecodeError):  # half a line, of a disk that was full: the run is done again
                lines.append(json.loads(text))
        return lines

    def find(self, name: str) -> dict[str, Any] | None:
        """The line of a run, if it has ended."""
        return next((line for line in self.lines() if line["name"] == name), None)

    def add(self, line: dict[str, Any]) -> None:
        """One more."""
        with open(self.path, "a") as file:  # one write, so that several processes may share the file
            file.write(json.dumps(line) + "\n")


def machine(device: str) -> str:
    """What it runs on."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in about.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {cpu_isa()}, {torch.get_num_threads()} threads"


def recurrent(trainer: Trainer) -> int:
    """Weights between units."""
    lstm = trainer.model.lstm
    return sum(int(layer.weight.numel()) for layer in (*lstm.matrices, lstm.gates))


def do(run: Run, data: tuple[torch.Tensor, torch.Tensor], options: argparse.Namespace, config: dict[str, Any]) -> float:
    """Trains it to the end, unless that is done; the bits per byte of the held-out text."""
    results = Results(options.results)
    known = results.find(run.name)
    if known is not None:
        return float(known["valid"])
    folder = options.out / run.name
    trainer = Trainer(run.model, run.training, data[0], options.device)
    last = folder / "last.safetensors"
    if last.exists():
        trainer.resume(last)
    total = run.training.updates * run.training.batch * run.training.steps
    print(f"\n{run.name}: {sum(p.numel() for p in trainer.model.parameters())} parameters", flush=True)
    with bytes_bar(total, trainer.bytes_seen) as done:
        train(
            trainer,
            folder,
            data[1],
            save_every=config["save_every"],
            evaluate_every=config.get("evaluate_every"),
            streams=config["valid_streams"],
            report=lambda line: done(line["bytes"], f"{line['train']:.3f} bits/byte"),
        )
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    line = {
        "name": run.name,
        "arm": run.arm,
        "sweep": run.sweep,
        "seed": run.training.seed,
        "lr": run.training.lr,
        "valid": log[-1]["valid"],
        "seconds": log[-1]["seconds"],
        "alone": not options.beside_others,
        "bytes": log[-1]["bytes"],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "recurrent": recurrent(trainer),
        "graph": run.model.graph,
        "hidden": run.model.hidden,
        "mix": [round(m, 4) for m in trainer.model.mix()],
        "curve": [[entry[key] for key in ("bytes", "seconds", "train", "valid")] for entry in log],
        "machine": machine(options.device),
        "versions": f"blocksparse {__version__}, PyTorch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
    }
    results.add(line)
    print(f"{run.name}: {line['valid']:.4f} bits/byte after {line['seconds']:.0f} s", flush=True)
    return float(line["valid"])


def runs_of(config: dict[str, Any], arm: str, seed: int, lr: float, sweep: bool) -> Run:
    """The run of an arm; the seed is of the graphs, of the weights and of the training."""
    what = config["arms"][arm]
    training = {**config["training"], "seed": seed, "lr": lr}
    if sweep:
        training["updates"] = config["sweep_updates"]
    return Run(
        arm, ModelConfig(**{**config["model"], **what["model"], "seed": 100 * seed}), TrainConfig(**training), sweep
    )


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="see experiments/imdb_text.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and logs")
    parser.add_argument("--results", type=Path, help="JSON lines (default: results/CONFIG.jsonl)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these: for processes side by side")
    parser.add_argument("--updates", type=int, help="in place of the configuration's")
    parser.add_argument("--sweep-updates", type=int, help="in place of the configuration's")
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the configuration's, of every arm")
    parser.add_argument("--beside-others", action="store_true", help="the device is shared, so seconds say nothing")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    options = parser.parse_args()
    path = options.config if options.config.exists() else HERE / options.config
    config = json.loads(path.read_text())
    options.results = options.results or HERE / "results" / f"{path.stem}.jsonl"
    config["training"]["updates"] = options.updates or config["training"]["updates"]
    config["sweep_updates"] = options.sweep_updates or config.get("sweep_updates")
    if options.threads:
        torch.set_num_threads(options.threads)
    unknown = set(options.arms or []) - set(config["arms"])
    if unknown:
        parser.error(f"{path} has no arm {', '.join(unknown)}, but {', '.join(config['arms'])}")
    text = read_text(options.text)
    data = text[: -config["valid_bytes"]], text[-config["valid_bytes"] :]
    for seed in options.seeds or config["seeds"]:
        for arm in options.arms or config["arms"]:
            rates = options.rates or config["arms"][arm]["rates"]
            if len(rates) > 1:
                swept = [runs_of(config, arm, config["seeds"][0], lr, True) for lr in rates]
                rates = [min(swept, key=lambda run: do(run, data, options, config)).training.lr]
            do(runs_of(config, arm, seed, rates[0], False), data, options, config)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command goes on from here.")
