"""A file of a language model alone: as good as the checkpoint, a quarter of its size or less, nothing to go on from."""

import json

import pytest
import torch
from tiny_language_models import SHORT, TINY, lm, same, sentences, trained_in

from blocksparse.models import checkpoint
from blocksparse.models.language import Trainer, compress, decompress, load_model, read_text, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trained_in(folder, until=2)
    return folder


def said(capsys):
    return json.loads(capsys.readouterr().out)


def test_export_is_the_model_of_the_checkpoint(folder, tmp_path, capsys):
    last, out = folder / "last.safetensors", tmp_path / "model.safetensors"
    assert lm("export", last, "-o", out) == 0
    model = load_model(last)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert said(capsys) == {"file": str(out), "parameters": parameters, "bytes": out.stat().st_size}
    assert out.stat().st_size < last.stat().st_size / 3
    assert load_model(out).config == TINY
    assert same(load_model(out).state_dict(), model.state_dict())
    text = sentences(30)
    assert compress(load_model(out), text) == compress(model, text)
    evaluated = []
    for path in (last, out):
        assert lm("eval", path, "--text", folder / "text", "--batch", 4) == 0
        evaluated.append(said(capsys))
    assert evaluated[0] == evaluated[1]


def test_export_of_bf16(folder, tmp_path, capsys):
    last, out, whole = (folder / "last.safetensors", tmp_path / "small", tmp_path / "whole")
    assert lm("export", last, "-o", out, "--bf16") == 0
    assert lm("export", last, "-o", whole) == 0
    given, found = load_model(last).state_dict(), load_model(out).state_dict()
    buffers = {name for name, _ in load_model(last).named_buffers()}
    for name, tensor in given.items():
        rounded = tensor.ndim > 1 and name not in buffers
        assert torch.equal(found[name], tensor.bfloat16().to(tensor.dtype) if rounded else tensor), name
    matrices = sum(tensor.numel() for name, tensor in given.items() if tensor.ndim > 1 and name not in buffers)
    assert whole.stat().st_size - out.stat().st_size == pytest.approx(2 * matrices, abs=64)
    text = sentences(30)
    assert decompress(load_model(out), compress(load_model(out), text)) == text
    again = tmp_path / "again"
    save_model(again, load_model(out), bf16=True)
    assert same(load_model(again).state_dict(), found)
    capsys.readouterr()


def test_training_does_not_go_on_from_an_export(folder, tmp_path, capsys):
    out = tmp_path / "run" / "last.safetensors"
    out.parent.mkdir()
    assert lm("export", folder / "last.safetensors", "-o", out) == 0
    with pytest.raises(ValueError, match="describes no training"):
        Trainer(TINY, SHORT, read_text([folder / "text"]), "cpu").resume(out)
    capsys.readouterr()


def test_export_loses_no_file(folder, tmp_path, capsys):
    last, out = folder / "last.safetensors", tmp_path / "model.safetensors"
    before = last.read_bytes()
    out.write_bytes(b"precious")
    for words, message in (
        ((last, "-o", last), "needs to be another file"),
        ((last, "-o", out), "--force overwrites it"),
        ((last, "-o", tmp_path), "is a folder"),
        ((last, "-o", "-"), "--out is -, needs a file"),
        ((last, "-o", "/dev/null"), "--out is /dev/null, needs a file"),
        ((out, "-o", tmp_path / "other"), f"{out} is"),
    ):
        assert lm("export", *words) == 2
        assert message in capsys.readouterr().err
    assert (last.read_bytes(), out.read_bytes()) == (before, b"precious")
    assert lm("export", last, "-o", out, "--force") == 0
    assert checkpoint.load_header(out) == {"model": checkpoint.load_header(last)["model"]}
    capsys.readouterr()
