"""Trains every arm of a configuration, one after the other, and writes a line of results for each.

    python experiments/small_world_lstm/run.py configs/cpu.json --text imdb.txt --out out/small_world
    python experiments/small_world_lstm/run.py configs/h200.json --text imdb.txt --out out/small_world --device cuda

The same command goes on after a stop: runs continue from their last checkpoint, those with a result are left alone.
Where a configuration has rates, each arm is first trained with each of them on the first seed, for `sweep_updates`. If
it says how many `trials` an arm has, the others follow the best one: beyond it at an edge, else between it and its
better neighbour. The best one of all is taken, by the part of the text that chooses; what is reported is of another.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
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
from blocksparse.models.loop import Diverged
from blocksparse.models.training import TrainConfig, Trainer, read_text, train

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One training: an arm with a seed, a rate and, as `variant` says, another warm-up. Sweeps are short ones."""

    arm: str
    model: ModelConfig
    training: TrainConfig
    sweep: bool = False
    variant: str = ""

    @property
    def name(self) -> str:
        """Of its folder and its line."""
        kind = "sweep" if self.sweep else "run"
        training = self.training
        return f"{self.arm}-{kind}-{training.updates}-seed{training.seed}-lr{training.lr:g}{self.variant}"


@dataclass(frozen=True)
class Texts:
    """Parts of the text, one behind the other: trained on; which rates and curves are of; which is reported.

    Without a part that chooses, the reported one does both.
    """

    train: torch.Tensor
    choose: torch.Tensor
    report: torch.Tensor

    @classmethod
    def cut(cls, text: torch.Tensor, choose: int, report: int) -> Texts:
        """The last bytes are reported, those before them choose."""
        if text.numel() <= choose + report:
            raise ValueError(f"the text has {text.numel()} bytes, needs more than the {choose + report} held out")
        train, held_out = text[: -choose - report], text[-choose - report :]
        return cls(train, held_out[:choose] if choose else held_out, held_out[choose:])


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


def description(run: Run, trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """What a line of results says besides its results."""
    training = run.training
    return {
        "name": run.name,
        "arm": run.arm,
        "sweep": run.sweep,
        "seed": training.seed,
        "lr": training.lr,
        "warmup": training.warmup,
        "batch": training.batch,
        "steps": training.steps,
        "alone": not options.beside_others,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "recurrent": recurrent(trainer),
        "graph": run.model.graph,
        "block": run.model.block,
        "hidden": run.model.hidden,
        "mix": [round(m, 4) for m in trainer.model.mix()],
        "machine": machine(options.device),
        "versions": f"blocksparse {__version__}, PyTorch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
    }


def do(run: Run, texts: Texts, options: argparse.Namespace, config: dict[str, Any]) -> float:
    """Trains it to the end, unless that is done; the bits per byte of the text that chooses, inf if it diverged."""
    results = Results(options.results)
    known = results.find(run.name)
    if known is None:
        known = trained(run, texts, options, config)
        results.add(known)
        gc.collect()  # the captured update of a model of 100M weights holds tens of gigabytes of a card
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    if known.get("diverged"):
        return math.inf
    return float(known["choose" if "choose" in known else "valid"])  # older lines have one part for both


def trained(run: Run, texts: Texts, options: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Trains it to the end, from its last checkpoint if there is one; its line of results."""
    folder = options.out / run.name
    trainer = Trainer(run.model, run.training, texts.train, options.device)
    last = folder / "last.safetensors"
    if last.exists():
        trainer.resume(last)
    training, line = run.training, description(run, trainer, options)
    print(f"\n{run.name}: {line['parameters']} parameters", flush=True)
    streams = config.get("choose_streams", config["valid_streams"])
    try:
        with bytes_bar(training.updates * training.batch * training.steps, trainer.bytes_seen) as done:
            train(
                trainer,
                folder,
                texts.choose,
                save_every=min(config["save_every"], training.updates),
                evaluate_every=evaluate_every(config, run),
                streams=streams,
                report=lambda entry: done(entry["bytes"], f"{entry['train']:.3f} bits/byte"),
            )
    except Diverged as error:
        if not run.sweep:
            raise
        print(f"{run.name}: {error}", flush=True)
        return {**line, "diverged": True}
    log = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    line |= {"choose": log[-1]["valid"], "seconds": log[-1]["seconds"], "bytes": log[-1]["bytes"]}
    if not run.sweep:
        own = texts.report is not texts.choose
        line["valid"] = round(trainer.evaluate(texts.report, config["valid_streams"]), 4) if own else line["choose"]
    line["curve"] = [[entry[key] for key in ("bytes", "seconds", "train", "valid")] for entry in log]
    print(f"{run.name}: {line.get('valid', line['choose']):.4f} bits/byte after {line['seconds']:.0f} s", flush=True)
    return line


def evaluate_every(config: dict[str, Any], run: Run) -> int | None:
    """Updates between points of the curve; a sweep is evaluated at its end."""
    if run.sweep:
        return run.training.updates
    if "evaluations" in config:
        return max(1, run.training.updates // int(config["evaluations"]))
    every: int | None = config.get("evaluate_every")
    return every


def next_rate(losses: dict[float, float]) -> float:
    """Which rate to try after some: half or twice the best one at an edge, else between it and its better neighbour."""
    rates = sorted(losses)
    at = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if at == 0:
        return rates[0] / 2
    if at == len(rates) - 1:
        return rates[-1] * 2
    neighbour = min(rates[at - 1], rates[at + 1], key=lambda rate: losses[rate])
    return float(f"{math.sqrt(rates[at] * neighbour):.2g}")


def best_rate(arm: str, texts: Texts, options: argparse.Namespace, config: dict[str, Any]) -> float:
    """Of those that the configuration names and, up to `trials` of them, of those that follow the best one."""
    rates = options.rates or config["arms"][arm]["rates"]
    if len(rates) == 1:
        return float(rates[0])
    trials = options.trials or config.get("trials", len(rates))
    losses: dict[float, float] = {}
    while len(losses) < max(trials, len(rates)):
        rate = float(rates[len(losses)] if len(losses) < len(rates) else next_rate(losses))
        losses[rate] = do(run_of(config, arm, config["seeds"][0], rate, sweep=True), texts, options, config)
    best = min(losses, key=lambda rate: losses[rate])
    if not math.isfinite(losses[best]):
        raise ValueError(f"{arm} diverged with each rate of {', '.join(f'{rate:g}' for rate in losses)}")
    return best


def best_warmup(arm: str, lr: float, texts: Texts, options: argparse.Namespace, config: dict[str, Any]) -> int:
    """The configuration's, or one of its `warmups`, each of which is tried with the best rate."""
    usual = int(config["training"]["warmup"])
    if not config.get("warmups"):
        return usual
    runs = [run_of(config, arm, config["seeds"][0], lr, warmup, True) for warmup in (usual, *config["warmups"])]
    return min(runs, key=lambda run: do(run, texts, options, config)).training.warmup


def run_of(
    config: dict[str, Any], arm: str, seed: int, lr: float, warmup: int | None = None, sweep: bool = False
) -> Run:
    """The run of an arm; the seed is of the graphs, of the weights and of the training."""
    what = config["arms"][arm]
    training = {**config["training"], **what.get("training", {}), "seed": seed, "lr": lr}
    if sweep:
        training["updates"] = config["sweep_updates"]
    variant = ""
    if warmup is not None and warmup != training["warmup"]:
        training["warmup"], variant = warmup, f"-warmup{warmup}"
    model = ModelConfig(**{**config["model"], **what["model"], "seed": 100 * seed})
    return Run(arm, model, TrainConfig(**training), sweep, variant)


def updates_of(epochs: float, bytes_of_text: int, training: dict[str, Any]) -> int:
    """That read the text so often."""
    each = (bytes_of_text - 1) // training["batch"] // training["steps"]  # as Trainer cuts it
    return max(1, round(epochs * int(each)))


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
    parser.add_argument("--epochs", type=float, help="in place of the configuration's updates or epochs")
    parser.add_argument("--sweep-updates", type=int, help="in place of the configuration's")
    parser.add_argument("--sweep-only", action="store_true", help="choose rates, train nothing to the end")
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the configuration's, of every arm")
    parser.add_argument("--trials", type=int, help="rates that are tried for an arm, in place of the configuration's")
    parser.add_argument("--beside-others", action="store_true", help="the device is shared, so seconds say nothing")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    options = parser.parse_args()
    path = options.config if options.config.exists() else HERE / options.config
    config = json.loads(path.read_text())
    options.results = options.results or HERE / "results" / f"{path.stem}.jsonl"
    if options.threads:
        torch.set_num_threads(options.threads)
    unknown = set(options.arms or []) - set(config["arms"])
    if unknown:
        parser.error(f"{path} has no arm {', '.join(unknown)}, but {', '.join(config['arms'])}")
    texts = Texts.cut(read_text(options.text), config.get("choose_bytes", 0), config["valid_bytes"])
    epochs = options.epochs or config.get("epochs")
    if options.updates or epochs:
        config["training"]["updates"] = options.updates or updates_of(epochs, texts.train.numel(), config["training"])
    config["sweep_updates"] = options.sweep_updates or config.get("sweep_updates", config["training"]["updates"])
    for seed in options.seeds or config["seeds"]:
        for arm in options.arms or config["arms"]:
            rate = best_rate(arm, texts, options, config)
            warmup = best_warmup(arm, rate, texts, options, config)
            if not options.sweep_only:
                do(run_of(config, arm, seed, rate, warmup), texts, options, config)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command goes on from here.")
