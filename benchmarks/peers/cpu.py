"""Adds what is called from Python to a file of results: PyTorch's dense and BSR products, SciPy's BSR, TACO's kernels.

python benchmarks/peers/cpu.py benchmarks/results/2026-11-22-amd-epyc-zen3.jsonl [--filter "n=64"]

For each problem of the file: the same shapes, every result checked against a dense product in float64, then medians of
interleaved samples, weights rotated through as much memory as the file's own were, threads confined to the same
processors. Problems that have their line already are left alone. Blocksparse is called through NumPy (bf16: PyTorch).
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import scipy
import torch
from common import (
    Contender,
    Data,
    add_to,
    blocksparse_torch,
    by_name,
    copies_of,
    medians,
    parser_of,
    prepare_all,
    record_of,
    torch_bsr,
    torch_dense,
)
from scipy.sparse import bsr_array
from taco import taco

import blocksparse
from blocksparse import numpy as bsn
from records import Problem, Record, device

BY = "peers/cpu.py"
SAMPLE_US = 2000.0


def blocksparse_numpy(data: Data, rotate: int) -> Contender:
    """Our own functions on arrays."""
    p, layout = data.problem, data.layout
    if p.dtype not in ("f32", "f64"):
        raise ValueError(f"{p.dtype} through PyTorch only")
    x, dy, given = data.x.numpy(), data.dy.numpy(), data.input.numpy()
    if p.direction == "wgrad":
        dw = np.empty(layout.values_shape, x.dtype)
        return Contender(lambda i: bsn.linear_wgrad(x, dy, layout, out=dw, threads=p.threads))
    out = np.empty(tuple(data.expected.shape), given.dtype)
    if p.y_first:
        out = np.ascontiguousarray(out.T).T
    op = bsn.linear_fprop if p.direction == "fprop" else bsn.linear_dgrad
    values = [v.numpy() for v in copies_of(data.values, rotate)]
    return Contender(lambda i: op(given, values[i], layout, out=out, threads=p.threads), len(values))


def scipy_bsr(data: Data, rotate: int) -> Contender:
    """SciPy's BSR times dense, one thread always."""
    p = data.problem
    if p.direction == "wgrad" or p.dtype not in ("f32", "f64"):
        raise ValueError("no weight gradient, f32 and f64 only")
    layout, blocks = data.blocks()
    (crow, col), shape = layout.csr(), (layout.out_features, layout.in_features)
    weights: list[Any] = [bsr_array((v.numpy(), col, crow), shape=shape) for v in copies_of(blocks, rotate)]
    given = data.input.numpy().T
    if p.y_first:
        return Contender(lambda i: (weights[i] @ given).T, len(weights))
    return Contender(lambda i: np.ascontiguousarray((weights[i] @ given).T), len(weights))


CONTENDERS = (blocksparse_numpy, blocksparse_torch, torch_dense, torch_bsr, scipy_bsr, taco)


def sample(contender: Contender, calls: int, rotate: bool) -> float:
    """Microseconds a call; one that is not timed goes first."""
    run, copies = contender.run, contender.copies if rotate else 1
    run(0)
    start = time.perf_counter()
    for i in range(calls):
        run((i + 1) % copies)
    return 1e6 * (time.perf_counter() - start) / calls


def confine(processors: list[int], threads: int) -> None:
    """Confines every thread of this process to the first `threads` processors, and libraries to as many threads."""
    torch.set_num_threads(threads)
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), processors[:threads])


def measure(problem: Problem, header: Record, samples: int) -> Record:
    """The line of a problem."""
    confine(header["processors"], problem.threads)
    contenders, without = prepare_all(CONTENDERS, Data(problem), header["rotate_mb"] << 20)
    samplers = []
    for contender in contenders:
        calls = int(min(max(SAMPLE_US / max(sample(contender, 1, False), 0.1), 1), 10000))
        samplers.append((partial(sample, contender, calls, True), partial(sample, contender, calls, False)))
    cold, hot, taken = medians(samplers, samples, header["budget_s"])
    times = by_name(contenders, cold), by_name(contenders, hot)
    return {
        **record_of(BY, header, problem, ("blocksparse_numpy", "blocksparse_torch"), *times),
        "samples": taken,
        "without": without,
        "versions": {
            "blocksparse": f"{blocksparse.__version__} {blocksparse.cpu_isa()}",
            "torch": torch.__version__,
            "scipy": scipy.__version__,
            "numpy": np.__version__,
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    options = parser_of(__doc__).parse_args(arguments)
    return add_to(
        options.results,
        device(),
        options.filter,
        lambda problem: problem.dtype in ("f32", "f64", "bf16") and not problem.device,
        lambda problem, header: measure(problem, header, options.samples),
    )


if __name__ == "__main__":
    sys.exit(main())
