import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "name",
    [
        "linear_torch.py",
        "linear_numpy.py",
        "conv_torch.py",
        "mlp_torch.py",
        "matmul_2017.py",
        "prune_torch.py",
        "keras_digits.py",
    ],
)
def test_runs(name, tmp_path, monkeypatch):
    if name == "prune_torch.py":
        pytest.importorskip("safetensors")
    if name == "keras_digits.py":
        pytest.importorskip("keras")
        pytest.importorskip("sklearn")
        monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.chdir(tmp_path)  # for what examples write
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_readme_shows_the_examples():
    subprocess.run([sys.executable, ROOT / "scripts" / "check_readme.py"], check=True)
