"""Shared by all Python tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocksparse
from blocksparse import Layout


@pytest.fixture(params=blocksparse.cpu_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Runs the test once with each instruction set that this CPU has."""
    blocksparse.set_cpu_isa(request.param)
    yield request.param
    blocksparse.set_cpu_isa("")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products of tiny models take less time than threads wait for each other where others use the cores, too."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of processes that tests start
        yield
    torch.set_num_threads(before)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def make_layout() -> Layout:
    """A ragged one with empty places: 60 x 90 in blocks of 16."""
    return Layout.from_graph("random(4,6,0.4)", 16, seed=3, out_features=60, in_features=90)


@pytest.fixture
def layout() -> Layout:
    return make_layout()


def make_channels() -> Layout:
    """One for convolutions, of 30 channels to 21 in blocks of 8."""
    return Layout.from_graph("random(3,4,0.5)", 8, seed=1, out_features=21, in_features=30)


@pytest.fixture
def channels() -> Layout:
    return make_channels()


@pytest.fixture(autouse=True)
def _seed() -> None:
    if torch := sys.modules.get("torch"):  # tests that use it have imported it
        torch.manual_seed(0)


def assert_same(mine: list[Any], theirs: list[Any]) -> None:
    """Tensors to the bit, and words."""
    import torch

    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def refusals(calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...], str]]) -> list[str]:
    """The messages of the ValueErrors that (op, arguments, part of the message) raise."""
    messages = []
    for op, arguments, text in calls:
        with pytest.raises(ValueError, match=text) as refusal:
            op(*arguments)
        messages.append(str(refusal.value))
    return messages


PYTHON_KERNELS = """
import sys, importlib, torch
sys.path.insert(0, sys.argv[1])
for line in sys.stdin:
    calls, path = line.rstrip().split(" ", 1)
    module, function = calls.split(".")
    made = getattr(importlib.import_module(module), function)
    torch.manual_seed(5)
    torch.save(made(), path)
    print("done", flush=True)
"""


@pytest.fixture(scope="session")
def python_kernels() -> Iterator[subprocess.Popen[str]]:
    """A process where PyTorch's ops are Python functions over ctypes."""
    environment = {**os.environ, "BLOCKSPARSE_TORCH_KERNELS": "python"}
    command = [sys.executable, "-c", PYTHON_KERNELS, os.path.dirname(__file__)]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def with_python_kernels(python_kernels: subprocess.Popen[str], tmp_path: Path) -> Callable[[str], list[Any]]:
    """run("test_x.f") -> what f() returns where PyTorch's ops are Python functions over ctypes."""
    import torch

    def run(calls: str) -> list[Any]:
        assert python_kernels.stdin is not None
        assert python_kernels.stdout is not None
        python_kernels.stdin.write(f"{calls} {tmp_path / 'results.pt'}\n")
        python_kernels.stdin.flush()
        assert python_kernels.stdout.readline() == "done\n"
        results: list[Any] = torch.load(tmp_path / "results.pt")
        torch.manual_seed(5)
        return results

    return run
