import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import report  # noqa: E402
from records import Problem, Results, device  # noqa: E402

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
