"""A small-world block-sparse LSTM learns to write text on the CPU, beside a dense one with as many parameters.

    python examples/demo/demo.py                    # Python's standard library as text, about 3 minutes
    python examples/demo/demo.py --text my.txt      # any other text
    python examples/demo/demo.py --quick            # everything once, in half a minute

Stop it with Ctrl-C and start it again: it continues. Then open out/demo/index.html.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from smallworld import arms, data, report, speed, train
from smallworld.arms import KINDS, Settings
from smallworld.store import Store
from tqdm import tqdm

import blocksparse

SLICE_SECONDS = 1.5  # of training between two checkpoints
OVERHEAD_SECONDS = 40.0  # start, measurements, tests and pictures of a full run on two cores
CONTENTION = 1.15  # steps take longer while other arms train on the other cores
QUICK = Settings(width=216, links=4, rows=32, time=8, test=1 << 13)
QUICK_STEPS = 50


def main() -> int:
    """Runs what is not there yet. Returns the exit status."""
    options = parse()
    if importlib.util.find_spec("matplotlib") is None:  # only needed at the end: better to say so now
        print("error: the pictures need matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)  # one thread an arm: small products gain little from two, and arms train side by side
    try:
        run(options)
    except (data.TextError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The same command continues from here; with --fresh it starts over.", file=sys.stderr)
        return 130
    return 0


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="learn these files instead")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long it may take, about (default: 3)")
    parser.add_argument("--quick", action="store_true", help="small networks, a few steps, half a minute")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the results (default: out/demo)")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes is {options.minutes:g}, needs a number above 0")
    return options


def run(options: argparse.Namespace) -> None:
    """Text, step times, training, single layers, report."""
    started = time.perf_counter()
    settings = QUICK if options.quick else Settings()
    text = data.read_files(options.text or data.standard_library())
    split = data.Split.of(len(text), settings.rows, settings.time, settings.test)
    folder = options.out / "state"
    store = open_store(folder, options, settings, text)
    source = ", ".join(map(str, options.text)) if options.text else "the Python standard library's sources"
    print(f"Text: {source}, {len(text) / 1e6:.1f} MB; the last {split.test / 1e3:.0f} kB are for the test.")

    chosen = [arms.make(kind, settings) for kind in KINDS.values()]
    print("\n".join(report.describe(arm) for arm in chosen))
    train_text, _ = data.load(folder / "text.bin", split)
    batches = data.Batches(train_text, settings.rows, settings.time)
    timed = [*chosen, arms.as_wide(settings)]

    def step_seconds() -> dict[str, float]:
        print("Timing a training step of each, and of a dense network as wide as the sparse ones ...")
        return speed.step_times(timed, settings, batches, 2 if options.quick else 5)

    def speed_ups() -> list[list[float]]:
        print("Timing single layers against torch.nn.functional.linear ...")
        return speed.speed_ups(5 if options.quick else 31)

    seconds = store.once("step seconds", step_seconds)
    steps = store.once("steps", lambda: steps_within(options, [seconds[name] for name in KINDS]))

    identity = f"{steps} steps, {sorted(store.identity.items())}"
    jobs = [train.Job(name, settings, split, steps, folder, identity) for name in KINDS]
    train_all(jobs)
    layers = store.once("speed-ups", speed_ups)
    runs = [train.Run.load(job) for job in jobs]
    results = report.Results(settings, source, len(text), runs, timed[-1], seconds, layers)
    page = report.write(results, options.out)
    print(f"\n{report.table(results)}\n")
    print(f"Done in {time.perf_counter() - started:.0f} s. Now open {page}")


def open_store(folder: Path, options: argparse.Namespace, settings: Settings, text: bytes) -> Store:
    """The results so far, if they are of the same settings and text. Else, or with --fresh, an empty store."""
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    identity: dict[str, Any] = dataclasses.asdict(settings)
    identity |= {"text": data.digest(text), "quick": options.quick, "minutes": options.minutes}
    identity |= {"rates": {kind.name: kind.rate for kind in KINDS.values()}}
    identity |= {"torch": torch.__version__, "blocksparse": blocksparse.__version__}
    store = Store(folder, identity)
    if store.changed:
        print(f"Starting anew, since something has changed: {'; '.join(store.changed)}.")
    elif store.results:
        print("Continuing with what an earlier run has done (--fresh starts over).")
    data.save(text, folder / "text.bin")
    return store


def steps_within(options: argparse.Namespace, seconds: list[float]) -> int:
    """How many steps every arm can train for, in the time that there is."""
    if options.quick:
        return QUICK_STEPS
    budget = max(60 * options.minutes - OVERHEAD_SECONDS, 10 * options.minutes)
    return max(20, int(budget * workers() / CONTENTION / sum(seconds)))


# ---- Training, in as many processes as there are cores ---------------------------------------------------------------


def workers() -> int:
    """Processes that train at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, len(KINDS))


def train_all(jobs: list[train.Job]) -> None:
    """Trains the arms side by side, a slice of each in turn; whoever is behind goes first."""
    reached = {job.kind: train.progress(train.Run.load(job)) for job in jobs}
    if all(progress.done for progress in reached.values()):
        return
    bars = Bars(jobs, reached)
    context = multiprocessing.get_context("spawn")  # fork would copy PyTorch's thread pool in the middle of things
    pool = ProcessPoolExecutor(workers(), mp_context=context, initializer=start_worker)
    try:
        running: dict[Future[train.Progress], train.Job] = {}
        while any(not progress.done for progress in reached.values()):
            waiting = [job for job in jobs if not reached[job.kind].done and job not in running.values()]
            waiting.sort(key=lambda job: reached[job.kind].steps)
            for job in waiting[: workers() - len(running)]:
                with ignoring_interrupts():
                    running[pool.submit(train.train, job, SLICE_SECONDS)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                progress = future.result()
                reached[progress.kind] = progress
                bars.show(progress)
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the slices that run: they save their checkpoints
        bars.close()


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Processes that start in here ignore Ctrl-C for good: it is the parent who stops them, after their slice."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def start_worker() -> None:
    """In each worker: one thread, and no life without the parent."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class Bars:
    """A progress bar for each arm; where there is no terminal, a line every tenth of the way."""

    FORMAT = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}"

    def __init__(self, jobs: list[train.Job], reached: dict[str, train.Progress]) -> None:
        self.size = jobs[0].settings.rows * jobs[0].settings.time
        self.steps = jobs[0].steps
        print(f"Training each arm for {self.steps} steps of {self.size} bytes, {workers()} at a time ...")
        self.plain = not sys.stderr.isatty()
        self.tenths = {kind: progress.steps * 10 // self.steps for kind, progress in reached.items()}
        self.bars = {} if self.plain else {job.kind: self._bar(i, job) for i, job in enumerate(jobs)}
        for progress in reached.values():
            self.show(progress)

    def _bar(self, position: int, job: train.Job) -> Any:
        title = f"{KINDS[job.kind].title:<20}"
        options: Any = {"unit": "B", "unit_scale": True, "bar_format": self.FORMAT, "position": position}
        return tqdm(total=self.steps * self.size, desc=title, **options)

    def show(self, progress: train.Progress) -> None:
        """Draws the arm's bar anew."""
        numbers = f"{progress.bits:.2f} bits/byte, {progress.bytes_per_second / 1e3:.1f} kB/s"
        if not self.plain:
            bar = self.bars[progress.kind]
            bar.n = progress.steps * self.size
            bar.set_postfix_str(numbers)
        elif progress.steps * 10 // self.steps > self.tenths[progress.kind]:
            self.tenths[progress.kind] = progress.steps * 10 // self.steps
            print(f"{KINDS[progress.kind].title:<20} {progress.steps}/{self.steps} steps, {numbers}", flush=True)

    def close(self) -> None:
        """Leaves the bars as they are."""
        for bar in self.bars.values():
            bar.close()


if __name__ == "__main__":
    sys.exit(main())
