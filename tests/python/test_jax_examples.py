"""The examples for JAX run, and learn."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_linear():
    runpy.run_path(str(EXAMPLES / "linear_jax.py"), run_name="__main__")


def test_language_model(monkeypatch, tmp_path, capsys):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    program = runpy.run_path(str(EXAMPLES / "lm_jax.py"), run_name="lm_jax")
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    monkeypatch.setattr(sys, "argv", ["lm_jax.py", "--text", str(text), "--steps", "30"])
    assert program["main"]() < 4.0  # bits a byte; 8 at first, 4.3 by the frequencies of bytes alone
    assert "def " in capsys.readouterr().out  # a sample
    text.write_bytes(b"short")
    with pytest.raises(SystemExit):
        program["main"]()
