"""The language model and its command line, on text that is made here."""

import json
import random
import subprocess
import sys

import pytest
import torch

from blocksparse import Layout, __main__
from blocksparse.models import checkpoint
from blocksparse.models.language import PRESETS, LanguageModel, ModelConfig, bits_per_byte, chunks, sample
from blocksparse.models.training import TrainConfig, Trainer, load_model, read_text, train

TINY = ModelConfig(hidden=64, graph="ba(8,2)", block=8, inner=2, stride=2, embedding=16)
SHORT = TrainConfig(updates=12, batch=8, steps=16, lr=4e-3, warmup=4)


def sentences(count, seed=0):
    """A language of few words."""
    rng = random.Random(seed)
    words = [["the", "a", "every"], ["red", "small", "sparse"], ["block", "graph", "wolf"], ["sees", "is", "eats"]]
    return " ".join(" ".join(rng.choice(kind) for kind in words) + "." for _ in range(count)).encode()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(sentences(600))
    return path


def lm(*words):
    return __main__.main(["lm", *map(str, words)])


def weights(trainer):
    return {**trainer.model.state_dict(), **{f"ema {k}": v for k, v in trainer.ema.items()}}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_chunks_are_the_text_side_by_side():
    data = torch.arange(23, dtype=torch.uint8)
    parts = list(chunks(data, 2, 4))
    assert [tuple(x.shape) for x, _ in parts] == [(4, 2), (4, 2), (3, 2)]
    assert torch.cat([x for x, _ in parts]).t().flatten().tolist() == list(range(22))
    assert torch.cat([y for _, y in parts]).t().flatten().tolist() == list(range(1, 23))


def test_evaluation_does_not_depend_on_chunks():
    model = LanguageModel(TINY).double()
    data = torch.frombuffer(bytearray(sentences(10)), dtype=torch.uint8)
    values = [bits_per_byte(model, data, 4, steps) for steps in (7, 300)]
    assert values == pytest.approx(values[:1] * 2, rel=1e-12)
    assert 7 < values[0] < 9
    with pytest.raises(ValueError, match="text has 1 bytes"):
        bits_per_byte(model, data[:1])


def test_same_seed_same_model():
    torch.manual_seed(1)
    first = LanguageModel(TINY).state_dict()
    torch.manual_seed(2)
    assert same(first, LanguageModel(TINY).state_dict())


@pytest.mark.parametrize("options", [{}, {"bf16": True}])
def test_resumed_is_as_if_never_stopped(text, tmp_path, options):
    config = TrainConfig(**{**SHORT.__dict__, **options})
    data = read_text([text])[:800]  # epochs end on the way
    whole = Trainer(TINY, config, data, "cpu")
    train(whole, tmp_path / "whole", data, save_every=5)
    train(Trainer(TINY, config, data, "cpu"), tmp_path / "parts", data, save_every=5, until=7)
    again = Trainer(TINY, config, data, "cpu")
    again.resume(tmp_path / "parts" / "last.safetensors")
    assert again.update == 7
    torch.manual_seed(99)  # of no matter where the checkpoint is whole
    again.resume(tmp_path / "parts" / "last.safetensors")
    train(again, tmp_path / "parts", data, save_every=5)
    assert same(weights(whole), weights(again))
    assert whole.recent == again.recent
    logs = [[json.loads(x) for x in (tmp_path / f / "log.jsonl").read_text().splitlines()] for f in ("whole", "parts")]
    assert [x["update"] for x in logs[0]] == [5, 10, 12]
    assert [x["update"] for x in logs[1]] == [5, 7, 10, 12]
    assert logs[0][-1]["valid"] == logs[1][-1]["valid"]


def test_averaged_weights_are_what_is_evaluated(text, tmp_path):
    data = read_text([text])
    trainer = Trainer(TINY, SHORT, data, "cpu")
    train(trainer, tmp_path, None)
    before = weights(trainer)
    bits = trainer.evaluate(data[:2000])
    assert same(before, weights(trainer))
    model = load_model(tmp_path / "last.safetensors")
    assert all(torch.equal(p, trainer.ema[name]) for name, p in model.named_parameters())
    assert bits_per_byte(model, data[:2000]) == pytest.approx(bits, rel=1e-6)
    assert bits != bits_per_byte(trainer.model, data[:2000])


def test_learns_a_small_language(text, tmp_path, capsys):
    """What a minute can do: below the entropy of single bytes, and words come out."""
    held = tmp_path / "held"
    held.write_bytes(sentences(60, seed=1))
    counts = torch.frombuffer(bytearray(held.read_bytes()), dtype=torch.uint8).long().bincount().double()
    share = counts[counts > 0] / counts.sum()
    order0 = -(share * share.log2()).sum().item()
    out = tmp_path / "out"
    size = ["--hidden", 128, "--graph", "ba(16,2)", "--inner", 2, "--embedding", 16]
    how = ["--updates", 80, "--batch", 16, "--steps", 24, "--lr", 0.02, "--warmup", 10, "--ema", 0.95]
    assert lm("train", "--text", text, "--valid", held, "--out", out, *size, *how, "--save-every", 40) == 0
    assert capsys.readouterr().out.endswith("last.safetensors\n")
    assert lm("eval", out / "last.safetensors", "--text", held) == 0
    bits = json.loads(capsys.readouterr().out)["bits_per_byte"]
    assert bits < 0.3 * order0  # measured: 0.12
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert last["update"] == 80
    assert last["valid"] == pytest.approx(bits, abs=1e-3)
    made = sample(load_model(out / "last.safetensors"), b"the ", 200, 0.5).decode()
    known = {"the", "a", "every", "red", "small", "sparse", "block", "graph", "wolf", "sees", "is", "eats"}
    found = [word.strip(".") in known for word in made.split(" ")[1:-1]]
    assert sum(found) > 0.6 * len(found)


@pytest.mark.parametrize("name", ["dense-1120", "ba-5600", "ws-5600", "dense-3168", "ba-18432"])
def test_presets_have_the_papers_sizes(name):
    """12.5 and 100 million weights between units; `inner` matrices and four gates on as many blocks each."""
    config = PRESETS[name]
    weights = config.hidden**2
    if config.graph:
        layout = Layout.from_graph(config.graph, config.block, seed=0)
        weights = layout.blocks * config.block**2
        assert layout.in_features == layout.out_features == config.hidden
        assert layout.density < 0.045
    expected = {1120: 12_544_000, 5600: 12_544_000, 3168: 100_362_240, 18432: 100_270_080}
    assert (4 + config.inner) * weights == expected[config.hidden]
    if name in ("dense-1120", "ba-5600"):
        model = LanguageModel(config)
        ports = config.hidden // config.stride
        rest = 2 * 64 * ports + 256 * ports + 256 * 64 + 2 * 10 * config.hidden + 4 * ports + 3 * 256
        assert sum(p.numel() for p in model.parameters()) == expected[config.hidden] + rest


def test_sample(tmp_path):
    model = LanguageModel(TINY)
    assert sample(model, b"ab", 20, seed=3) == sample(model, b"ab", 20, seed=3)
    assert sample(model, b"ab", 20, seed=3) != sample(model, b"ab", 20, seed=4)
    assert sample(model, b"ab", 9, 0.0, seed=3) == sample(model, b"ab", 9, 0.0, seed=4)
    with pytest.raises(ValueError, match="prompt of 0 bytes"):
        sample(model, b"", 3)


# ---- Bad input ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(text, tmp_path):
    trainer = Trainer(TINY, SHORT, read_text([text]), "cpu")
    train(trainer, tmp_path / "out", None, until=2)
    return tmp_path / "out" / "last.safetensors"


def refused(capsys, words, message):
    assert lm(*words) == 2
    assert message in capsys.readouterr().err


def test_bad_text(tmp_path, text, capsys):
    out = ["--out", tmp_path / "out"]
    refused(capsys, ["train", "--text", tmp_path / "none", *out], "No such file")
    (tmp_path / "empty").write_bytes(b"")
    refused(capsys, ["train", "--text", tmp_path / "empty", *out], "no text in there")
    (tmp_path / "short").write_bytes(b"abc" * 100)
    refused(capsys, ["train", "--text", tmp_path / "short", *out], "text has 285 bytes, needs batch * steps + 1 = 4097")
    refused(capsys, ["train", "--text", text, *out, "--lr", 0], "lr and clip need to be above 0")
    refused(capsys, ["train", "--text", text, *out, "--hidden", 100], "needs a multiple of the block size")
    refused(capsys, ["train", "--text", text, *out, "--graph", "tree(3)"], "tree")
    assert not (tmp_path / "out").exists()
    assert read_text([text]).numel() == text.stat().st_size
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 4)
    assert read_text([tmp_path / "bytes"]).max() == 255


def test_bad_checkpoints(tmp_path, text, trained, capsys):
    refused(capsys, ["eval", tmp_path / "none", "--text", text], "there is no checkpoint")
    whole = trained.read_bytes()
    for name, data in (("cut", whole[: len(whole) // 2]), ("noise", b"x" * 100), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        refused(capsys, ["eval", tmp_path / name, "--text", text], "is damaged or no checkpoint")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    refused(capsys, ["sample", tmp_path / "other"], "is no checkpoint of a language model")
    data = read_text([text])
    for model, config, what in (
        (ModelConfig(**{**TINY.__dict__, "seed": 5}), SHORT, "model"),
        (TINY, TrainConfig(**{**SHORT.__dict__, "lr": 0.1}), "training"),
    ):
        with pytest.raises(ValueError, match=f"is of another {what}"):
            Trainer(model, config, data, "cpu").resume(trained)
    with pytest.raises(ValueError, match="is of another text"):
        Trainer(TINY, SHORT, data[1:], "cpu").resume(trained)
    tensors, header = checkpoint.load(trained)
    header["model"]["graph"] = "ba(8,1)"
    checkpoint.save(tmp_path / "changed", tensors, header)
    with pytest.raises(ValueError, match="does not fit the model"):
        load_model(tmp_path / "changed")


def test_text_that_cannot_be_read(tmp_path, capsys):
    refused(capsys, ["train", "--text", tmp_path, "--out", tmp_path / "out"], "Is a directory")


def test_text_need_not_be_utf8(tmp_path):
    (tmp_path / "bytes").write_bytes(random.Random(0).randbytes(3000))
    trainer = Trainer(TINY, SHORT, read_text([tmp_path / "bytes"]), "cpu")
    assert 7 < trainer.step() < 10


def test_what_is_there_is_not_overwritten(text, trained, capsys):
    refused(capsys, ["train", "--text", text, "--out", trained.parent], "is there already: --resume")


def test_a_full_disk_keeps_the_old_checkpoint(trained, monkeypatch):
    before = trained.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="what was there is kept"):
        checkpoint.save(trained, {"a": torch.zeros(3)}, {})
    assert trained.read_bytes() == before
    assert [path.name for path in trained.parent.iterdir() if path.name.startswith(".")] == []


SAVE = """
import os, signal, sys
from pathlib import Path
from blocksparse.models.training import Trainer, TrainConfig, read_text
from blocksparse.models.language import ModelConfig

def killed(descriptor):
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)

model = ModelConfig(hidden=64, graph="ba(8,2)", block=8, inner=2, stride=2, embedding=16)
config = TrainConfig(updates=12, batch=8, steps=16, lr=4e-3, warmup=4)
trainer = Trainer(model, config, read_text([Path(sys.argv[1])]), "cpu")
trainer.step()
os.fsync = killed
trainer.save(Path(sys.argv[2]))
"""


def test_killed_in_the_middle_of_a_checkpoint(trained, text):
    """The last one loads, and training goes on."""
    before = trained.read_bytes()
    done = subprocess.run([sys.executable, "-c", SAVE, text, trained])
    assert done.returncode == -9
    assert trained.read_bytes() == before
    halves = [path for path in trained.parent.iterdir() if path.name.startswith(".last")]
    assert 0 < halves[0].stat().st_size < len(before)  # it was in the middle
    trainer = Trainer(TINY, SHORT, read_text([text]), "cpu")
    trainer.resume(trained)
    train(trainer, trained.parent, None, until=3)
    assert trainer.update == 3


def test_a_disk_that_is_full_for_real(trained, text, tmp_path):
    """A limit of the size of files stands for the disk: writing fails in the middle."""
    before = trained.read_bytes()
    size = ["--hidden", 64, "--graph", "ba(8,2)", "--inner", 2, "--embedding", 16]
    how = ["--updates", 12, "--batch", 8, "--steps", 16, "--lr", 4e-3, "--warmup", 4, "--until", 4]
    words = ["lm", "train", "--text", text, "--valid", text, "--out", trained.parent, *size, *how, "--resume"]
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
    code = limited + "from blocksparse import __main__; sys.exit(__main__.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *words, "--device", "cpu"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "last.safetensors could not be written, what was there is kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert trained.read_bytes() == before


def test_importing_the_package_does_not_import_torch():
    code = "import sys, blocksparse.__main__ as m; m.main(['report', 'ba(8,2)']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
