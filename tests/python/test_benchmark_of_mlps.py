"""The program that times feed-forward parts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def mlps():
    pytest.importorskip("torch")
    import mlp

    return mlp


@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_the_mlp_beside_the_dense_one(mlps, capsys, monkeypatch, plain):
    import torch

    threads = torch.get_num_threads()
    sizes = ["--sizes", "32x48", "40x96", "--tokens", "3", "--block", "8", "--density", "0.5"]
    how = ["--dtype", "float64", "--repeats", "2", "--threads", "1", "--ways", "ours", "separate", "dense", *plain]
    monkeypatch.setattr(mlps, "COLD_BYTES", 1 << 12)
    monkeypatch.setattr(sys, "argv", ["mlp.py", *sizes, *how])
    try:
        mlps.main()
    finally:
        torch.set_num_threads(threads)
        torch.set_default_device(None)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| 32 x", "| 40 x"))]
    assert [row[2] for row in rows] == ["inference", "training"] * 2
    assert all(float(row[i].removesuffix(" |")) > 0 for row in rows for i in range(3, 7))


def test_a_wrong_mlp_is_found(mlps, monkeypatch):
    import torch

    case = mlps.Case(32, 48, 3, 0.5, 8, torch.float32, False)
    made = mlps.make(case, 1)
    mlps.check(case, made["ours"][0])
    x = torch.randn(3, 32)
    torch.testing.assert_close(made["separate"][0](x), made["ours"][0](x))
    monkeypatch.setattr(made["ours"][0], "forward", lambda x: 1.01 * made["separate"][0](x))
    with pytest.raises(ValueError, match="results differ"):
        mlps.check(case, made["ours"][0])
