"""A training that goes on with another number of updates."""

import pytest
from tiny_language_models import SHORT, SIZE, TINY, lm, sentences

from blocksparse.models import checkpoint
from blocksparse.models.language.config import TrainConfig
from blocksparse.models.language.training import Trainer, read_text, train

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ["--batch", 8, "--steps", 16, "--lr", 4e-3, "--warmup", 2, "--device", "cpu"]


@pytest.fixture
def words(tmp_path):
    (tmp_path / "text").write_bytes(sentences(600))
    return ["train", "--text", tmp_path / "text", "--out", tmp_path / "out", *SIZE, *HOW]


@pytest.fixture
def last(tmp_path):
    return tmp_path / "out" / "last.safetensors"


def test_a_finished_training_is_extended(words, last, capsys):
    assert lm(*words, "--updates", 6) == 0
    capsys.readouterr()
    assert lm(*words, "--updates", 9, "--resume") == 0
    said = capsys.readouterr().out
    assert "the schedule is of 9 updates now, of 6 until here" in said
    assert "learning rate 0.000756 at update 6, 0.00168 at 7, 0.000388 at 9" in said
    header = checkpoint.load(last)[1]
    assert (header["update"], header["training"]["updates"]) == (9, 9)
    assert lm(*words, "--updates", 9, "--resume") == 0
    said = capsys.readouterr().out
    assert "schedule" not in said
    assert "all 9 updates are done: --updates with a larger number goes on" in said


def test_the_number_of_updates_is_the_checkpoints_unless_it_is_given(words, last, capsys):
    assert lm(*words, "--updates", 6, "--until", 3) == 0
    assert lm(*words, "--resume") == 0
    assert "schedule" not in capsys.readouterr().out
    assert checkpoint.load(last)[1]["update"] == 6


def test_a_running_one_gets_another_end(words, last, capsys):
    """As one whose updates are fewer, too, but not than are done."""
    assert lm(*words, "--updates", 6, "--until", 3) == 0
    assert lm(*words, "--updates", 4, "--resume") == 0
    assert "of 4 updates now, of 6 until here: learning rate" in capsys.readouterr().out
    before = last.read_bytes()
    assert lm(*words, "--updates", 3, "--resume") == 2
    assert "last.safetensors has done 4 updates, needs --updates 4 or more" in capsys.readouterr().err
    assert last.read_bytes() == before


def test_other_changes_are_refused(words, last, capsys):
    assert lm(*words, "--updates", 6, "--until", 3) == 0
    assert lm(*words, "--updates", 9, "--clip", 2, "--resume") == 2
    assert "is of another training: clip is 1.0, needs 2.0\n" in capsys.readouterr().err


def test_in_a_program_it_is_asked_for(words, last):
    text = read_text([words[2]])
    train(Trainer(TINY, SHORT, text, "cpu"), last.parent, None, until=2)
    longer = TrainConfig(**{**SHORT.__dict__, "updates": 20})
    with pytest.raises(ValueError, match="is of another training: updates is 12, needs 20"):
        Trainer(TINY, longer, text, "cpu").resume(last)
    trainer = Trainer(TINY, longer, text, "cpu")
    assert trainer.resume(last, other_updates=True) == 12
    assert trainer.update == 2
    assert trainer.rate() == longer.rate(2)


def test_the_rate_rises_and_falls_to_its_share():
    config = TrainConfig(updates=12, lr=2.0, warmup=2, min_lr_ratio=0.25)
    rates = [config.rate(update) for update in range(13)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[7] == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.5)
