import os
import subprocess
import sys
import types

import numpy as np
import pytest
from test_benchmarks import BENCHMARKS, card_header, card_line, write

import report
from records import Problem, Results


@pytest.fixture
def gpu(monkeypatch):
    """The harness of the card, on the CPU and by its clock."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import gpu

    measure = gpu.measure
    monkeypatch.setattr(gpu, "measure", lambda *arguments: measure(*arguments, device="cpu"))
    captured = {"torch_dense": False}
    monkeypatch.setattr(gpu, "sampler_of", lambda c, rotate: (lambda: 1.5 + rotate, captured.get(c.name, True)))
    monkeypatch.setattr(gpu, "eager_us", lambda contender: 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "of a test")
    monkeypatch.setattr(gpu.blocksparse, "cuda_status", lambda: "")
    return gpu


def test_python_libraries_of_a_card(gpu, tmp_path, capsys, monkeypatch):
    problems = [
        "linear:fprop bf16 n=5 b=16 random(4,6,0.5) device=cuda",
        "linear:dgrad f32 n=5 b=16 random(4,6,0.3) x=first y=first device=cuda",
        "linear:dgrad f32 n=5 b=16 diagonal(4) device=cuda",
        "linear:wgrad f32 n=5 b=16 diagonal(4) device=cuda",
        "linear:fprop f32 n=5 b=16 random(4,6,0.5)",  # of the CPU
        "linear:fprop f32 n=5 b=16 random(4,6,0.5) bias device=cuda",
    ]
    records = [card_line(problem.removesuffix(" device=cuda"), 1, 2, 3, 4, 0.5) for problem in problems]
    for record, problem in zip(records, problems, strict=True):
        record["problem"] = problem
    path = write(tmp_path / "r.jsonl", card_header(), *records)
    monkeypatch.setitem(gpu.NEEDS, gpu.stk, "no_such_package")
    assert gpu.main([str(path), "--samples", "4"]) == 0
    said = capsys.readouterr().err
    assert said.count("without stk: No module named 'no_such_package'") == 1
    python = Results.read(path).python
    assert list(python) == problems[:4]
    first = python[problems[0]]
    assert (first["us"], first["us_hot"], first["samples"]) == (2.5, 1.5, 4)
    assert set(first["vs"]) >= {"torch_dense"}
    assert first["us_eager"]["blocksparse_torch"] == 7
    assert first["without"]["torch_bmm"] == "block-diagonal layouts only"
    assert "stk" not in first["without"]
    assert first["notes"]["torch_dense"] == "plain launches: no graph holds it"
    for problem in problems[2:4]:  # whose results were checked
        assert set(python[problem]["vs"]) >= {"torch_dense", "torch_bmm"}
    assert report.main([str(path)]) == 0
    once = path.read_text()
    assert gpu.main([str(path)]) == 0
    assert path.read_text() == once
    assert gpu.main([str(write(tmp_path / "other.jsonl", card_header(device="cuda: another")))]) == 1


def test_a_harness_goes_on_after_a_failure(gpu, tmp_path, capsys, monkeypatch):
    problems = [f"linear:fprop f32 n={n} b=16 random(4,6,0.5)" for n in (5, 6)]
    path = write(tmp_path / "r.jsonl", card_header(), *(card_line(problem, 1, 2, 3, 4, 0.5) for problem in problems))
    measure = gpu.measure

    def fail_once(problem, *arguments):
        if problem.n == 5:
            raise RuntimeError("out of memory")
        return measure(problem, *arguments)

    monkeypatch.setattr(gpu, "measure", fail_once)
    assert gpu.main([str(path), "--without", "torch_bsr"]) == 1
    assert f"{problems[0]} device=cuda: out of memory" in capsys.readouterr().err
    python = Results.read(path).python
    assert list(python) == [f"{problems[1]} device=cuda"]
    assert "torch_bsr" not in str(python)
    monkeypatch.setattr("common.alive", lambda problem: False)
    assert gpu.main([str(path)]) == 1
    assert "is of no more use" in capsys.readouterr().err


def test_a_harness_needs_its_card(gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([str(tmp_path / "r.jsonl")]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_a_wrong_result_is_found(gpu):
    data = gpu.Data(Problem.parse("linear:fprop f32 n=5 b=16 random(4,6,0.5)"))
    right = data.x @ data.dense.T
    data.check(right)
    with pytest.raises(ValueError, match="relative error"):
        data.check(right + 0.01)
    with pytest.raises(ValueError, match="shape"):
        data.check(right[:4])
    turned = gpu.Data(Problem.parse("linear:dgrad f32 n=5 b=16 random(4,6,0.5)"))
    layout, values = turned.blocks()
    assert np.array_equal(layout.to_dense(values.numpy()), turned.dense.T.numpy())


class TooLargeError(Exception):
    """As Triton says that a shape needs more shared memory than there is."""


def test_the_fastest_shape_of_plain_kernels(gpu, monkeypatch):
    data = gpu.Data(Problem.parse("linear:fprop f32 n=5 b=16 random(4,6,0.5)"))
    result = data.x.new_empty(5, 64)

    def too_large(i):
        raise TooLargeError

    def shape(note, run):
        return gpu.Contender(run, 3, note)

    right = [shape(note, lambda i: result.copy_(data.x @ data.dense.T)) for note in ("a", "b", "c", "d")]
    shapes = [shape("too large", too_large), *right]
    plain = types.SimpleNamespace(candidates=lambda data, rotate: shapes)
    monkeypatch.setitem(sys.modules, "triton_plain", plain)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(OutOfResources=TooLargeError))
    us = {"a": (9, 1), "b": (2, 8), "c": (4, 7), "d": (6, 5)}  # in cache, from memory: of the best three, d is tried
    monkeypatch.setattr(gpu, "tuning_us", lambda shape, rotate: us[shape.note][rotate])
    best = gpu.triton_plain(data, 0)
    assert (best.note, best.copies) == ("d, in cache b", 3)
    assert (best.run, best.run_hot) == (right[3].run, right[1].run)
    shapes.append(shape("writes nothing", lambda i: result))  # of what another shape has written
    with pytest.raises(ValueError, match="relative error nan"):
        gpu.triton_plain(data, 0)
    shapes[1:] = []
    with pytest.raises(ValueError, match="no shape fits"):
        gpu.triton_plain(data, 0)


def test_plain_kernels_in_triton_s_interpreter():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    # A process of its own, for it is interpreted what is imported while the variable is set. Without bf16, whose
    # products the interpreter gets wrong; groups of 32 tiles from 1024 tokens on.
    code = f"""
import sys
sys.path[:0] = [{str(BENCHMARKS / "peers")!r}, {str(BENCHMARKS)!r}]
import triton_plain
from common import Data
from records import Problem
for which in ("fprop", "dgrad", "wgrad"):
    for sizes in ("n=1 b=16 random(3,4,0.6)", "n=70 b=32 random(3,4,0.6)", "n=1030 b=16 random(4,2,0.3)"):
        data = Data(Problem.parse(f"linear:{{which}} f16 {{sizes}}"))
        for shape in triton_plain.candidates(data, 1 << 13):
            shape.run(0).fill_(float("nan"))
            data.check(shape.run(shape.copies - 1))
            print(which, sizes, shape.note)
"""
    alone = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=alone)
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("Triton's interpreter does not work with this NumPy")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 30


def test_plain_convolutions_in_triton_s_interpreter():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    # As above, with f16. Taps beyond the last, ragged tiles, strides, 1 x 1, and pixels in parts.
    code = f"""
import sys
sys.path[:0] = [{str(BENCHMARKS / "peers")!r}, {str(BENCHMARKS)!r}]
import torch
import conv
conv.dtype_on = lambda device: torch.float16
for kernel, size, stride, b, graph in ((3, 5, 1, 16, "random(2,2,0.7)"), (3, 5, 2, 32, "diagonal(2)"),
                                       (1, 8, 1, 64, "diagonal(1)")):
    case = conv.Case(conv.Setting(3, size, b * int(graph.split("(")[1][0]), kernel, stride, False), b, graph, 1)
    problem = conv.Problem(case, "cpu")
    for which, want in zip(conv.PASSES, problem.expected()):
        for candidate in problem.plain(which)[:: 1 if b == 16 else 3]:
            candidate.result.fill_(float("nan"))
            problem.check(which, candidate.run(), want)
            print(which, case.setting.line, candidate.note)
"""
    alone = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=alone)
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("Triton's interpreter does not work with this NumPy")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 35
    assert "parts=2" in result.stdout


def test_a_card_s_file_begins_with_problems(gpu, tmp_path, monkeypatch):
    problems = tmp_path / "problems.txt"
    problems.write_text("linear:{fprop,wgrad} f32 n=5 b=16 random(4,6,0.5)\n")
    monkeypatch.setattr(gpu.machine, "header", lambda on_card, samples, opponents: card_header(samples=samples))
    path = tmp_path / "r.jsonl"
    assert gpu.main([str(path), "--problems", str(problems), "--samples", "4"]) == 0
    results = Results.read(path)
    assert (results.header["samples"], results.header["rotate_mb"], results.bench) == (4, 256, {})
    lines = [f"linear:{which} f32 n=5 b=16 random(4,6,0.5) device=cuda" for which in ("fprop", "wgrad")]
    assert list(results.python) == lines
    assert (results.python[lines[0]]["out"], results.python[lines[0]]["in"]) == (64, 96)
    once = path.read_text()
    assert gpu.main([str(path), "--problems", str(problems)]) == 0
    assert path.read_text() == once
    assert gpu.main([str(path), "--problems", str(tmp_path / "none.txt")]) == 1


def test_launches(gpu):
    assert gpu.launches_of(1.0, 1) == 500
    assert gpu.launches_of(0.5, 2000) == 2000  # each copy has its turn
    assert gpu.launches_of(1e3, 1) == 4
    assert gpu.launches_of(1e3, 400) == 20  # but not for very long
    assert gpu.launches_of(1e5, 400) == 4
    assert gpu.launches_of(1.0, 1, 100) == 100
