"""The command line of `lm` before it has done anything: help, what is missing, how long it will take."""

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import run_forked, run_package
from tiny_language_models import SIZE, lm, sentences

import blocksparse
from blocksparse.__main__ import main
from blocksparse.models.bars import bytes_bar
from blocksparse.models.language.config import ModelConfig
from blocksparse.models.language.options import add_parser

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ["--updates", 12, "--batch", 8, "--steps", 16, "--lr", 4e-3, "--warmup", 4]


def commands():
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    found = parser._subparsers._group_actions[0].choices["lm"]._subparsers._group_actions[0].choices
    return found.items()


@pytest.mark.parametrize(("name", "command"), commands())
def test_every_option_has_help_and_a_default(name, command):
    for action in command._actions:
        says = action.help or ""
        assert says, (name, action.dest)
        takes_value = bool(action.option_strings) and action.nargs != 0
        if takes_value and not action.required:
            assert "default" in says, (name, action.dest)
    assert "None" not in command.format_help()


def test_help_needs_no_torch():
    code = "import sys, blocksparse.__main__ as m\ntry: m.main(['lm', 'train', '--help'])\n"
    code += "except SystemExit: sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "how often the weights are changed (default: 1000)" in re.sub(r"\s+", " ", done.stdout)


@pytest.mark.parametrize("package", ["torch", "safetensors"])
@pytest.mark.parametrize("words", [["--help"], [], ["train", "--text", "corpus.txt", "--out", "run"], ["eval", "-h"]])
def test_what_lm_needs_is_one_line(capsys, monkeypatch, package, words):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))
    assert main(["lm", *words]) == 2
    said = capsys.readouterr()
    assert said.err == "blocksparse: lm needs PyTorch and safetensors: pip install 'blocksparse[lm]'\n"
    assert said.out == ""


def test_what_the_front_end_of_torch_needs():
    code = "import sys; sys.modules['torch'] = None; import blocksparse.torch.linear"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = "ModuleNotFoundError: blocksparse.torch needs PyTorch: pip install 'blocksparse[torch]'"
    assert done.stderr.splitlines()[-1] == last
    assert "During handling" not in done.stderr


def test_what_tensorboard_needs_is_said_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (tmp_path / "text").write_bytes(sentences(600))
    words = ["--text", tmp_path / "text", "--out", tmp_path / "out", "--tensorboard", tmp_path / "board"]
    assert lm("train", *words, *SIZE, *HOW) == 2
    said = capsys.readouterr().err
    assert said == "blocksparse: --tensorboard needs TensorBoard: pip install 'blocksparse[tensorboard]'\n"
    assert not (tmp_path / "out").exists()


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"blocksparse {blocksparse.__version__}\n"


def test_the_script_and_the_extras_are_declared():
    tomllib = pytest.importorskip("tomllib")
    with open(os.path.join(os.path.dirname(__file__), "../../pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    assert project["scripts"] == {"blocksparse": "blocksparse.__main__:main"}
    assert {"torch", "lm", "tensorboard", "viz"} <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("stride", ["0", "65"])
def test_strides_are_of_units(tmp_path, capsys, stride):
    words = ["--text", str(Path(__file__)), "--out", str(tmp_path / "out"), "--hidden", "64", "--graph", "ba(8,2)"]
    assert main(["lm", "train", *words, "--stride", stride]) == 2
    assert f"[lm] stride is {stride}, needs 1 to 64, the units" in capsys.readouterr().err


def test_hidden_and_graph_belong_together(tmp_path, capsys):
    (tmp_path / "text").write_bytes(sentences(600))
    assert lm("train", "--text", tmp_path / "text", "--out", tmp_path / "out", "--hidden", 64) == 2
    said = capsys.readouterr().err
    assert "hidden is 64, but graph balanced(64,16,diagonal=1) in blocks of 8 makes 512" in said
    assert '--graph "ba(8,3)"' in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("graph", "suggested"), [("random(4,8,0.5)", "ba(2,1)"), ("ba(8,2)", "ba(2,1)")])
def test_what_is_suggested_works(graph, suggested):
    from blocksparse.models.language import LanguageModel

    with pytest.raises(ValueError, match=re.escape(f'--graph "{suggested}"')):
        LanguageModel(ModelConfig(hidden=16, graph=graph))
    LanguageModel(ModelConfig(hidden=16, graph=suggested))


def test_how_long_it_takes_is_said(tmp_path, capsys):
    (tmp_path / "text").write_bytes(sentences(600))
    words = ["train", "--text", tmp_path / "text", "--out", tmp_path / "out", *SIZE, *HOW]
    assert lm(*words) == 0
    assert re.search(r"12 updates take about \d+ s", capsys.readouterr().err)
    assert lm(*words, "--resume") == 0
    assert "take about" not in capsys.readouterr().err  # nothing is left to do


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
@pytest.mark.parametrize("loaded", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
def test_ctrl_c_while_importing_prints_no_traceback(loaded):
    """As soon as NumPy, or PyTorch, begins to be there."""
    command = [sys.executable, "-m", "blocksparse", "lm", "train", "--text", "none", "--out", "none"]
    running = subprocess.Popen(
        command, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    deadline = time.monotonic() + 60
    while loaded not in Path(f"/proc/{running.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[1].decode()
    assert said == "\nblocksparse: stopped\n"
    assert running.returncode == 130


def test_until_ctrl_c_is_quiet_little_is_imported():
    """For a Ctrl-C before that is a traceback."""
    path = os.path.join(os.path.dirname(blocksparse.__file__), "program.py")
    code = "import os, signal, sys; before = {*sys.modules}; exec(open(sys.argv[1]).read(), {'__name__': 'program'}); "
    code += "print({*sys.modules} - before - {'__future__'})"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


# ---- Progress --------------------------------------------------------------------------------------------------------


def test_progress_in_a_log_is_a_line_now_and_then(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with bytes_bar(100_000) as done:
        for count in range(100_000):
            now[0] += 0.01  # 1000 s
            done(count, "train 2.5")
    said = capsys.readouterr().err
    assert "\r" not in said
    lines = said.splitlines()
    assert 40 < len(lines) < 100
    assert re.fullmatch(r"\s*1% 1\.00k/100k \[00:10<16:\d\d, \S+B/s, train 2\.5\]", lines[0]), lines[0]


def test_a_short_run_has_no_bar_in_its_log(tmp_path):
    """Of a process whose standard error is a file: what is said, and nothing that a terminal alone can show."""
    (tmp_path / "text").write_bytes(sentences(600))
    words = ["train", "--text", tmp_path / "text", "--out", tmp_path / "out", *SIZE, *HOW, "--device", "cpu"]
    done = run_forked(run_package, "lm", *words)
    assert done.status == 0, done.stderr
    said = done.stdout + done.stderr
    assert "\r" not in said
    lines = said.splitlines()
    assert len(lines) == 3, lines
    assert "12 updates take about" in "".join(lines)
    assert not any("%|" in line for line in lines)
