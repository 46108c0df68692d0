"""How a script ends."""

import argparse
import subprocess
import sys

import pytest

from blocksparse.program import positive

SCRIPT = """
from blocksparse.program import finish

def main():
    {body}

finish(main, goes_on={goes_on})
"""


def ended(body: str, goes_on: bool = False) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body, goes_on=goes_on)], capture_output=True, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("raise ValueError('a is 1, needs 2')", 1, "error: a is 1, needs 2\n"),
        ("raise FileNotFoundError('no text')", 1, "error: no text\n"),
        ("import nothing_of_this_name", 1, "error: No module named 'nothing_of_this_name'\n"),
        ("raise FloatingPointError('diverged')", 1, "error: diverged\n"),
        ("raise KeyboardInterrupt", 130, "\nStopped.\n"),
    ],
)
def test_scripts_end_with_a_line(body, status, said):
    assert ended(body) == (status, said)


def test_faults_of_ours_keep_their_trace():
    status, said = ended("raise KeyError('a')")
    assert status == 1
    assert said.startswith("Traceback")


def test_long_work_says_that_it_goes_on():
    assert ended("raise KeyboardInterrupt", goes_on=True) == (130, "\nStopped. The same command goes on from here.\n")


def test_nobody_reads_on():
    """What is written behind what `| head` has taken."""
    body = "import time; print(1, flush=True); time.sleep(1); print(2)"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body, goes_on=False)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        assert script.stdout.readline() == "1\n"
        script.stdout.close()
        said = script.stderr.read()
    assert (script.returncode, said) == (141, "")


def test_positive_numbers(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=positive)
    assert parser.parse_args(["--steps", "3"]).steps == 3
    for given, message in (("0", "is 0, needs 1 or more"), ("-2", "is -2, needs 1 or more"), ("a", "invalid positive")):
        with pytest.raises(SystemExit):
            parser.parse_args(["--steps", given])
        assert f"error: argument --steps: {message}" in capsys.readouterr().err
