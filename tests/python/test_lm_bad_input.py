"""What `lm` says of texts, checkpoints, disks and numbers that are not right, and that nothing is lost by them."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from ranks import run_forked, run_program
from tiny_language_models import SHORT, SIZE, TINY, lm, sentences

from blocksparse.models import checkpoint
from blocksparse.models.files import write_whole
from blocksparse.models.language import LanguageModel, ModelConfig, sample
from blocksparse.models.language.training import TrainConfig, Trainer, load_model, read_text, train

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ["--updates", 12, "--batch", 8, "--steps", 16, "--lr", 4e-3, "--warmup", 4]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(sentences(600))
    return path


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
    refused(capsys, ["train", "--text", tmp_path / "none", *out], "none could not be read: No such file")
    (tmp_path / "empty").write_bytes(b"")
    refused(capsys, ["train", "--text", tmp_path / "empty", *out], "no text in there")
    (tmp_path / "short").write_bytes(b"abc" * 100)
    refused(capsys, ["train", "--text", tmp_path / "short", *out], "text has 285 bytes, needs batch * steps + 1 = 4097")
    (tmp_path / "almost").write_bytes(b"abc" * 1400)
    held_out = "text has 4200 bytes, of which the last 210 are held out to be evaluated; needs 4097 before them"
    refused(capsys, ["train", "--text", tmp_path / "almost", *out], held_out)
    (tmp_path / "one").write_bytes(b"a")
    refused(
        capsys, ["train", "--text", text, *out, "--valid", tmp_path / "one"], "to be evaluated has 1 bytes, needs 2"
    )
    refused(
        capsys,
        ["train", "--text", text, *out, "--lr", 0],
        "lr is 0.0, clip 1.0, ema 0.999, warmup 100; needs lr and clip above 0",
    )
    refused(capsys, ["train", "--text", text, *out, "--min-lr-ratio", 1.5], "min_lr_ratio is 1.5, needs 0 to 1")
    refused(capsys, ["train", "--text", text, *out, "--ema", 1], "ema 1.0, warmup 100; needs lr and clip above 0")
    refused(capsys, ["train", "--text", text, *out, "--inner", -1], "inner is -1, needs 2 or more")
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
    refused(capsys, ["sample", tmp_path / "other"], "is damaged or no checkpoint of a language model")
    data = read_text([text])
    for model, config, what in (
        (ModelConfig(**{**TINY.__dict__, "seed": 5}), SHORT, "model: seed is 0, needs 5$"),
        (TINY, TrainConfig(**{**SHORT.__dict__, "lr": 0.1}), "training: lr is 0.004, needs 0.1$"),
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
    refused(capsys, ["train", "--text", tmp_path, "--out", tmp_path / "out"], "is a folder, needs to be a file")


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
from blocksparse.models.language.training import Trainer, TrainConfig, read_text
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
    assert run_forked(run_program, SAVE, text, trained).status == -9
    assert trained.read_bytes() == before
    (half,) = trained.parent.glob(".last*/last.safetensors")
    assert 0 < half.stat().st_size < len(before)  # it was in the middle
    trainer = Trainer(TINY, SHORT, read_text([text]), "cpu")
    trainer.resume(trained)
    train(trainer, trained.parent, None, until=3)
    assert trainer.update == 3


def test_a_disk_that_is_full_for_real(trained, text, tmp_path):
    """A limit of the size of files stands for the disk: writing fails in the middle."""
    before = trained.read_bytes()
    words = [
        "lm",
        "train",
        "--text",
        text,
        "--valid",
        text,
        "--out",
        trained.parent,
        *SIZE,
        *HOW,
        "--until",
        4,
        "--resume",
    ]
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
    code = limited + "from blocksparse import __main__; sys.exit(__main__.main(sys.argv[1:]))"
    done = run_forked(run_program, code, *words, "--device", "cpu")
    assert done.status == 2, done.stderr
    assert "last.safetensors could not be written, what was there is kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert trained.read_bytes() == before


def altered(trained, path, change):
    """A checkpoint with other tensors and another header, whole as a file."""
    tensors, header = checkpoint.load(trained)
    change(tensors, header)
    checkpoint.save(path, tensors, header)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, h: t.update({"ema.output": t["ema.output"][:, :1]}), r"ema.output is \[256, 1\], needs \[256, 32\]"),
        (lambda t, h: t.update({"model.embedding": t["model.embedding"][:128]}), r"does not fit the model"),
        (lambda t, h: t.pop("ema.embedding"), "lacks 'ema.embedding'"),
        (lambda t, h: t.pop("random"), "lacks 'random'"),
        (lambda t, h: t.update({"adam.output.exp_avg": torch.zeros(1, 32)}), "adam.output.exp_avg is "),
        (lambda t, h: t.update({"state.c": t["state.c"][:, :3]}), r"state.c is \[1, 3, 64\], needs \[1, 8, 64\]"),
        (lambda t, h: h.pop("update"), "lacks 'update'"),
    ],
)
def test_checkpoints_that_are_not_whole(trained, text, tmp_path, change, message):
    path = altered(trained, tmp_path / "other", change)
    with pytest.raises(ValueError, match=message):
        Trainer(TINY, SHORT, read_text([text]), "cpu").resume(path)


def test_another_vocabulary(trained, text, tmp_path, capsys):
    def fewer(tensors, header):
        for name in ("embedding", "embedding_gain", "output", "output_gain", "output_bias"):
            tensors[f"ema.{name}"] = tensors[f"ema.{name}"][:128].clone()

    path = altered(trained, tmp_path / "fewer", fewer)
    refused(
        capsys, ["eval", path, "--text", text], "size mismatch for output: copying a param with shape torch.Size([128"
    )


@pytest.mark.parametrize("header", ["[1", "[1]"])
def test_damaged_headers(tmp_path, text, capsys, header):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other", {checkpoint.FORMAT_1: header})
    refused(capsys, ["eval", tmp_path / "other", "--text", text], f"other is damaged: its header says '{header}'")


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_devices_that_are_not_there(tmp_path, text, trained, capsys, device):
    refused(capsys, ["train", "--text", text, "--out", tmp_path / "new", "--device", device], f"device is {device}, ")
    refused(capsys, ["eval", trained, "--text", text, "--device", device], f"device is {device}, ")
    assert not (tmp_path / "new").exists()


def test_half_a_line_of_the_log(trained, text, capsys):
    """A disk that was full leaves it: training goes on, and what is known of the updates before stays."""
    log = trained.parent / "log.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"update": 2, "byt')
    assert (
        lm("train", "--text", text, "--valid", text, "--out", trained.parent, *SIZE, *HOW, "--resume", "--until", 3)
        == 0
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["update"] for line in lines] == [2, 3]
    assert lines[0] == json.loads(whole)


@pytest.mark.parametrize("content", ["my own notes\n", "my own notes", '{"a": 1}\n', "[1]\n", '{"update": 1, "b\n'])
def test_other_logs_are_left_alone(text, tmp_path, capsys, content):
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    refused(capsys, ["train", "--text", text, "--out", tmp_path, *SIZE, *HOW], "log.jsonl is there and no log of a")
    assert log.read_text() == content
    assert [path.name for path in tmp_path.iterdir() if "last" in path.name] == []


def test_what_is_read_is_not_overwritten(trained, tmp_path, capsys):
    rows = tmp_path / "rows"
    rows.write_text("1 good\n0 bad\n")
    before = trained.read_bytes()
    (tmp_path / "link").symlink_to(rows)
    for out in (rows, trained, tmp_path / "link"):
        for command in (["features", trained, "--labels", rows], ["compress", trained, rows]):
            refused(capsys, [*command, "-o", out, "--force"], f"{out} is read, needs to be another file")
    features = ["features", trained, "--labels", rows, "-o", tmp_path / "features"]
    refused(capsys, [*features[:-1], "-"], "--out is -, needs a file")
    assert lm(*features) == 0
    refused(capsys, features, "is there already: --force overwrites it")
    assert lm(*features, "--force") == 0
    assert trained.read_bytes() == before
    assert rows.read_text() == "1 good\n0 bad\n"


def test_out_is_tried_before_the_work(trained, tmp_path, capsys, monkeypatch):
    rows = tmp_path / "rows"
    rows.write_text("1 good\n0 bad\n")
    done = []
    for work in ("cell_states", "compress"):
        monkeypatch.setattr(f"blocksparse.models.language.command.{work}", lambda *_, **__: done.append(1))
    before = set(tmp_path.iterdir())
    for command in (["features", trained, "--labels", rows], ["compress", trained, rows]):
        for force in ([], ["--force"]):
            refused(capsys, [*command, "-o", tmp_path, *force], "is a folder, needs to be a file")
            refused(capsys, [*command, "-o", rows / "below", *force], "below cannot be written")
    refused(capsys, ["compress", trained, tmp_path / "none", "-o", tmp_path / "new" / "out"], "No such file")
    assert done == []
    assert set(tmp_path.iterdir()) == before


def test_numbers_beyond_what_there_is(text, trained, tmp_path, capsys):
    new = ["train", "--text", text, "--out", tmp_path / "new", *SIZE, *HOW]
    refused(capsys, [*new, "--block", 0], "block_size is 0, needs 8, 16")
    refused(capsys, [*new, "--lr", "inf"], "lr is inf, clip")
    refused(capsys, [*new, "--seed", 2**63], f"seed is {2**63}, needs 64 bits or less")
    refused(capsys, ["sample", trained, "--seed", 2**70], f"seed is {2**70}, needs 64 bits or less")
    assert not (tmp_path / "new").exists()


def test_numbers_of_updates_are_positive(text, tmp_path, capsys):
    new = ["train", "--text", text, "--out", tmp_path / "new", *SIZE, *HOW]
    for option, name in (("--until", "until"), ("--save-every", "save_every")):
        refused(capsys, [*new, option, 0], f"{name} is 0, needs 1 or more")
    with pytest.raises(ValueError, match="evaluate_every is 0, needs 1 or more"):
        train(Trainer(TINY, SHORT, read_text([text]), "cpu"), tmp_path / "new", None, evaluate_every=0)
    assert not (tmp_path / "new").exists()


def test_failed_training_keeps_the_last_checkpoint(trained, text):
    """Whether it shows in the loss or in the weights alone."""
    before = trained.read_bytes()
    for save_every in (1, 100):
        trainer = Trainer(TINY, SHORT, read_text([text]), "cpu")
        trainer.resume(trained)
        trainer.adam.register_step_post_hook(lambda *_, t=trainer: t.model.output_bias.data.fill_(torch.nan))
        with pytest.raises(ValueError, match=f"training has failed by update {3 if save_every == 1 else 4}"):
            train(trainer, trained.parent, None, save_every=save_every, until=10)
        assert trained.read_bytes() == before


def test_samples_of_bad_models_and_temperatures():
    model = LanguageModel(TINY)
    for temperature in (1e-45, 1e-300):
        assert sample(model, b"ab", 9, temperature) == sample(model, b"ab", 9, 0.0)
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"temperature is {temperature}, needs a number, 0 or more"):
            sample(model, b"ab", 9, temperature)
    with pytest.raises(ValueError, match="length is -1, needs 0 or more"):
        sample(model, b"ab", -1)
    with torch.no_grad():
        model.output_bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="gives no probabilities, but NaN"):
        sample(model, b"ab", 9)


def test_prompts_need_not_be_utf8(trained):
    command = [sys.executable, "-m", "blocksparse", "lm", "sample", trained, "--length", "3", "--prompt", b"\xff"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"\xff")
    assert len(done.stdout) == 5


def test_links_stay_links(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for content in (b"abc", b"de"):  # the first finds no file there
        write_whole(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "folder" / "file").read_bytes() == content
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
    (tmp_path / "loop").symlink_to("loop")
    write_whole(tmp_path / "loop", b"f")
    assert (tmp_path / "loop").read_bytes() == b"f"


def test_devices_are_written_to_and_stay(tmp_path):
    """By links, so that nothing but a link can be lost."""
    for name in ("null", "full"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    write_whole(tmp_path / "null", b"abc")
    with pytest.raises(OSError, match=r"full could not be written.* No space left"):
        checkpoint.save(tmp_path / "full", {"a": torch.zeros(3)}, {})
    assert all(path.is_symlink() for path in tmp_path.iterdir())


def test_stopped_by_hand(text, tmp_path):
    """Ctrl-C: no traceback, and the last checkpoint loads."""
    words = [
        "lm",
        "train",
        "--text",
        text,
        "--out",
        tmp_path / "out",
        *SIZE,
        *HOW,
        "--updates",
        100_000,
        "--save-every",
        2,
    ]
    command = [sys.executable, "-m", "blocksparse", *map(str, words), "--device", "cpu"]
    running = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's job in the background ignores it
    )
    last = tmp_path / "out" / "last.safetensors"
    for _ in range(1200):
        if last.exists():
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said.endswith(b"blocksparse: stopped\n")
    assert b"Traceback" not in said
    load_model(last)
