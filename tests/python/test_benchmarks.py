import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import report  # noqa: E402
from records import Problem, Results, device, problems_of  # noqa: E402

DEVICE = "cpu: of a test"


def header(**others):
    opponents = {"openblas": "1.0", "onednn": "2.0", "libxsmm": "3"}
    return {
        "header": 1,
        "device": DEVICE,
        "isa": "avx2",
        "processors": sorted(os.sched_getaffinity(0)),
        "os": "Linux",
        "compiler": "GCC",
        "library": "0.1.0",
        "commit": "abc",
        "opponents": opponents,
        "budget_s": 0.05,
        "rotate_mb": 1,
        "date": "2026-01-02T03:04:05Z",
        **others,
    }


def line(problem, us, openblas, onednn, libxsmm, density):
    times = {"openblas": openblas, "onednn": onednn, "libxsmm": libxsmm}
    return {
        "problem": problem,
        "out": 1024,
        "in": 1024,
        "density": density,
        "us": us,
        "us_hot": us / 2,
        "gflops": 10.0,
        "peak_fraction": 0.25,
        "roofline_fraction": 0.5,
        "vs": {name: us for name, us in times.items() if us is not None},
    }


def write(path, *records, end=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return path


def test_problem():
    p = Problem.parse("linear:wgrad bf16 n=512 b=16 ba(64,4) seed=3 threads=2 x=first bias")
    assert (p.op, p.direction, p.dtype, p.graph) == ("linear", "wgrad", "bf16", "ba(64,4)")
    assert (p.n, p.block, p.seed, p.threads) == (512, 16, 3, 2)
    assert p.order == "x features-first"
    assert p.others == ["bias"]
    assert Problem.parse("linear:fprop random(4,0.5)").order == "features-last"


@pytest.mark.parametrize(
    "text", ["", "fprop f32 random(4,0.5)", "linear:fprop f32 n=4", "linear:fprop n=x random(4,1)"]
)
def test_what_is_no_problem(text):
    with pytest.raises(ValueError, match=r"needs to begin|names no graph|invalid literal"):
        Problem.parse(text)


def test_a_file_of_problems(tmp_path):
    path = tmp_path / "problems.txt"
    path.write_text("# two and one\n\nlinear:{fprop,wgrad} f32 random(4,{0.5})\nlinear:fprop n=1 random(4,1)\n")
    both = [f"linear:{which} f32 random(4,0.5)" for which in ("fprop", "wgrad")]
    assert problems_of(path) == [*both, "linear:fprop n=1 random(4,1)"]


def test_unfinished_line_does_not_count(tmp_path):
    one = line("linear:fprop f32 n=64 b=32 random(32,0.10)", 100, 500, 400, 90, 0.1)
    python = {"by": "peers/cpu.py", "problem": one["problem"], "us": 110, "vs": {}}
    results = Results.read(write(tmp_path / "r.jsonl", header(), one, python, end='{"problem": "linear:fp'))
    assert list(results.bench) == list(results.python) == [one["problem"]]
    assert results.header["isa"] == "avx2"


def test_a_file_needs_a_header(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", line("linear:fprop f32 n=64 b=32 random(32,0.10)", 1, 2, 3, 4, 0.1))
    assert report.main([str(path)]) == 1
    assert "does not begin with a header" in capsys.readouterr().err


def test_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records = []
    for direction in ("fprop", "dgrad", "wgrad"):
        for block, density in ((8, 0.1), (8, 0.5), (32, 0.1), (32, 0.5)):
            problem = f"linear:{direction} f32 n=64 b={block} random({1024 // block},{density})"
            records.append(line(problem, 1000 * density, 1200, 900, 120, density))
    records.append(line(records[0]["problem"] + " threads=2", 80, None, None, None, 0.1))
    records.append(line("linear:fprop f32 n=64 b=8 ba(128,8)", 240, None, None, None, 0.12))
    records.append(line("linear:fprop f32 n=64 b=8 balanced(128,12)", 160, None, None, None, 0.1))
    python = {"by": "peers/cpu.py", "problem": records[0]["problem"], "us": 110, "versions": {"torch": "2.13"}}
    records.append({**python, "vs": {"torch_dense": 55, "blocksparse_torch": 100}})
    path = write(tmp_path / "r.jsonl", header(), *records)
    assert report.main([str(path), "--output", str(tmp_path / "page")]) == 0
    written = [Path(name) for name in capsys.readouterr().out.split()]
    assert [p.name for p in written] == ["r.md", "r-speed-up.png", "r-roofline.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written[1:])
    text = written[0].read_text()
    # 100 us against 900 of the faster library: 9 times as fast, 1.11 times density times its time; LIBXSMM is faster
    # at 50 %.
    row = "| fprop | `random(128,0.1)` | 8 | 10 % | 100 | 900 | onednn | 9 | 1.11 | 120 | 1.2 | 10 | 25 % | 50 % |"
    assert row in text
    assert "| 500 | 900 | onednn | 1.8 | 1.11 | 120 | **0.24** |" in text
    assert f"| `{records[0]['problem']} threads=2` | 1.25 | 1.25 |" in text
    assert "| `linear:fprop f32 n=64 b=8 ba(128,8)` | `balanced(128,12)` | 1.25 | 1.25 |" in text
    assert "| 100 (0.909) | 55 (**0.5**) |" in text


def test_report_of_convolutions(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records = []
    for setting in ("hw=28x28 r=3x3", "hw=28x28 r=3x3 first", "hw=56x56 r=3x3 stride=2x2"):
        for density, us in ((0.1, 100), (0.25, 200), (0.5, 450), (0.75, 700)):
            problem = f"conv:fprop f32 n=8 {setting} b=32 random(8,{density})"
            records.append({**line(problem, us, None, 800, None, density), "out": 256, "in": 256})
    grouped = "conv:fprop f32 n=8 hw=28x28 r=3x3 b=32 diagonal(8)"
    records.append({**line(grouped, 90, None, 80, None, 0.125), "out": 256, "in": 256})
    path = write(tmp_path / "r.jsonl", header(), *records)
    assert report.main([str(path)]) == 0
    assert "r-speed-up.png" in capsys.readouterr().out
    text = (tmp_path / "r.md").read_text()
    for name in (
        "256 x 256 channels, hw=28x28 r=3x3, 8 images, f32, channels-last, 1 thread",
        "256 x 256 channels, hw=28x28 r=3x3, 8 images, f32, contiguous, 1 thread",
        "256 x 256 channels, hw=56x56 r=3x3 stride=2x2, 8 images, f32, channels-last, 1 thread",
    ):
        assert text.count(f"### {name}\n") == 1
    assert "| fprop | `random(8,0.25)` | 32 | 25 % | 200 | 800 | onednn | 4 | 1 | 10 | 25 % | 50 % |" in text
    assert "| `diagonal(8)` | 32 | 12.5 % | 90 | 80 | onednn, grouped | **0.889** |  | 10 |" in text
    assert "LIBXSMM" not in text.partition("## In short")[2]


def test_report_of_lines_that_tell_little(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    problems = [f"conv:fprop bf16 n=64 hw=28 r=3 b=32 random(8,16,{d}) device=cuda" for d in (0.1, 0.25, 0.5, 0.7)]
    records = [{"problem": problem, "us": 50, "vs": {"cudnn": 80}} for problem in problems]
    grouped = {
        "problem": "conv:fprop bf16 n=64 hw=28 r=3 b=32 diagonal(8,2) device=cuda",
        "us": 50,
        "vs": {"cudnn": 80},
    }
    head = {"header": 1, "device": CARD, "cuda": "13.0", "library": "0.1.0", "commit": "", "opponents": {"cudnn": "9"}}
    path = write(tmp_path / "r.jsonl", {**head, "date": "2026-01-02"}, *records, grouped)
    assert report.main([str(path)]) == 0
    assert [Path(p).name for p in capsys.readouterr().out.split()] == ["r.md", "r-speed-up.png"]
    text = (tmp_path / "r.md").read_text()
    assert "### 256 x 512 channels, hw=28 r=3, 64 images, bf16, channels-last\n" in text
    assert "| fprop | `random(8,16,0.25)` | 32 | 25 % | 50 | 80 | cudnn | 1.6 | 2.5 |" in text
    assert "| `diagonal(8,2)` | 32 | 25 % | 50 | 80 | cudnn, grouped | 1.6 |  |" in text


def test_report_of_few_problems_has_no_curves(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "r.jsonl", header(), line("linear:fprop bf16 n=1 b=8 ba(8,2)", 1, None, None, None, 0.4))
    assert report.main([str(path)]) == 0
    assert "r-speed-up.png" not in capsys.readouterr().out


def test_python_libraries_are_added_once(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    problems = [
        "linear:fprop f32 n=5 b=8 random(4,6,0.5)",
        "linear:dgrad f32 n=5 b=8 random(4,6,0.5) x=first y=first",
        "linear:dgrad f32 n=5 b=8 random(4,6,0.5)",
        "linear:wgrad f32 n=5 b=8 random(4,6,0.5) x=first",
        "linear:fprop bf16 n=5 b=8 random(4,6,0.5)",
        "linear:fprop f32 n=5 b=8 random(4,6,0.5) bias",  # which is not theirs to do
    ]
    records = [line(problem, 1, 2, 3, 4, 0.5) for problem in problems]
    path = write(tmp_path / "r.jsonl", header(device=device()), *records)
    once = tmp_path / "once.jsonl"
    elsewhere = write(tmp_path / "elsewhere.jsonl", header())
    # A process of its own, for it pins its threads: a run, the same again, and one for another machine.
    code = f"""
import shutil, sys
sys.path.insert(0, {str(BENCHMARKS / "peers")!r})
import cpu
codes = [cpu.main([{str(path)!r}, "--samples", "1"])]
shutil.copy({str(path)!r}, {str(once)!r})
codes += [cpu.main([{str(path)!r}]), cpu.main([{str(elsewhere)!r}])]
print(codes)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[0, 0, 1]", result.stderr
    assert f"is of {DEVICE}, this is cpu" in result.stderr
    assert path.read_text() == once.read_text()
    python = Results.read(path).python
    assert list(python) == problems[:-1]
    assert set(python[problems[0]]["vs"]) == {"blocksparse_torch", "torch_dense", "torch_bsr", "scipy_bsr"}
    assert set(python[problems[1]]["vs"]) == {"blocksparse_torch", "torch_dense", "torch_bsr", "scipy_bsr"}
    assert set(python[problems[2]]["vs"]) == {"blocksparse_torch", "torch_dense", "torch_bsr", "scipy_bsr"}
    assert set(python[problems[3]]["vs"]) == {"blocksparse_torch", "torch_dense"}
    assert python[problems[4]]["front"] == "blocksparse_torch"


# ---- a card, without one

CARD = "cuda: of a test"


def card_header(**others):
    card = {"driver": "580.1", "cuda": "13.0", "compute_capability": "9.0", "host": "a CPU"}
    opponents = {"cublas": "13.1", "cusparse_bsr": "12.6", "cusparse_ell": "12.6"}
    return {**header(device=CARD), **card, "opponents": opponents, **others}


def card_line(problem, us, cublas, bsr, ell, density, notes=()):
    times = {"cublas": cublas, "cusparse_bsr": bsr, "cusparse_ell": ell}
    vs = {name: us for name, us in times.items() if us is not None}
    return {**line(problem + " device=cuda", us, None, None, None, density), "vs": vs, "notes": dict(notes)}


def test_products_in_tf32_are_beside_dense_ones_in_tf32(tmp_path):
    pytest.importorskip("matplotlib")
    problem = "linear:fprop f32 n=32 b=32 random(32,0.1)"
    exact, rounded = (card_line(problem + more, 10, 80, None, None, 0.1) for more in ("", " tf32"))
    for record in (exact, rounded):
        record["vs"]["cublas_tf32"] = 20
    path = write(tmp_path / "r.jsonl", card_header(), exact, rounded)
    assert report.main([str(path)]) == 0
    text = (tmp_path / "r.md").read_text()
    _, of_f32, of_tf32 = text.split("### 1024 x 1024, N = 32, ")
    assert of_f32.startswith("f32")
    assert "| 10 | 80 | cublas | 8 |" in of_f32
    assert of_tf32.startswith("tf32")
    assert "| 10 | 20 | cublas_tf32 | 2 |" in of_tf32


def test_report_of_a_card(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records = []
    for direction in ("fprop", "dgrad", "wgrad"):
        for block, density in ((8, 0.1), (8, 0.5), (32, 0.1), (32, 0.5)):
            for n in (32, 4096):
                problem = f"linear:{direction} bf16 n={n} b={block} random({1024 // block},{density})"
                records.append(card_line(problem, 100 * density, 80, 400, 20, density))
    hubs = "linear:fprop bf16 n=32 b=32 ba(384,8)"
    records.append(card_line(hubs, 12, 80, 300, 6, 0.044, {"cusparse_ell": "padded from 6456 to 40000 blocks"}.items()))
    records.append(card_line("linear:fprop bf16 n=32 b=32 balanced(384,17)", 8, 80, 300, 9, 0.044))
    records.append(card_line("linear:fprop bf16 n=32 b=32 random(384,0.044)", 10, 80, 300, 9, 0.044))
    python = {"by": "peers/gpu.py", "problem": records[0]["problem"], "us": 10, "versions": {"torch": "2.13"}}
    records.append({**python, "vs": {"torch_dense": 80}, "us_eager": {"blocksparse_torch": 20, "torch_dense": 85}})
    path = write(tmp_path / "r.jsonl", card_header(), *records)
    assert report.main([str(path)]) == 0
    assert capsys.readouterr().out.split()[1:] == [str(tmp_path / f"r-{name}.png") for name in ("speed-up", "roofline")]
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("# of a test, 2026-01-02\n")
    assert "Linux, driver 580.1, CUDA 13.0. cublas 13.1, cusparse_bsr 12.6" in text
    assert "### 1024 x 1024, N = 32, bf16, features-last\n" in text
    assert "| fprop | `random(128,0.1)` | 8 | 10 % | 10 | 80 | cublas | 8 | 1.25 | 20 (ELL) | 2 |" in text
    assert "| 12 | 80 | cublas | 6.67 | 3.41 | 6 (ELL, padded) | **0.5** |" in text
    assert f"| `{hubs} device=cuda` | `balanced(384,17)` | 1.5 | 1.5 |" in text
    assert f"| `{hubs} device=cuda` | `random(384,0.044)` | 1.2 | 1.2 |" in text
    assert f"| `{records[0]['problem']}` | 10 | 80 (8) |" in text
    assert f"| `{records[0]['problem']}` | 20 | 85 |" in text
    assert text.index("Up to 64 tokens.") < text.index("More tokens.")


def test_report_of_plain_kernels(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records = []
    for direction, graph in (("fprop", "random(32,0.1)"), ("wgrad", "random(32,0.1)"), ("fprop", "ba(32,3)")):
        for n, plain in ((64, 8), (256, 24)):
            times = {"us": 10, "us_hot": 8, "vs": {"triton_plain": plain}, "vs_hot": {"triton_plain": 12}}
            problem = f"linear:{direction} bf16 n={n} b=32 {graph} device=cuda"
            records.append({"by": "peers/gpu.py", "problem": problem, **times, "versions": {"triton": "3"}})
            records[-1] |= {"out": 1024, "in": 1024, "density": 0.1}
    path = write(tmp_path / "r.jsonl", card_header(), *records)  # without lines of blocksparse-bench
    assert report.main([str(path)]) == 0
    written = [Path(name) for name in capsys.readouterr().out.split()]
    assert [p.name for p in written] == ["r.md", "r-plain.png"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    text = written[0].read_text()
    assert "| fprop | 32 | 4 | 1.39x | 0.80x | 2 | 1.50x | 1.50x | 0 |" in text
    assert "| all |  | 6 | 1.39x | 0.80x | 3 | 1.50x | 1.50x | 0 |" in text
    assert "1024 x 1024, bf16, from memory / in cache.\n\n| pass | layout | b | density | N = 64 | N = 256 |\n" in text
    assert "| wgrad | `random(32,0.1)` | 32 | 10 % | **0.8** / 1.5 | 2.4 / 1.5 |" in text
    assert f"| `{records[0]['problem']}` | 10 | 8 (**0.8**) |" in text
    assert "## In short" not in text


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


@pytest.fixture
def norms():
    pytest.importorskip("torch")
    import norm

    return norm


def test_the_norm_beside_pytorch(norms, capsys, monkeypatch):
    import torch

    threads = torch.get_num_threads()
    sizes = ["--features", "8", "33", "--batch", "3", "--dtype", "float64", "--repeats", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["norm.py", *sizes])
    try:
        norms.main()
    finally:
        torch.set_num_threads(threads)
        torch.set_default_device(None)
    said = capsys.readouterr().out
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| 3 |")]
    assert [(int(row[1]), row[2]) for row in rows] == [(h, kind) for h in (8, 33) for kind in norms.KINDS]
    assert all(float(row[i]) > 0 for row in rows for i in (3, 4, 6, 7))


@pytest.mark.parametrize("kind", ["norm", "* m", "+ a, relu", "gates"])
def test_a_wrong_norm_is_found(norms, kind, monkeypatch):
    import torch

    case = norms.Case(kind, 5, 40, torch.float32)
    norms.check(case)
    forward, ours, torchs = case.torch(), case.inputs(True), case.inputs(False)
    dy = torch.randn_like(forward)
    for got, want in zip(
        torch.autograd.grad(case.ours(), ours, dy), torch.autograd.grad(forward, torchs, dy), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(case, "ours", lambda: forward + 0.01)
    with pytest.raises(ValueError, match="results differ"):
        norms.check(case)


def test_convolutions_begin_a_file_with_the_machine(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "conv.jsonl"
    sizes = ["--images", "1", "--size", "4", "--channels", "32", "--block", "16", "--density", "0.5", "--repeats", "1"]
    for _ in range(2):  # a file that is there goes on
        program = [sys.executable, str(BENCHMARKS / "conv.py"), *sizes, "--json", str(path)]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other are slow where others work
        subprocess.run(program, capture_output=True, text=True, check=True, env=alone)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [("header" in record) for record in lines] == [True, *[False] * 6]
    results = Results.read(path)
    assert set(results.header) >= {"device", "isa", "os", "library", "commit", "opponents", "samples", "date"}
    assert results.header["device"] == device()
    assert len(results.bench) == 3
    assert all({"out", "in", "density", "threads", "samples", "us"} <= set(r) for r in results.bench.values())
