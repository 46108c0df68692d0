"""The example of examples/fashion_mnist: its data, its networks, a little training, its picture."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "fashion_mnist"))

from fashion import data, pictures, training  # noqa: E402
from fashion.network import ARMS, multiply_adds  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_idx(folder, part, images, labels):
    for name, array in (("images", images), ("labels", labels)):
        head = bytes((0, 0, 8, array.ndim)) + np.asarray(array.shape, ">i4").tobytes()
        path = folder / f"{part}-{name}-idx{array.ndim}-ubyte.gz"
        path.write_bytes(gzip.compress(head + array.tobytes()))


def some(n, *shape):
    rng = np.random.default_rng(n)
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.integers(0, 10, n, np.uint8)


def test_fashion_files(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FASHION", tmp_path)
    with pytest.raises(data.DataError, match=r"is missing.*make fashion"):
        data.load(None)
    parts = {"train": some(50, 28, 28), "t10k": some(20, 28, 28)}
    for part, arrays in parts.items():
        write_idx(tmp_path, part, *arrays)
    name, train, test = data.load(None)
    assert name == "Fashion-MNIST"
    assert train.pixels.shape == (50, 1, 28, 28)
    assert test.classes.tolist() == parts["t10k"][1].tolist()
    assert abs(train.pixels.mean()) < 1e-5
    assert abs(train.pixels.std() - 1) < 1e-3
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(data.DataError, match="is no file of 1 sizes"):
        data.load(None)
    path.write_bytes(b"no gzip")
    with pytest.raises(data.DataError, match="labels-idx1"):
        data.load(None)


def test_cifar_in_three_forms(tmp_path):
    parts = {"data_batch_1": some(6, 3072), "data_batch_2": some(5, 3072), "test_batch": some(4, 3072)}
    for folder in ("pickled", "binary", "pictures"):
        (tmp_path / folder).mkdir()
    image = pytest.importorskip("PIL.Image")
    for name, (pixels, classes) in parts.items():
        batch = {b"data": pixels, b"labels": classes.tolist()}
        (tmp_path / "pickled" / name).write_bytes(pickle.dumps(batch, protocol=2))
        (tmp_path / "binary" / f"{name}.bin").write_bytes(np.column_stack([classes, pixels]).tobytes())
        for i, row in enumerate(pixels):
            folder = tmp_path / "pictures" / ("test" if "test" in name else "train") / str(classes[i])
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{name}{i}.png")
    forms = [data.load(tmp_path / folder)[1:] for folder in ("pickled", "binary", "pictures")]
    for train, test in forms:
        assert train.pixels.shape == (11, 3, 32, 32)
        assert test.pixels.shape == (4, 3, 32, 32)
    assert torch.equal(forms[0][0].pixels, forms[1][0].pixels)
    assert torch.equal(forms[0][1].classes, forms[1][1].classes)
    sums = [form[0].pixels.sum((1, 2, 3)).sort().values for form in forms]  # pictures are sorted by their classes
    torch.testing.assert_close(sums[0], sums[2], rtol=1e-3, atol=0.1)


def test_what_is_no_cifar(tmp_path):
    with pytest.raises(data.DataError, match="holds neither data_batch"):
        data.load(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(data.DataError, match="has no test_batch"):
        data.load(tmp_path)
    (tmp_path / "test_batch").write_bytes(b"")
    with pytest.raises(data.DataError, match="which no batch of CIFAR-10 does"):
        data.load(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": 1}))
    with pytest.raises(data.DataError, match="is no batch of CIFAR-10"):
        data.load(tmp_path)


def test_arms_cost_as_much():
    image = torch.randn(1, 28, 28)
    costs = {name: multiply_adds(training.start(arm, image)[1], image) for name, arm in ARMS.items()}
    assert max(costs.values()) < 1.06 * min(costs.values())
    dense = costs["dense"]
    assert dense == 4 * 9 * 64 * 64 * 49 + 25 * 64 * 196 + 640


@pytest.mark.parametrize("name", ARMS)
def test_a_little_training(name, tmp_path):
    torch.manual_seed(0)
    classes = torch.arange(256) % 4  # stripes one way, the other way, both, none
    pixels = 0.3 * torch.randn(256, 1, 12, 12)
    pixels[classes % 2 == 1, :, ::2] += 2
    pixels[classes > 1, :, :, ::2] += 2
    images = data.Images(pixels.to(memory_format=torch.channels_last), classes)
    curve, network = training.start(ARMS[name].smaller(), images.pixels[0])
    told = []
    training.train(curve, network, (images, images), epochs=10, advance=told.append)
    assert len(told) == 20
    assert len(curve.accuracies) == training.TESTS
    assert curve.finished
    assert curve.losses[-1][1] < 0.5 * curve.losses[0][1]
    assert curve.accuracies[-1][1] > 0.8
    assert f"{curve.accuracies[-1][1]:.2%}" in pictures.table([curve])
    pictures.draw([curve], "stripes", tmp_path / "curves.png")
    curve.accuracies.clear()  # as where training was stopped early
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures.draw([curve], "stopped", tmp_path / "stopped.png")
    assert (tmp_path / "curves.png").stat().st_size > 10000


@pytest.mark.skipif(not data.FASHION.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_program(tmp_path, monkeypatch, capsys):
    main = runpy.run_path(str(ROOT / "examples" / "fashion_mnist" / "train.py"))["main"]
    command = ["train.py", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--epochs", "0.2", "--arms", "dense", "deep"])
    assert main() == 0
    assert (tmp_path / "curves.png").exists()
    assert re.search(r"deep +32 +8 +50%", capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", [*command, "--data", str(tmp_path)])
    assert main() == 1
    assert capsys.readouterr().err.startswith("error: ")
