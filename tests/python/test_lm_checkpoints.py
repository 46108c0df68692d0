"""Checkpoints that were damaged on the way: what is wrong is said, nothing is read that was not written."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_forked, run_package
from tiny_language_models import SHORT, TINY, lm, same, trained_in

from blocksparse.models import checkpoint
from blocksparse.models.files import check_writable, write_whole
from blocksparse.models.language.training import Trainer, load_model, read_text, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trained_in(folder, until=2)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return folder / "last.safetensors"


@pytest.fixture(scope="module")
def text(folder):
    return read_text([folder / "text"])


def test_paths_may_be_strings(folder, text, tmp_path):
    same_text = read_text(str(folder / "text"))
    assert torch.equal(same_text, text)
    assert torch.equal(read_text([str(folder / "text")] * 2), torch.cat([text, text]))
    trainer = Trainer(TINY, SHORT, same_text, "cpu")
    trainer.resume(str(folder / "last.safetensors"))
    assert checkpoint.load_header(str(folder / "last.safetensors"))["update"] == 2
    trainer.save(str(tmp_path / "saved.safetensors"))
    assert (tmp_path / "saved.safetensors").read_bytes() == (folder / "last.safetensors").read_bytes()
    train(trainer, str(tmp_path / "on"), None, until=3)
    assert load_model(str(tmp_path / "on" / "last.safetensors")).config == TINY


def test_a_checkpoint_is_as_safetensors_writes_it_alone_and_open_as_other_files(tmp_path):
    from safetensors.torch import load_file

    tensors = {
        "b": torch.randn(3, 4).bfloat16(),
        "a": torch.arange(5),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2.0),
    }
    mask = os.umask(0o027)
    try:
        for _ in range(2):  # a new file, then in place of it
            checkpoint.save(tmp_path / "deep" / "x.safetensors", tensors, {"update": 1})
            assert (tmp_path / "deep" / "x.safetensors").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(mask)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.safetensors"]
    back, header = checkpoint.load(tmp_path / "deep" / "x.safetensors")
    assert header == {"update": 1}
    for read in (back, load_file(tmp_path / "deep" / "x.safetensors")):
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("letter", "count"), [("n", 100), ("n", 101), ("n", 255), ("𝄞", 63)])
def test_names_may_be_as_long_as_files_have_them(tmp_path, letter, count):
    name = letter * count
    check_writable(tmp_path / name)
    checkpoint.save(tmp_path / name, {"a": torch.arange(5)}, {})
    write_whole(tmp_path / name, b"abc")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(OSError, match=r"\[lm\] .* has a name of 256 bytes, needs 255 or fewer"):
        check_writable(tmp_path / (letter * (256 // len(letter.encode()))))


def test_a_checkpoint_is_written_where_modes_cannot_be_changed(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refused)  # as on a network share whose files all belong to somebody else
    checkpoint.save(tmp_path / "x", {"a": torch.arange(5)}, {"update": 1})
    assert checkpoint.load(tmp_path / "x")[1] == {"update": 1}


def header_bytes(data):
    """How long the header is, with the eight bytes that say so."""
    return 8 + int.from_bytes(data[:8], "little")


# ---- The check of the content ----------------------------------------------------------------------------------------


def test_a_flipped_bit_of_a_weight_is_noticed(folder, trained, capsys):
    whole = bytearray(trained.read_bytes())
    whole[-1000] ^= 1
    (folder / "flipped").write_bytes(whole)
    assert lm("eval", folder / "flipped", "--text", folder / "text") == 2
    said = capsys.readouterr()
    assert "flipped is damaged: what it holds does not match its digest" in said.err
    assert said.out == ""


def test_another_digit_of_the_header_is_noticed(folder, trained, text):
    whole = trained.read_bytes()
    changed = whole.replace(rb"\"update\": 2", rb"\"update\": 3")
    assert changed != whole
    (folder / "digit").write_bytes(changed)
    trainer = Trainer(TINY, SHORT, text, "cpu")
    with pytest.raises(ValueError, match="digit is damaged: what it holds does not match its digest"):
        trainer.resume(folder / "digit")
    assert trainer.update == 0


def without_digest(trained, path):
    """As the first version wrote it."""
    from safetensors.torch import save_file

    tensors, header = checkpoint.load(trained)
    save_file(tensors, path, {checkpoint.FORMAT_1: json.dumps(header)})
    return path


def test_files_without_a_digest_load_with_a_warning(folder, trained, text, capsys):
    old = without_digest(trained, folder / "old")
    with pytest.warns(UserWarning, match="old has no digest"):
        tensors, header = checkpoint.load(old)
    expected, expected_header = checkpoint.load(trained)
    assert same(tensors, expected)
    assert header == expected_header
    with pytest.warns(UserWarning, match="old has no digest"):
        assert lm("eval", old, "--text", folder / "text") == 0
    with pytest.warns(UserWarning, match="old has no digest"):
        Trainer(TINY, SHORT, text, "cpu").resume(old)


def test_a_warning_is_one_line(folder, trained):
    old = without_digest(trained, folder / "old")
    done = run_forked(run_package, "lm", "sample", old, "--length", 1)
    assert done.status == 0
    assert done.stderr.startswith(f"blocksparse: warning: {old} has no digest")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["blocksparse-lm-1", "blocksparse-lm-3"])
def test_no_damage_makes_a_file_without_a_digest(folder, trained, name):
    whole = trained.read_bytes()
    changed = whole.replace(checkpoint.FORMAT.encode(), name.encode())
    assert changed != whole
    (folder / "name").write_bytes(changed)
    with pytest.raises(ValueError, match="name is damaged"):
        checkpoint.load(folder / "name")


def test_the_same_training_makes_the_same_file(folder, trained):
    """So that files can be compared. Their metadata have no order of their own, but for a single entry."""
    tensors, header = checkpoint.load(trained)
    for _ in range(8):
        checkpoint.save(folder / "again", tensors, header)
        assert (folder / "again").read_bytes() == trained.read_bytes()


def damaged(whole, rng):
    """One bit, several, a byte of the header or of the data, or an end that is missing."""
    kind = rng.choice(["bit", "bit", "bits", "header", "header", "cut"])
    if kind == "cut":
        return whole[: rng.randrange(len(whole))]
    made = bytearray(whole)
    most = header_bytes(whole) if kind == "header" else len(whole)
    for _ in range(rng.randint(2, 20) if kind == "bits" else 1):
        made[rng.randrange(most)] ^= 1 << rng.randrange(8)
    return bytes(made)


def test_a_thousand_damages(folder, trained):
    """All are refused, but for those after which the same is read."""
    rng = random.Random(0)
    whole, path = trained.read_bytes(), folder / "damaged"
    expected, expected_header = checkpoint.load(trained)
    refused = 0
    for _ in range(1000):
        path.write_bytes(damaged(whole, rng))
        try:
            tensors, header = checkpoint.load(path)
        except ValueError as error:
            assert "damaged" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert header == expected_header
            assert same(tensors, expected)
    assert refused > 990


# ---- What resume needs -----------------------------------------------------------------------------------------------


def state_of(trainer):
    """All that a resume replaces, as copies."""
    moments = {f"{i} {k}": v.clone() for i, entry in enumerate(trainer.adam.state.values()) for k, v in entry.items()}
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    ema = {f"ema {name}": tensor.clone() for name, tensor in trainer.ema.items()}
    state = {} if trainer.state is None else dict(zip("hc", map(torch.clone, trainer.state), strict=True))
    return {**weights, **ema, **moments, **state, "random": torch.get_rng_state(), "at": torch.tensor(trainer.update)}


def renamed(tensors, old, new):
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: renamed(t, "adam.output.exp_avg_sq", "adam.output.exp_avg_sr"), "lacks 'adam.output.exp_avg_sq'"),
        (lambda t: t.pop("adam.output_bias.exp_avg"), "lacks 'adam.output_bias.exp_avg'"),
        (lambda t: t.pop("adam.output_bias.step"), "lacks 'adam.output_bias.step'"),
        (lambda t: [t.pop(k) for k in list(t) if k.startswith("adam.output_gain.")], "lacks 'adam.output_gain."),
        (lambda t: [t.pop(k) for k in list(t) if k.startswith("adam.")], "lacks 'adam."),
        (lambda t: t.update({"adam.x.exp_avg": torch.ones(2)}), "holds 'adam.x.exp_avg', which is of no such training"),
        (lambda t: t.update({"adam.output.step": torch.ones(2)}), r"adam.output.step is \[2\], needs \[\]"),
        (
            lambda t: t.update({"adam.output.exp_avg_sq": t["adam.output.exp_avg_sq"].double()}),
            "adam.output.exp_avg_sq is torch.float64, needs torch.float32",
        ),
        (lambda t: t.update({"ema.output": t["ema.output"].half()}), "ema.output is torch.float16"),
        (lambda t: t.update({"model.output": t["model.output"].half()}), "model.output is torch.float16"),
        (lambda t: t.pop("model.output_bias"), "does not fit the model: lacks 'model.output_bias'"),
        (lambda t: t.update({"model.lstm.ports": t["model.lstm.ports"] + 1}), "model.lstm.ports is of another graph"),
        (lambda t: t.pop("state.h"), "lacks 'state.h'"),
        (lambda t: [t.pop(f"state.{x}") for x in "hc"], "lacks 'state."),
        (lambda t: t.update({"state.h": t["state.h"].long()}), "state.h is torch.int64, needs torch.float32"),
        (lambda t: t.update({"random": t["random"][:-1].clone()}), r"random is \[5055\], needs \[5056\]"),
        (lambda t: t.update({"random": torch.full_like(t["random"], 255)}), "random is no state of a generator"),
        (lambda t: t.update({"recent": torch.ones(2, 2)}), r"recent is \[2, 2\]"),
    ],
)
def test_all_is_checked_before_anything_is_replaced(folder, trained, text, change, message):
    tensors, header = checkpoint.load(trained)
    change(tensors)
    checkpoint.save(folder / "changed", tensors, header)
    trainer = Trainer(TINY, SHORT, text, "cpu")
    trainer.step()
    before = state_of(trainer)
    with pytest.raises(ValueError, match=f"changed .*{message}"):
        trainer.resume(folder / "changed")
    assert same(state_of(trainer), before)


@pytest.mark.parametrize("update", [-1, 2.5, "2", True, None, 13])
def test_an_update_that_cannot_be(folder, trained, text, update):
    tensors, header = checkpoint.load(trained)
    checkpoint.save(folder / "changed", tensors, {**header, "update": update})
    trainer = Trainer(TINY, SHORT, text, "cpu")
    with pytest.raises(ValueError, match=f"changed is at update {update}, needs"):
        trainer.resume(folder / "changed")
    assert trainer.update == 0


def test_before_the_first_update_there_are_no_moments(folder, text):
    Trainer(TINY, SHORT, text, "cpu").save(folder / "start")
    trainer = Trainer(TINY, SHORT, text, "cpu")
    trainer.resume(folder / "start")
    assert trainer.update == 0
    whole = Trainer(TINY, SHORT, text, "cpu")
    assert [trainer.step() for _ in range(2)] == [whole.step() for _ in range(2)]


def test_what_an_older_header_lacks_has_the_default(folder, trained, text):
    tensors, header = checkpoint.load(trained)
    assert header["training"].pop("min_lr_ratio") == 0.05
    checkpoint.save(folder / "older", tensors, header)
    trainer = Trainer(TINY, SHORT, text, "cpu")
    trainer.resume(folder / "older")
    assert trainer.update == 2
    other = replace(SHORT, min_lr_ratio=0.1)
    with pytest.raises(ValueError, match=r"is of another training: min_lr_ratio is 0\.05, needs 0\.1$"):
        Trainer(TINY, other, text, "cpu").resume(folder / "older")
