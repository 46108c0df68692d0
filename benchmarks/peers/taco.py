"""Kernels that the tensor algebra compiler TACO generates for blocks of W, in C: the program is $BLOCKSPARSE_TACO.

They are compiled for this processor by $CC (default cc), with loops in several orders and the sizes of blocks known.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from common import Contender, Data, copies_of

FLAGS = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")

# Per order of activations: expressions, the order of their loops ("": as they come), whether blocks are stored
# transposed, which is not timed.
WAYS = {
    False: (
        ("y(n,o,a) = w(o,i,a,b) * x(n,i,b)", "", False),
        ("y(n,o,a) = w(o,i,a,b) * x(n,i,b)", "o,i,n,a,b", False),
        ("y(n,o,a) = w(o,i,b,a) * x(n,i,b)", "n,o,i,b,a", True),
        ("y(n,o,a) = w(o,i,b,a) * x(n,i,b)", "o,i,n,b,a", True),
    ),
    True: (("y(o,a,n) = w(o,i,a,b) * x(i,b,n)", "", False),),
}


class TacoTensor(ctypes.Structure):
    """taco_tensor_t of the generated code."""

    _fields_ = (
        ("order", ctypes.c_int32),
        ("dimensions", ctypes.POINTER(ctypes.c_int32)),
        ("csize", ctypes.c_int32),
        ("mode_ordering", ctypes.POINTER(ctypes.c_int32)),
        ("mode_types", ctypes.POINTER(ctypes.c_int32)),
        ("indices", ctypes.POINTER(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))),
        ("vals", ctypes.c_void_p),
        ("fill_value", ctypes.c_void_p),
        ("vals_size", ctypes.c_int32),
    )


class Operand:
    """A tensor and what it points to. index: positions and columns of the second mode, which is then sparse."""

    def __init__(self, shape: tuple[int, ...], values: np.ndarray, index: tuple[np.ndarray, ...] = ()) -> None:
        self.kept = (values, index)
        rows = (ctypes.POINTER(ctypes.c_int32) * max(len(index), 1))()
        for i, array in enumerate(index):
            rows[i] = array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        modes = (ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)) * len(shape))()
        if index:
            modes[1] = ctypes.cast(rows, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        self.tensor = TacoTensor(
            order=len(shape),
            dimensions=(ctypes.c_int32 * len(shape))(*shape),
            csize=values.itemsize,
            indices=modes,
            vals=values.ctypes.data,
            vals_size=values.size,
        )
        self.rows = rows


Kernel = Callable[[Operand, Operand, Operand], None]


@cache
def generate(program: str, expression: str, order: str, block: int, c_type: str) -> Kernel:
    """The compiled kernel of y, w, x."""
    command = [program, expression, "-print-nocolor", "-f=w:dsdd", "-f=x:ddd", "-f=y:ddd"]
    command += [f"-t={tensor}:{c_type}" for tensor in "wxy"]
    command += [f"-s=reorder({order})"] if order else []
    command += [f"-s=bound({i},{i}k,{block},MaxExact)" for i in "ab"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        made = subprocess.run([*command, f"-write-source={source}"], capture_output=True, text=True, check=False)
        if made.returncode != 0 or not source.exists():
            raise ValueError((made.stderr or made.stdout).strip() or f"{program} wrote no code")
        compiler = [os.environ.get("CC", "cc"), *FLAGS, "-w", str(source), "-o", str(library)]
        compiled = subprocess.run(compiler, capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            raise ValueError(f"{expression} by {order}: {compiled.stderr}")
        compute = ctypes.CDLL(str(library)).compute

    def kernel(y: Operand, w: Operand, x: Operand) -> None:
        compute(ctypes.byref(y.tensor), ctypes.byref(w.tensor), ctypes.byref(x.tensor))

    return kernel


def seconds(kernel: Kernel, operands: tuple[Operand, Operand, Operand]) -> float:
    """The best of three calls."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        kernel(*operands)
        best = min(best, time.perf_counter() - start)
    return best


def taco(data: Data, rotate: int) -> Contender:
    """The fastest way; one thread. dgrad with W transposed beforehand."""
    p = data.problem
    program = os.environ.get("BLOCKSPARSE_TACO", "")
    if not program:
        raise ValueError("BLOCKSPARSE_TACO names no program")
    if p.direction == "wgrad" or p.dtype not in ("f32", "f64") or p.threads != 1 or p.x_first != p.y_first:
        raise ValueError("fprop and dgrad of f32 and f64, one thread, results in the order of their input")
    layout, blocks = data.blocks()
    index = tuple(np.ascontiguousarray(part, np.int32) for part in layout.csr())
    b, (out, in_) = layout.block_size, layout.grid
    given = data.input.numpy()
    y = np.zeros(tuple(data.expected.shape), given.dtype)
    if p.x_first:
        y, shapes = np.ascontiguousarray(y.T), ((out, b, p.n), (in_, b, p.n))
        given = np.ascontiguousarray(given.T)
    else:
        shapes = ((p.n, out, b), (p.n, in_, b))
    result, x = Operand(shapes[0], y), Operand(shapes[1], given)
    c_type = "float" if p.dtype == "f32" else "double"

    def weight(values: torch.Tensor) -> Operand:
        return Operand((out, in_, b, b), values.contiguous().numpy(), index)

    ways: list[tuple[float, int, Kernel, torch.Tensor]] = []
    for expression, order, turned in WAYS[p.x_first]:
        kernel = generate(program, expression, order, b, c_type)
        stored = blocks.mT.contiguous() if turned else blocks
        ways.append((seconds(kernel, (result, weight(stored), x)), len(ways), kernel, stored))
    _, _, best, stored = min(ways)
    weights = [weight(v) for v in copies_of(stored, rotate)]

    def run(i: int) -> torch.Tensor:
        best(result, weights[i], x)
        tensor = torch.from_numpy(y)
        return tensor.T if p.x_first else tensor

    return Contender(run, len(weights))
