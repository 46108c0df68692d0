"""How a script ends."""

import subprocess
import sys

import pytest

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
