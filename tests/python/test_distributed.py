"""Two processes on the CPU train what one trains."""

import json

import pytest
import torch
from ranks import run_package, run_program, run_ranks
from tiny_language_models import SHORT, SIZE, TINY, lm, sentences

from blocksparse.models import checkpoint
from blocksparse.models.distributed import World
from blocksparse.models.language import LanguageModel, bits_per_byte
from blocksparse.models.language.training import TrainConfig, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ["--updates", 8, "--batch", 8, "--steps", 16, "--lr", 1e-3, "--warmup", 4, "--save-every", 4]


def two(*words, model="lm"):
    """The command line in two processes."""
    return run_ranks(run_package, model, "train", "--device", "cpu", *words)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(sentences(200))
    return path


def test_two_processes_are_as_one(text, tmp_path):
    """Weights, average, state, log: up to rounding. Half of it is done by two, which one goes on with."""
    words = ["--text", text, *SIZE, *HOW]
    assert lm("train", *words, "--out", tmp_path / "one", "--device", "cpu") == 0
    ended = two(*words, "--out", tmp_path / "two")
    assert [one.status for one in ended] == [0, 0], ended
    assert [one.stdout.count("last.safetensors") for one in ended] == [1, 0]  # one of them reports
    assert [ended.status for ended in two(*words, "--out", tmp_path / "parts", "--until", 4)] == [0, 0]
    assert lm("train", *words, "--out", tmp_path / "parts", "--resume", "--device", "cpu") == 0
    expected, header = checkpoint.load(tmp_path / "one" / "last.safetensors")
    start = LanguageModel(TINY).state_dict()
    for name in ("two", "parts"):
        made, made_header = checkpoint.load(tmp_path / name / "last.safetensors")
        assert header == made_header
        assert made.keys() == expected.keys()
        for key, tensor in expected.items():
            if key.startswith(("model.", "ema.", "state.")) and tensor.is_floating_point():
                torch.testing.assert_close(made[key], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
        logs = [[json.loads(x) for x in (tmp_path / f / "log.jsonl").read_text().splitlines()] for f in ("one", name)]
        for a, b in zip(*logs, strict=True):
            assert (a["update"], a["bytes"]) == (b["update"], b["bytes"])
            assert (a["train"], a["valid"]) == pytest.approx((b["train"], b["valid"]), abs=2e-4)
    moved = [(expected[f"model.{k}"] - v).abs().max() for k, v in start.items() if f"ema.{k}" in expected]
    assert min(moved) > 1e-3  # what is compared is what was trained


STOPPED_IN_AN_EVALUATION = """
import os, signal, sys
from blocksparse import __main__
from blocksparse.models.language.training import Trainer
evaluate = Trainer.evaluate
def and_stop(*arguments):
    if os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    return evaluate(*arguments)
Trainer.evaluate = and_stop
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_the_log_of_two_processes_of_which_one_was_stopped(text, tmp_path):
    """In an evaluation, which both make up for."""
    words = ["--text", text, *SIZE, *HOW, "--resume", "--valid", text, "--out", tmp_path / "out"]
    stopped = run_ranks(run_program, STOPPED_IN_AN_EVALUATION, "lm", "train", "--device", "cpu", *words)
    assert all(ended.status for ended in stopped), stopped
    (line,) = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    assert (line["update"], "valid" in line, line["stopped"]) == (4, False, True)
    assert [ended.status for ended in two(*words)] == [0, 0]
    log = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [(x["update"], "valid" in x, "stopped" in x) for x in log] == [(4, True, False), (8, True, False)]
    assert log[0] == {k: v for k, v in line.items() if k != "stopped"} | {"valid": log[0]["valid"]}


def test_uneven_batches_are_refused(text, tmp_path):
    for ended in two("--text", text, *SIZE, *HOW, "--batch", 7, "--out", tmp_path / "out"):
        assert ended.status != 0
        assert "batch is 7, needs a multiple of the 2 processes" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_parts():
    assert World(1, 4).part(8, "batch") == slice(2, 4)
    with pytest.raises(ValueError, match="batch is 6, needs a multiple of the 4 processes"):
        World(1, 4).part(6, "batch")
    data = torch.frombuffer(bytearray(sentences(30)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="needs a multiple of the 3 processes"):
        Trainer(TINY, TrainConfig(**{**SHORT.__dict__}), data, "cpu", World(0, 3))


def test_shared_evaluation(monkeypatch):
    """The sums of both shares are those of one process, also where there are fewer streams than processes."""
    model = LanguageModel(TINY).double()
    data = torch.frombuffer(bytearray(sentences(5)), dtype=torch.uint8)
    sums = []
    monkeypatch.setattr(World, "sum", lambda self, values: sums.append(values.clone()) or values.clamp(min=1))
    for streams in (5, 1):
        sums.clear()
        for rank in range(2):
            bits_per_byte(model, data, streams, world=World(rank, 2))
        shared = sum(sums)
        bits_per_byte(model, data, streams)
        torch.testing.assert_close(shared, sums[-1])
