"""A PixelCNN++ learns to draw clothes: dense, and block-sparse twice as deep at equal parameters and multiply-adds.

    make pixelcnn                                     # installs what is needed, and runs this: about 4 minutes
    python examples/pixelcnn/pixelcnn.py --quick      # everything once, in some seconds

Both are trained side by side, a core each. Stop it with Ctrl-C and start it again: it continues. Then open
out/pixelcnn/index.html.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import queue
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from clothes import arms, report
from tqdm import tqdm

from blocksparse.models.files import write_whole
from blocksparse.models.images import ImagesError
from blocksparse.models.pixelcnn.sampling import sample
from blocksparse.models.pixelcnn.training import load_model

OVERHEAD_SECONDS = 60.0  # start, timing, tests, drawing and pictures on two cores
CONTENTION = 1.2  # an update takes longer while the other arm trains on the other core
DRAWN, COMPLETED = 36, 12


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="how long it may take, about (default: 4)")
    parser.add_argument("--quick", action="store_true", help="a few images and updates, some seconds")
    parser.add_argument("--out", type=Path, default=Path("out/pixelcnn"), help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes is {options.minutes:g}, needs a number above 0")
    return options


def main() -> int:
    """Runs what is not there yet. Returns the exit status."""
    options = parse()
    if importlib.util.find_spec("matplotlib") is None:  # only needed at the end: better to say so now
        print("error: the pictures need matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        return run(options)
    except (ImagesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The same command continues from here; with --fresh it starts over.", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Times, trains, draws, reports."""
    started = time.perf_counter()
    state = options.out / "state"
    if options.fresh:
        shutil.rmtree(state, ignore_errors=True)
    train_images, test = arms.images(options.quick)
    print(f"Fashion-MNIST at 14 x 14 pixels: {len(train_images)} images to train, {len(test)} to test")
    for name in arms.ARMS:
        counts = report.counts_of(name)
        print(f"  {arms.TITLES[name]:<26}{counts.parameters:,} parameters, {counts.macs / 1e6:.1f}M MACs an image")
    updates = updates_of(options, state, train_images)
    jobs = [arms.Job(name, updates, state, options.quick) for name in arms.ARMS]
    if not train_all(jobs):
        print("error: a training has ended early, see above", file=sys.stderr)
        return 1
    print("Drawing ...")
    given = test[:COMPLETED]
    results = [result_of(job, given) for job in jobs]
    page = report.write(results, given, options.out)
    print(f"\n{report.table(results)}\n")
    print(f"Done in {time.perf_counter() - started:.0f} s. Now open {page}")
    return 0


def updates_of(options: argparse.Namespace, state: Path, train_images: torch.Tensor) -> int:
    """How many both arms train for: as many as the slower one can in that time. Kept for whoever goes on."""
    path = state / "updates.json"
    wanted = {"minutes": options.minutes, "quick": options.quick}
    try:
        kept = json.loads(path.read_text())
        if kept["wanted"] == wanted:
            print("Continuing with what an earlier run has done (--fresh starts over).")
            return int(kept["updates"])
        print("Starting anew, since the options have changed.")
        shutil.rmtree(state)
    except (OSError, ValueError, KeyError, TypeError):
        shutil.rmtree(state, ignore_errors=True)
    updates = 8
    if not options.quick:
        print("Timing an update of each ...")
        slowest = max(arms.seconds_of_an_update(name, train_images) for name in arms.ARMS)
        budget = max(60 * options.minutes - OVERHEAD_SECONDS, 15 * options.minutes)
        updates = max(16, int(budget / slowest / CONTENTION))
    write_whole(path, json.dumps({"wanted": wanted, "updates": updates}).encode(), "pixelcnn")
    return updates


def train_all(jobs: list[arms.Job]) -> bool:
    """Trains the arms side by side, in a process each; whether all came to their end."""
    context = multiprocessing.get_context("spawn")  # fork would copy PyTorch's thread pool in the middle of things
    told, stops = context.Queue(), context.Event()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent who is asked to stop
    workers = [context.Process(target=follow, args=(job, told, stops), daemon=True) for job in jobs]
    for worker in workers:
        worker.start()
    signal.signal(signal.SIGINT, handler)
    try:
        show(jobs, workers, told)
    except KeyboardInterrupt:
        stops.set()
        print("\nStopping after this update ...", file=sys.stderr)
        raise
    finally:
        for worker in workers:
            worker.join(60)
    return all(worker.exitcode == 0 for worker in workers)


def follow(job: arms.Job, told: Any, stops: Any) -> None:
    """In a worker: one thread, the arm's training. It stops with its parent, which may have been killed."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    arms.work(job, told, lambda: stops.is_set() or (parent is not None and not parent.is_alive()))


def show(jobs: list[arms.Job], workers: list[Any], told: Any) -> None:
    """Bars on a terminal, else a line for every tenth, until the workers have ended."""
    plain = not sys.stderr.isatty()
    total = jobs[0].updates * arms.BATCH
    print(f"Training both for {jobs[0].updates} updates of {arms.BATCH} images ...", flush=True)
    bars = {
        job.name: tqdm(total=total, desc=f"{arms.TITLES[job.name]:<26}", unit=" images", position=i, disable=plain)
        for i, job in enumerate(jobs)
    }
    tenths = dict.fromkeys(bars, 0)
    while any(worker.is_alive() for worker in workers):
        try:
            name, update, bits = told.get(timeout=0.5)
        except queue.Empty:
            continue
        done = update * arms.BATCH
        bars[name].update(done - bars[name].n)
        if bits:
            bars[name].set_postfix_str(f"{bits:.3f} bits/dim", refresh=False)
        if plain and done * 10 // total > tenths[name]:
            tenths[name] = done * 10 // total
            known = f", {bits:.3f} bits/dim" if bits else ""
            print(f"{arms.TITLES[name]:<26} {done}/{total} images{known}", flush=True)
    for bar in bars.values():
        bar.close()


def result_of(job: arms.Job, given: torch.Tensor) -> report.Result:
    """What an arm has come to, and what it draws: both of the same random numbers."""
    model, size = load_model(job.last)
    drawn = sample(model, 12 if job.quick else DRAWN, size)
    completed = sample(model, len(given), size, given=given, rows=size[0] // 2)
    return report.Result(job, report.read_log(job), report.counts_of(job.name), drawn, completed)


if __name__ == "__main__":
    sys.exit(main())
