import os
import subprocess
import sys

import pytest

import blocksparse
from blocksparse.__main__ import main


def test_information(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert blocksparse.__version__ in text
    assert blocksparse.cpu_isa() in text


def test_a_front_end_that_does_not_work_says_why(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text('__version__ = "0.4.1"')  # without what it needs
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "blocksparse"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert "JAX               does not work: blocksparse.jax needs JAX 0.6 or newer, this is 0.4.1" in done.stdout
    assert "CuPy              " in done.stdout


def test_selftest(capsys):
    assert main(["selftest"]) == 0
    assert "right" in capsys.readouterr().out


def test_report(capsys):
    assert main(["report", "ws(40,4,0.2)"]) == 0
    assert "mean shortest path" in capsys.readouterr().out


@pytest.mark.parametrize("graph", ["ba(384,8)", "dense(2,5)", "random(1000,1200,0.01)"])
def test_plot(tmp_path, graph):
    path = tmp_path / "layout.png"
    assert main(["plot", graph, "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_saved_layout(tmp_path):
    blocksparse.Layout.from_graph("ba(30,3)", 16).save(tmp_path / "l.npz")
    assert main(["plot", str(tmp_path / "l.npz"), "-o", str(tmp_path / "l.svg")]) == 0
    assert "<svg" in (tmp_path / "l.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plot", "ba(4,8)"], "links is 8"),
        (["report", "nonsense"], "is no graph name"),
        (["plot", "nowhere.npz"], "nowhere.npz"),
        (["plot", "ba(8,2)", "-o", "/nowhere/at/all.png"], "/nowhere"),
    ],
)
def test_errors_are_one_line(capsys, arguments, text):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_whoever_has_seen_enough():
    command = f"{sys.executable} -m blocksparse report 'ws(40,4,0.2)' | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "L", "")


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_import_needs_numpy_alone():
    result = run(
        "import sys, blocksparse, blocksparse.numpy; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_isa_by_environment():
    code = "import blocksparse; print(blocksparse.cpu_isa())"
    assert run(code, BLOCKSPARSE_ISA="scalar").stdout.strip() == "scalar"
    wrong = run(code, BLOCKSPARSE_ISA="mmx")
    assert "ValueError" in wrong.stderr
    assert 'there is no "mmx"' in wrong.stderr
    missing = {"neon_bf16", "neon", "amx", "avx512_bf16", "avx512", "avx2"} - set(blocksparse.cpu_isas())
    for isa in missing:
        assert "this CPU does not run" in run(code, BLOCKSPARSE_ISA=isa).stderr


def test_a_missing_library_is_explained():
    result = run("import blocksparse", BLOCKSPARSE_LIBRARY="/nowhere/lib.so")
    assert "ImportError" in result.stderr
    assert "/nowhere/lib.so is missing" in result.stderr
