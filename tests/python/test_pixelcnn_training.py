"""Training a PixelCNN++: it learns, goes on where it stopped, bit for bit, and loses nothing."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
PIL = pytest.importorskip("PIL.Image")

from test_distributed import two  # noqa: E402

from blocksparse.__main__ import main  # noqa: E402
from blocksparse.models import checkpoint  # noqa: E402
from blocksparse.models.loop import train  # noqa: E402
from blocksparse.models.memory import memory_errors  # noqa: E402
from blocksparse.models.pixelcnn import data, layouts, training  # noqa: E402
from blocksparse.models.pixelcnn.adam import Adam  # noqa: E402
from blocksparse.models.pixelcnn.config import ModelConfig, TrainConfig  # noqa: E402
from blocksparse.models.pixelcnn.training import KIND, Trainer, bits_per_dim, load_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ModelConfig(1, 16, 1, 1, "diagonal", 2, 8, mixture=2)
SHORT = TrainConfig(updates=6, batch=4, lr=2e-3, flip=True)
SIZE = ["--channels", 1, "--filters", 16, "--layout", "diagonal", "--groups", 2, "--block", 8, "--mixture", 2]
HOW = ["--updates", 6, "--batch", 4, "--lr", 2e-3, "--flip", "--device", "cpu"]


def some_images(n=20, channels=1, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, size, size), generator=generator, dtype=torch.uint8)


def pixelcnn(*words):
    return main(["pixelcnn", *map(str, words)])


def tensors_of(path):
    tensors, header = checkpoint.load(path, KIND)
    return {name: tensor for name, tensor in tensors.items() if name != "random"}, header


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty grey pictures of 4 x 4 pixels."""
    made = tmp_path_factory.mktemp("pictures")
    for i, image in enumerate(some_images()):
        PIL.fromarray(image[0].numpy()).save(made / f"{i:02}.png")
    return made


@pytest.fixture(scope="module")
def whole(folder):
    """A training that nobody stopped."""
    out = folder.parent / "whole"
    assert pixelcnn("train", "--data", folder, "--out", out, *SIZE, *HOW, "--save-every", 2) == 0
    return out


# ---- Learning --------------------------------------------------------------------------------------------------------


def test_a_single_image_is_learnt_by_heart():
    """Of noise: 8 bits a pixel for whoever has not seen it."""
    image = some_images(1, size=6)
    config = TrainConfig(updates=500, batch=1, lr=2e-3, warmup=10, lr_decay=0.99)
    trainer = Trainer(replace(TINY, depth=2, dropout=0.0), config, image, "cpu")
    first = trainer.step()
    assert first > 5
    while trainer.step() > 0.5 and trainer.update < 500:  # update 385 on an AMD EPYC, where 500 reach 0.31
        pass
    assert trainer.update < 500
    assert bits_per_dim(trainer.model, image) < 1  # not 0.5: the last update may make it worse, by 0.04 on one machine


def test_adam_has_epsilon_in_the_root():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    adam = Adam([w], lr=0.1)
    m, v, expected = np.zeros(2), np.zeros(2), np.array([1.0, -2.0])
    for t in range(1, 4):
        w.grad = torch.tensor([1e-5 * t, -3.0])
        g = np.array([1e-5 * t, -3.0])
        m, v = 0.95 * m + 0.05 * g, 0.9995 * v + 0.0005 * g * g
        expected -= 0.1 * (m / (1 - 0.95**t)) / np.sqrt(v / (1 - 0.9995**t) + 1e-8)
        adam.step()
    np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-5)


def test_parts_of_a_batch_are_the_batch():
    plain = replace(TINY, dropout=0.0)
    one, two = (Trainer(plain, replace(SHORT, accumulate=k), some_images(), "cpu") for k in (1, 2))
    for _ in range(3):
        assert one.step() == pytest.approx(two.step(), rel=1e-5)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_image_is_seen_once_an_epoch():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 1, 4, 4).contiguous()
    trainer = Trainer(TINY, replace(SHORT, batch=4, flip=False), images, "cpu")
    seen = []
    for trainer.update in range(5):
        seen += trainer._batch()[:, 0, 0, 0].tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_averages_are_ramped():
    config = TrainConfig(ema=0.999)
    assert [round(config.average(u), 3) for u in (0, 8, 90, 10**6)] == [0.1, 0.5, 0.91, 0.999]
    assert TrainConfig(lr=1.0, warmup=3, lr_decay=0.5).rate(1) == pytest.approx(0.25)


def test_bits_per_dim_are_those_of_the_images_however_many_at_once():
    model = Trainer(TINY, SHORT, some_images(), "cpu").model
    done = []
    one = bits_per_dim(model, some_images(), 7, progress=done.append)
    assert one == pytest.approx(bits_per_dim(model, some_images(), 20), rel=1e-6)
    assert done == [7, 14, 20]
    assert bits_per_dim(model, some_images()[:1], 7) != pytest.approx(one, rel=1e-3)


# ---- Going on --------------------------------------------------------------------------------------------------------


def test_going_on_is_bit_equal(folder, whole, tmp_path):
    how = ["train", "--data", folder, "--out", tmp_path / "out", *SIZE, *HOW, "--save-every", 2]
    assert pixelcnn(*how, "--until", 3) == 0
    assert pixelcnn(*how, "--resume") == 0
    expected, found = tensors_of(whole / "last.safetensors"), tensors_of(tmp_path / "out" / "last.safetensors")
    assert same(found[0], expected[0])
    assert found[1] == expected[1]
    logs = [[json.loads(x) for x in (f / "log.jsonl").read_text().splitlines()] for f in (whole, tmp_path / "out")]
    assert [x["update"] for x in logs[0]] == [2, 4, 6]
    assert {x["update"]: x["valid"] for x in logs[0]}.items() <= {x["update"]: x["valid"] for x in logs[1]}.items()
    assert all(x["valid"] != x["valid_raw"] for x in logs[0])


def test_two_processes_are_one(folder, tmp_path):
    how = ["--data", folder, *SIZE, *HOW, "--dropout", 0, "--save-every", 3]
    assert pixelcnn("train", *how, "--out", tmp_path / "one") == 0
    ended = two(*how, "--out", tmp_path / "two", model="pixelcnn")
    assert [one.status for one in ended] == [0, 0], ended
    expected, found = (tensors_of(tmp_path / f / "last.safetensors")[0] for f in ("one", "two"))
    for name, tensor in expected.items():
        if name.startswith(("model.", "ema.")):
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_killed_it_goes_on_from_its_last_checkpoint(folder, whole, tmp_path):
    words = ["train", "--data", folder, "--out", tmp_path / "out", *SIZE, *HOW, "--save-every", 1]
    process = subprocess.Popen(
        [sys.executable, "-m", "blocksparse", "pixelcnn", *map(str, words)], stderr=subprocess.PIPE
    )
    last = tmp_path / "out" / "last.safetensors"
    while not last.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert pixelcnn(*words, "--resume") == 0
    assert same(tensors_of(last)[0], tensors_of(whole / "last.safetensors")[0])
    assert sorted(path.name for path in last.parent.iterdir()) == ["last.safetensors", "log.jsonl"]


def test_a_full_disk_leaves_the_last_checkpoint(whole, tmp_path, monkeypatch):
    trainer = Trainer(TINY, SHORT, some_images(), "cpu")
    assert train(trainer, tmp_path, None, save_every=2, until=2)
    before = (tmp_path / "last.safetensors").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="could not be written, what was there is kept"):
        train(trainer, tmp_path, None, save_every=2)
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_a_deadline_is_no_failure(folder, tmp_path, capsys):
    how = ["train", "--data", folder, "--out", tmp_path, *SIZE, *HOW]
    assert pixelcnn(*how, "--minutes", 1e-9) == 0
    assert "no update is done" in capsys.readouterr().err


# ---- What is refused -------------------------------------------------------------------------------------------------


def refused(capsys, words, message):
    assert pixelcnn(*words) == 2
    assert message in capsys.readouterr().err


def test_checkpoints_of_something_else(folder, whole, tmp_path, capsys):
    last = whole / "last.safetensors"
    how = ["train", "--data", folder, "--out", whole]
    refused(capsys, [*how, *SIZE, *HOW], "is there already: --resume goes on from it")
    refused(capsys, [*how, *SIZE, *HOW, "--resume", "--mixture", 3], "is of another model: mixture is 2, needs 3")
    refused(capsys, [*how, *SIZE, *HOW, "--resume", "--lr", 1e-3], "is of another training: lr is 0.002, needs 0.001")
    other = tmp_path / "other"
    other.mkdir()
    for i, image in enumerate(some_images(20, seed=5)):
        PIL.fromarray(image[0].numpy()).save(other / f"{i:02}.png")
    refused(capsys, ["train", "--data", other, "--out", whole, *SIZE, *HOW, "--resume"], "is of other images")
    damaged = tmp_path / "damaged.safetensors"
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: what it holds does not match its digest"):
        load_model(damaged)
    damaged.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(ValueError, match="is damaged or no checkpoint"):
        load_model(damaged)
    checkpoint.save(damaged, {}, {"model": {}})
    with pytest.raises(ValueError, match=r"no checkpoint of a PixelCNN\+\+"):
        load_model(damaged)
    checkpoint.save(damaged, {}, {"model": {"filters": 16, "color": 3}, "size": [4, 4]}, KIND)
    with pytest.raises(ValueError, match="describes no model"):
        load_model(damaged)
    tensors, header = checkpoint.load(last, KIND)
    checkpoint.save(damaged, tensors, {**header, "size": [4, 0]}, KIND)
    with pytest.raises(ValueError, match=r"damaged\.safetensors describes no model: its images have 4 x 0 pixels"):
        load_model(damaged)


def test_checkpoints_of_other_graphs(tmp_path, monkeypatch):
    """Of the same name and seed, as another version might make them."""
    config = replace(TINY, filters=32, layout="ba(4,1)", groups=1)
    trainer, path = Trainer(config, SHORT, some_images(), "cpu"), tmp_path / "last.safetensors"
    trainer.save(path)
    load_model(path)
    monkeypatch.setattr(layouts, "_STEP", 7)
    with pytest.raises(ValueError, match=r"is of other layouts than this version makes of ba\(4,1\)"):
        load_model(path)
    with pytest.raises(ValueError, match="is of other layouts"):
        Trainer(config, SHORT, some_images(), "cpu").resume(path)


def test_words_that_make_no_training(folder, tmp_path, capsys):
    out = ["--out", tmp_path / "out"]
    how = ["train", "--data", folder, *out]
    refused(capsys, [*how, *SIZE, *HOW, "--filters", 24], "filters is 24, needs a multiple of groups * block = 16")
    refused(
        capsys, [*how, *SIZE, *HOW, "--layout", "diagonals", "--groups", 1], "layout is diagonals, needs diagonal, "
    )
    refused(capsys, [*how, *SIZE, *HOW, "--batch", 5, "--accumulate", 2], "batch is 5, needs a multiple of accumulate")
    refused(capsys, [*how, *SIZE, *HOW, "--save-every", 0], "save_every is 0, needs 1 or more")
    refused(capsys, [*how, *SIZE, *HOW, "--minutes", "nan"], "minutes is nan, needs more than 0")
    refused(capsys, [*how, *SIZE, *HOW, "--samples", -1], "samples is -1, needs 0 or more")
    refused(capsys, [*how, *SIZE, *HOW, "--shrink", 3], "cannot be shrunk by 3")
    refused(capsys, [*how, *SIZE, *HOW, "--device", "tpu"], "device is tpu, needs cpu, cuda or cuda:N")
    refused(capsys, ["train", "--data", tmp_path / "none", *out], "there is no")
    few = tmp_path / "few"
    few.mkdir()
    PIL.fromarray(some_images(1)[0, 0].numpy()).save(few / "a.png")
    refused(capsys, ["train", "--data", few, *out, *SIZE, *HOW], "1 images to be trained on and 0 to be evaluated")
    wide = tmp_path / "wide"
    wide.mkdir()
    PIL.fromarray(np.zeros((4, 6), np.uint8)).save(wide / "a.png")
    refused(capsys, [*how, *SIZE, *HOW, "--test", wide], "to be evaluated have 4 x 6 pixels")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        pixelcnn("train", "--preset", "none")


def test_memory_that_is_short(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "read", lambda *_, **__: torch.empty(2**60))
    refused(capsys, ["train", "--data", folder, "--out", tmp_path], "[pixelcnn] memory is short: can't allocate")
    with pytest.raises(RuntimeError, match="multiplied"), memory_errors("pixelcnn"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_training_that_fails_keeps_its_checkpoint(tmp_path, monkeypatch):
    trainer = Trainer(TINY, SHORT, some_images(), "cpu")
    train(trainer, tmp_path, None, save_every=2, until=2)
    before = (tmp_path / "last.safetensors").read_bytes()
    monkeypatch.setattr(training, "loss_of", lambda *_: next(trainer.model.parameters()).sum() * float("nan"))
    with pytest.raises(ValueError, match=r"\[pixelcnn\] training has failed by update 3"):
        train(trainer, tmp_path, None, save_every=2)
    assert (tmp_path / "last.safetensors").read_bytes() == before


# ---- Other commands --------------------------------------------------------------------------------------------------


def test_eval(folder, whole, capsys):
    assert pixelcnn("eval", whole / "last.safetensors", "--data", folder, "--part", "all", "--device", "cpu") == 0
    found = json.loads(capsys.readouterr().out)
    model, size = load_model(whole / "last.safetensors")
    assert size == (4, 4)
    assert found == {"images": 20, "bits_per_dim": round(bits_per_dim(model, some_images()), 4)}
    assert pixelcnn("eval", whole / "last.safetensors", "--data", folder, "--shrink", 2, "--device", "cpu") == 0
    assert "images have 2 x 2 pixels; the model was trained on 4 x 4" in capsys.readouterr().err
    raw, _ = load_model(whole / "last.safetensors", averaged=False)
    assert not same(copy.deepcopy(raw.state_dict()), model.state_dict())
    none = ["eval", whole / "last.safetensors", "--data", folder, "--batch", 0, "--device", "cpu"]
    refused(capsys, none, "batch is 0, needs 1 or more")


def test_some_of_the_images_are_of_all_classes():
    """Files of a data set are often in the order of their classes."""
    images = torch.arange(100).view(100, 1, 1, 1)
    classes = data.spread(images, 40).flatten() // 10
    assert torch.bincount(classes).tolist() == [4] * 10
    assert data.spread(images, 3).flatten().tolist() == [0, 33, 66]
    assert torch.equal(data.spread(images, 100), images)
    assert torch.equal(data.spread(images, 200), images)


def test_every_tenth_image_is_held_out_where_no_others_are_given(folder, tmp_path, capsys):
    how = ["train", "--data", folder, *SIZE, *HOW, "--updates", 1]
    for more, images in (([], 18), (["--test", folder], 20)):
        assert pixelcnn(*how, *more, "--out", tmp_path / f"{images}") == 0
        assert f"{images} images" in capsys.readouterr().out


def test_sample(folder, whole, tmp_path, capsys):
    last, out = whole / "last.safetensors", tmp_path / "grid.png"
    how = ["sample", last, "-o", out, "--images", 4, "--device", "cpu"]
    assert pixelcnn(*how) == 0
    first = np.asarray(PIL.open(out))
    assert first.shape == (9, 9, 3)
    refused(capsys, how, "is there already: --force overwrites it")
    assert pixelcnn(*how, "--force", "--plain") == 0
    assert np.array_equal(first, np.asarray(PIL.open(out)))
    assert pixelcnn(*how, "--force", "--complete", "--data", folder, "--part", "train") == 0
    image = np.asarray(PIL.open(out))[:2, :4, 0]
    assert np.array_equal(image, some_images()[0, 0, :2].numpy())
    refused(capsys, [*how, "--force", "--complete"], "--complete and --data need each other")
    refused(capsys, [*how, "--force", "--data", folder], "--complete and --data need each other")
    refused(capsys, [*how, "--force", "--seed", 2**64], "needs 64 bits or less")
    refused(capsys, ["sample", last, "-o", tmp_path / "grid.jpg"], "needs to end with .png")
    refused(capsys, [*how, "--force", "--images", 0], "images is 0, needs 1 or more")


def test_tensorboard(folder, tmp_path, capsys):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = ["--tensorboard", tmp_path / "board", "--samples", 1, "--save-every", 2, "--updates", 2, "--batch", 4]
    assert pixelcnn("train", "--data", folder, "--out", tmp_path / "out", *SIZE, *board, "--device", "cpu") == 0
    assert re.search(r"update 2: valid \d+\.\d{4} bits/dim, \d+\.\d{4} by the last", capsys.readouterr().err)
    found = event_accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    assert {"train", "valid", "valid_raw", "lr"} <= set(found.Tags()["scalars"])
    assert found.Tags()["images"] == ["samples"]
