"""Compression by a language model: every byte returns, the size is what evaluation says, damage is noticed."""

import io
import json
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_language_models import SHORT, TINY, lm, sentences

from blocksparse.models.language import LanguageModel, ModelConfig, bits_per_byte, compression
from blocksparse.models.language.compression import CompressionError, Header, compress, decompress
from blocksparse.models.language.stepping import Stepper
from blocksparse.models.language.training import TrainConfig, Trainer, load_model, read_text, train

pytest.importorskip("constriction")

pytestmark = pytest.mark.usefixtures("one_thread")


DENSE = ModelConfig(40, "", inner=2, embedding=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Trained a little: probabilities that are far from even."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_bytes(sentences(600))
    config = TrainConfig(**{**SHORT.__dict__, "updates": 60, "lr": 2e-2, "ema": 0.9})
    train(Trainer(TINY, config, read_text([folder / "text"]), "cpu"), folder, None, save_every=100)
    return folder / "last.safetensors"


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint)


def test_size_is_what_evaluation_says(model):
    """Within 0.1 %, but for the header and a byte for each stream, which are a thousandth bit a byte by default."""
    text = sentences(2500, seed=2)
    streams = 64
    made = compress(model, text, streams=streams)
    header, payload = Header.unpack(made)
    assert (header.length, header.streams) == (len(text), streams)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    expected = bits_per_byte(model, data, streams)
    assert expected < 3
    assert 8 * (len(payload) - streams) / (len(text) - streams) == pytest.approx(expected, rel=1e-3)
    assert len(made) - len(payload) <= 30
    assert decompress(model, made) == text


@given(text=st.binary(max_size=300), streams=st.integers(1, 70), bf16=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_returns(model, text, streams, bf16):
    assert decompress(model, compress(model, text, streams=streams, bf16=bf16)) == text


@pytest.mark.parametrize("config", [TINY, DENSE], ids=["sparse", "dense"])
def test_awkward_texts(config):
    model = LanguageModel(config)
    for text in (b"", b"x", bytes(range(256)), b"\0" * 99, random.Random(1).randbytes(200)):
        for streams in (1, 64, None):
            assert decompress(model, compress(model, text, streams=streams)) == text
    assert len(compress(model, b"")) < 40


@given(size=st.integers(0, 3000), streams=st.sampled_from([None, 1, 200]), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_grows_by_more_than_40_bytes(model, size, streams, seed):
    """Bytes of which the model knows nothing are stored."""
    text = random.Random(seed).randbytes(size)
    made = compress(model, text, streams=streams)
    assert len(made) <= size + 40
    assert decompress(model, made) == text


def test_what_is_stored_needs_no_model(model):
    text = random.Random(5).randbytes(500)
    made = compress(model, text)
    assert Header.unpack(made)[1] == text
    assert decompress(LanguageModel(TINY), made) == text
    header, payload = Header.unpack(made)
    for other in (payload[:-1], payload + b"x", payload[:-1] + b"x"):
        with pytest.raises(CompressionError, match="describes what cannot be"):
            decompress(model, header.pack(other))


def test_impossible_bytes_cost_but_return():
    """A model that is certain, and wrong."""
    model = LanguageModel(TINY)
    with torch.no_grad():
        model.output_gain.zero_()
        model.output_bias.fill_(-200).index_fill_(0, torch.tensor([97]), 200)
    for text in (b"a" * 1000, b"b" * 40):
        made = compress(model, text, streams=4)
        assert decompress(model, made) == text
    assert len(compress(model, b"a" * 1000, streams=4)) < 60


def test_the_number_of_threads_is_that_of_the_encoder(model):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        made = compress(model, b"some text", streams=2)
        torch.set_num_threads(1)
        assert decompress(model, made) == b"some text"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(model):
    return compress(model, sentences(4), streams=3)


# ---- Bad input ------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere_is_noticed(model, small, data):
    made = bytearray(small)
    if data.draw(st.booleans()):
        made[data.draw(st.integers(0, len(made) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        made = made[: data.draw(st.integers(0, len(made) - 1))]
    with pytest.raises(CompressionError, match=r"cut or altered|no file that"):
        decompress(model, bytes(made))


def test_more_behind_the_end_is_noticed(model):
    with pytest.raises(CompressionError, match="cut or altered"):
        decompress(model, compress(model, b"text") + b"more")


def test_another_model_is_refused(model):
    other = LanguageModel(TINY)
    made = compress(model, b"text")
    with pytest.raises(CompressionError, match=r"by another model: [0-9a-f]{16}, this one is"):
        decompress(other, made)
    assert len({compression.digest_of(m) for m in (model, other, LanguageModel(DENSE))}) == 3


def test_other_bits_are_noticed(model, monkeypatch):
    """As if this were a machine that rounds in another way."""
    text = sentences(30)
    made = compress(model, text, streams=2)
    step = Stepper.__call__

    def rounded(self, x, state=None):
        logits, state = step(self, x, state)
        return logits * 1.001, state

    monkeypatch.setattr(Stepper, "__call__", rounded)
    monkeypatch.setattr(compression, "environment", lambda model: "another machine")
    with (
        pytest.warns(UserWarning, match=r"than here \(another machine\)"),
        pytest.raises(CompressionError, match="what comes out is not what went in"),
    ):
        decompress(model, made)


def test_crafted_headers(model):
    header, payload = Header.unpack(compress(model, b"text"))
    for change in ({"streams": 0}, {"streams": 9}, {"threads": 0}, {"threads": 65535}, {"length": 1 << 60}):
        crafted = Header(**{**header.__dict__, **change}).pack(payload)
        with pytest.raises(CompressionError, match="describes what cannot be"):
            decompress(model, crafted)
    with pytest.raises(CompressionError, match="needs a multiple of 4"):
        decompress(model, header.pack(payload + b"x"))
    with pytest.raises(CompressionError, match="not what went in"):
        decompress(model, Header(**{**header.__dict__, "length": 400}).pack(payload))


def test_bad_models_and_options(model):
    with pytest.raises(ValueError, match="streams is 0, needs 1 to 65536"):
        compress(model, b"text", streams=0)
    broken = LanguageModel(TINY)
    with torch.no_grad():
        broken.output_bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="gives no probabilities"):
        compress(broken, b"text")


def test_command_line(checkpoint, tmp_path, capsys):
    text = sentences(40)
    (tmp_path / "a.txt").write_bytes(text)
    assert lm("compress", checkpoint, tmp_path / "a.txt") == 0
    said = json.loads(capsys.readouterr().out)
    small = tmp_path / "a.txt.bslm"
    assert said == {
        "file": str(small),
        "bytes": len(text),
        "compressed": small.stat().st_size,
        "bits_per_byte": round(8 * small.stat().st_size / len(text), 4),
    }
    assert lm("decompress", checkpoint, small) == 2
    assert "is there already: --force" in capsys.readouterr().err
    (tmp_path / "a.txt").write_bytes(b"what was there")
    assert lm("decompress", checkpoint, small, "--force") == 0
    assert (tmp_path / "a.txt").read_bytes() == text
    assert lm("decompress", checkpoint, tmp_path / "a.txt") == 2
    assert "does not end with .bslm" in capsys.readouterr().err
    assert lm("decompress", checkpoint, tmp_path / "a.txt", "-o", tmp_path / "b") == 2
    assert "is no file that" in capsys.readouterr().err
    assert lm("compress", checkpoint, tmp_path / "none") == 2
    assert "No such file" in capsys.readouterr().err
    small.write_bytes(small.read_bytes()[:-1])
    assert lm("decompress", checkpoint, small, "-o", tmp_path / "b") == 2
    assert "cut or altered" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "a.txt.bslm"]


def blocksparse_lm(*words, data=b"", **how):
    """Of another process, whose standard streams are what they are."""
    command = [sys.executable, "-m", "blocksparse", "lm", *map(str, words)]
    return subprocess.run(command, input=data, capture_output="stdout" not in how, **how)


@pytest.mark.parametrize(("source", "target"), [("a.txt", "-"), ("-", "/dev/stdout"), ("-", None)])
def test_standard_streams(checkpoint, tmp_path, source, target, capsysbinary, monkeypatch):
    text = sentences(10)
    (tmp_path / "a.txt").write_bytes(text)
    made = text
    for command in ("compress", "decompress"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(made)))
        (tmp_path / "small.bslm").write_bytes(made)
        file = {"compress": source, "decompress": "-" if source == "-" else "small.bslm"}[command]
        assert lm(command, checkpoint, file, *(() if target is None else ("-o", target))) == 0
        made, said = capsysbinary.readouterr()
        about = json.loads(said)  # beside what is made, on standard error
        assert about["bytes"] == len(text)
        assert about["file"] == "-"
    assert made == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "small.bslm"]


def test_a_pipe_and_a_redirection(checkpoint, tmp_path):
    """What a shell does: `compress ... -o /dev/stdout < a > b`, then `decompress ... - | cat`."""
    text = sentences(10)
    with open(tmp_path / "small", "wb") as small:
        done = blocksparse_lm("compress", checkpoint, "-", "-o", "/dev/stdout", data=text, stdout=small)
    assert done.returncode == 0
    done = blocksparse_lm("decompress", checkpoint, "-", data=(tmp_path / "small").read_bytes())
    assert done.returncode == 0, done.stderr
    assert done.stdout == text
    assert json.loads(done.stderr)["bytes"] == len(text)


def test_devices_need_no_force(checkpoint, tmp_path, capsys):
    (tmp_path / "a").write_bytes(b"text")
    assert lm("compress", checkpoint, tmp_path / "a", "-o", "/dev/null") == 0
    capsys.readouterr()
    assert lm("compress", checkpoint, tmp_path / "a", "-o", "/dev/full") == 2
    assert capsys.readouterr().err == (
        "blocksparse: [lm] /dev/full could not be written: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize("command", ["compress", "decompress"])
@pytest.mark.parametrize("place", [".", "..", "/", "sub"])
def test_a_folder_is_no_file(checkpoint, tmp_path, capsys, monkeypatch, command, place):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    assert lm(command, checkpoint, place) == 2
    assert capsys.readouterr().err == f"blocksparse: [lm] {place} is a folder, needs to be a file\n"


def test_a_folder_is_no_checkpoint(checkpoint, tmp_path, capsys):
    (tmp_path / "a").write_bytes(b"text")
    assert lm("compress", checkpoint.parent, tmp_path / "a") == 2
    said = capsys.readouterr().err
    assert said == f"blocksparse: [lm] {checkpoint.parent} is a folder, needs a checkpoint, as {checkpoint} is\n"
    assert lm("compress", tmp_path, tmp_path / "a") == 2
    assert f"[lm] {tmp_path} is a folder, needs a checkpoint\n" in capsys.readouterr().err
