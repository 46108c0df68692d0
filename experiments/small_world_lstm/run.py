"""Trains every arm of a configuration, one after the other, and writes a line of results for each.

    python experiments/small_world_lstm/run.py configs/cpu-graphs.json --text imdb.txt --out out --results mine.jsonl

The same command goes on after a stop: runs continue from their last checkpoint, those with a result are left alone.
With --minutes it stops by itself, as on Ctrl-C, and leaves a checkpoint.

Each arm is first trained with each of its rates, on the first seed, for a tenth of the length or what the
configuration's `sweep_epochs` or `sweep_updates` say. Where it names `trials`, other rates follow until the best lies
inside, as many for each arm. Then so for warm-ups and ends of the cosine, where there are several. One part of the text
chooses, another is reported. A run that diverges has a line that says so; the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from configuration import Run, read_config, run_of, settings_of, sweep_updates_of, updates_of, usual, values_of
from sweeps import SETTINGS, Setting, bits, sweep

from blocksparse import __version__, cpu_isa
from blocksparse.models.bars import bytes_bar
from blocksparse.models.language import Trainer, read_text, train
from blocksparse.models.lines import add_line, read_lines
from blocksparse.models.loop import Diverged
from blocksparse.models.stopping import Stopped, stop_on_signals
from blocksparse.program import finish

HERE = Path(__file__).parent


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
        if report < 2 or choose == 1:
            raise ValueError(f"{report} bytes are reported and {choose} choose, needs 2 or more of each")
        if text.numel() <= choose + report:
            raise ValueError(f"the text has {text.numel()} bytes, needs more than the {choose + report} held out")
        train, held_out = text[: -choose - report], text[-choose - report :]
        return cls(train, held_out[:choose] if choose else held_out, held_out[choose:])


class Results:
    """A file of JSON lines, one for each run that has ended; each is written once it is complete."""

    def __init__(self, path: Path, digest: str, config: dict[str, Any]) -> None:
        """The digest is of the text."""
        self.path, self.digest, self.config, self.added = path, digest, config, 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        """All complete ones."""
        return read_lines(self.path, ("name", "arm", "sweep"))

    def find(self, run: Run) -> dict[str, Any] | None:
        """The line of a run, if it has ended.

        Raises:
            ValueError: that was of another text or configuration. Old lines do not say all of it.
        """
        line = next((line for line in self.lines() if line["name"] == run.name), None)
        if line is not None:
            for name, now in {"text": self.digest, **settings_of(run, self.config)}.items():
                if line.get(name, now) != now:
                    given = f"{run.name} with {name} {line[name]}, not {now}"
                    raise ValueError(f"{self.path} has {given}: --results names another file")
        return line

    def add(self, line: dict[str, Any]) -> None:
        """One more."""
        add_line(self.path, line)
        self.added += 1


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


def description(run: Run, trainer: Trainer, results: Results, options: argparse.Namespace) -> dict[str, Any]:
    """What a line of results says besides its results."""
    return {
        "name": run.name,
        "arm": run.arm,
        "sweep": run.sweep,
        **settings_of(run, results.config),
        "alone": not options.beside_others,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "recurrent": recurrent(trainer),
        "mix": [round(m, 4) for m in trainer.model.mix()],
        "machine": machine(options.device),
        "versions": f"blocksparse {__version__}, PyTorch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "text": results.digest,
    }


def do(run: Run, texts: Texts, results: Results, options: argparse.Namespace) -> float:
    """Trains it to the end, unless that is done; the bits per byte of the text that chooses, inf if it diverged."""
    known = results.find(run)
    if known is None:
        known = trained(run, texts, results, options)
        results.add(known)
        gc.collect()  # the captured update of a model of 100M weights holds tens of gigabytes of a card
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return bits(known)


def trained(run: Run, texts: Texts, results: Results, options: argparse.Namespace) -> dict[str, Any]:
    """Trains it to the end, from its last checkpoint if there is one; its line of results. Raises Stopped."""
    folder, config = options.out / run.name, results.config
    trainer = Trainer(run.model, run.training, texts.train, options.device)
    last = folder / "last.safetensors"
    if last.exists():
        trainer.resume(last)
    training, line = run.training, description(run, trainer, results, options)
    print(f"\n{run.name}: {line['parameters']} parameters", flush=True)
    streams = config.get("choose_streams", config["valid_streams"])
    try:
        with bytes_bar(training.updates * training.batch * training.steps, trainer.bytes_seen) as done:
            ended = train(
                trainer,
                folder,
                texts.choose,
                save_every=min(config["save_every"], training.updates),
                evaluate_every=evaluate_every(config, run),
                streams=streams,
                report=lambda entry: done(entry["bytes"], f"{entry['train']:.3f} bits/byte"),
                stop=options.stop,
            )
    except Diverged as error:
        print(f"{run.name}: {error}", flush=True)
        return {**line, "diverged": True}
    if not ended:
        raise Stopped(f"{run.name} stopped at update {trainer.update} of {training.updates}: the same command goes on")
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


def choose(arms: list[str], texts: Texts, results: Results, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What each arm trains with: rate, warm-up and end of the cosine, each swept with the best of those before it.

    An arm that diverges with all values of one is left out.
    """
    config = results.config
    chosen = {arm: usual(config, arm) for arm in arms}

    def short(arm: str, settings: dict[str, float]) -> Run:
        return run_of(config, arm, config["seeds"][0], settings, sweep=True)

    for setting in SETTINGS:
        values = {arm: values_of(setting, config, arm) for arm in arms}
        for arm in arms:
            chosen[arm][setting.field] = values[arm][0]
        least = 1 if options.sweep_only and setting.field == "lr" else 2  # one rate, too, may be asked for
        several = {arm: its for arm, its in values.items() if len(its) >= least and setting.field in options.sweep}
        known = {arm: known_losses(setting, results, partial(short, arm), chosen[arm]) for arm in several}

        def loss(arm: str, value: float, field: str = setting.field) -> float:
            return do(short(arm, {**chosen[arm], field: value}), texts, results, options)

        trials = config["trials"]
        if setting.field != "lr":
            trials = min(trials, 1)  # as many as there are values
        best = sweep(setting, several, known, trials, loss)
        for arm, value in best.items():
            chosen[arm][setting.field] = value
        arms = [arm for arm in arms if arm in best or arm not in several]
    return {arm: chosen[arm] for arm in arms}


def known_losses(
    setting: Setting, results: Results, of: Callable[[dict[str, float]], Run], chosen: dict[str, float]
) -> dict[float, float]:
    """By the values of a setting: of lines of the trainings that differ in it alone."""
    losses = {}
    for value in dict.fromkeys(line.get(setting.field, chosen[setting.field]) for line in results.lines()):
        if line := results.find(of({**chosen, setting.field: value})):
            losses[value] = bits(line)
    return losses


def apply_options(config: dict[str, Any], bytes_of_text: int, options: argparse.Namespace) -> None:
    """Puts what the command line says into a configuration, and how many updates that is."""
    epochs: float = options.epochs or config.get("epochs", 0)
    if options.updates or epochs:
        config["training"]["updates"] = options.updates or updates_of(epochs, bytes_of_text, config["training"])
    config["sweep_updates"] = options.sweep_updates or sweep_updates_of(config, bytes_of_text)
    config["trials"] = config.get("trials", 0) if options.trials is None else options.trials
    for arm in config["arms"].values():
        arm["rates"] = options.rates or arm["rates"]


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="see experiments/imdb_text.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and logs")
    parser.add_argument("--results", type=Path, help="JSON lines (default: results/CONFIG.jsonl)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these, of whole runs; a sweep takes the first")
    parser.add_argument("--updates", type=int, help="in place of the configuration's")
    parser.add_argument("--epochs", type=float, help="in place of the configuration's updates or epochs")
    parser.add_argument("--sweep-updates", type=int, help="in place of the configuration's")
    fields = [setting.field for setting in SETTINGS]
    what = "what is swept (default: all); of others the first value is taken"
    parser.add_argument("--sweep", nargs="*", choices=fields, default=fields, help=what)
    parser.add_argument("--sweep-only", action="store_true", help="choose, train nothing to the end")
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the configuration's, of every arm")
    parser.add_argument("--trials", type=int, help="rates that are tried for an arm, at least; 0: those named alone")
    parser.add_argument("--beside-others", action="store_true", help="the device is shared, so seconds say nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, to go on later")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    path = options.config if options.config.exists() else HERE / options.config
    for name, given in vars(options).items():
        if name in ("updates", "epochs", "sweep_updates") and given is not None and not 0 < given < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {given}, needs more than 0")
        if name in ("trials", "minutes", "threads") and given is not None and not given >= 0:
            parser.error(f"--{name} is {given}, needs 0 or more")
        if name == "seeds" and min(given or [0]) < 0:
            parser.error(f"--seeds has {min(given)}, needs 0 or more")
    config = read_config(path)
    if options.threads:
        torch.set_num_threads(options.threads)
    unknown = set(options.arms or []) - set(config["arms"])
    if unknown:
        parser.error(f"{path} has no arm {', '.join(unknown)}, but {', '.join(config['arms'])}")
    text = read_text(options.text)
    texts = Texts.cut(text, config.get("choose_bytes", 0), config["valid_bytes"])
    apply_options(config, texts.train.numel(), options)
    digest = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12]  # another one's bits are not compared
    results = Results(options.results or HERE / "results" / f"{path.stem}.jsonl", digest, config)
    arms = options.arms or list(config["arms"])
    with stop_on_signals() as asked:
        options.stop = lambda: asked() or time.monotonic() > deadline
        try:
            chosen = choose(arms, texts, results, options)
            seeds = [] if options.sweep_only else options.seeds or config["seeds"]
            runs = [run_of(config, arm, seed, settings) for seed in seeds for arm, settings in chosen.items()]
            diverged = [f"{arm} with all that was tried" for arm in arms if arm not in chosen]
            diverged += [run.name for run in runs if do(run, texts, results, options) == math.inf]
        except Stopped as stopped:
            print(stopped, flush=True)
            return asked.status if asked() else 0
    if not results.added:
        print(f"nothing is left to do: all that was asked for is in {results.path}")
    if diverged:
        raise ValueError(f"diverged: {', '.join(diverged)}")
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
