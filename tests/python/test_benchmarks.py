import json
import os
import sys
from pathlib import Path

import pytest
from ranks import run_forked, run_program, run_script

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
    result = run_forked(run_program, code)
    assert result.stdout.splitlines()[-1:] == ["[0, 0, 1]"], result.stderr
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
        done = run_forked(run_script, BENCHMARKS / "conv.py", *sizes, "--json", path)
        assert done.status == 0, done.stderr
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [("header" in record) for record in lines] == [True, *[False] * 6]
    results = Results.read(path)
    assert set(results.header) >= {"device", "isa", "os", "library", "commit", "opponents", "samples", "date"}
    assert results.header["device"] == device()
    assert len(results.bench) == 3
    assert all({"out", "in", "density", "threads", "samples", "us"} <= set(r) for r in results.bench.values())


def test_convolutions_of_a_file_of_problems(tmp_path):
    pytest.importorskip("torch")
    problems, path = tmp_path / "problems.txt", tmp_path / "conv.jsonl"
    lines = ["conv:{fprop,wgrad} f32 n=1 hw=4 r=3 b=16 random(2,0.9)", "conv:fprop f32 n=1 hw=5 r=1 b=8 diagonal(2)"]
    problems.write_text("\n".join(lines))
    options = ["--repeats", "1", "--problems", problems, "--json", path]
    for _ in range(2):  # lines that are there are left alone
        done = run_forked(run_script, BENCHMARKS / "conv.py", *map(str, options))
        assert done.status == 0, done.stderr
    records = [json.loads(text) for text in path.read_text().splitlines()[1:]]
    passes = [f"conv:{which} f32 n=1" for which in ("fprop", "dgrad", "wgrad")]
    assert [r["problem"].partition(" threads")[0] for r in records] == [
        *(f"{which} hw=4 r=3 b=16 random(2,0.9)" for which in passes),
        *(f"{which} hw=5 r=1 b=8 diagonal(2)" for which in passes),
    ]
    assert all(set(r["vs"]) == {"onednn"} for r in records)
    problems.write_text("conv:fprop f32 n=1 hw=4 r=3 b=16 random(2,0.9) bias")
    done = run_forked(run_script, BENCHMARKS / "conv.py", *map(str, options))
    assert done.status != 0
    assert "needs conv:, f32, hw= and r=, not bias" in done.stderr
