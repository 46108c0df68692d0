"""The language model and its command line, on text that is made here."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_torch_averages import as_of_version_01
from tiny_language_models import SHORT, TINY, lm, same, sentences, weights

from blocksparse import Layout
from blocksparse.models import checkpoint
from blocksparse.models.language import PRESETS, LanguageModel, ModelConfig, bits_per_byte, chunks, sample
from blocksparse.models.language.stepping import Stepper
from blocksparse.models.language.training import TrainConfig, Trainer, load_model, read_text, train
from blocksparse.models.sentiment.features import cell_states

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(sentences(600))
    return path


def test_checkpoints_of_version_01(text, tmp_path):
    """Whose layouts and ports are integers."""
    trainer = Trainer(TINY, SHORT, read_text([text]), "cpu")
    train(trainer, tmp_path, None, save_every=4, until=4)
    tensors, header = checkpoint.load(tmp_path / "last.safetensors")
    old = {f"model.{k}": v for k, v in as_of_version_01(trainer.model).items()}
    assert sum(v.dtype == torch.int32 for v in old.values()) == 3
    assert old["model.lstm.ports"].dtype == torch.int64
    checkpoint.save(tmp_path / "old", {**tensors, **old}, header)
    new, model = (load_model(tmp_path / name) for name in ("last.safetensors", "old"))
    assert same(model.state_dict(), new.state_dict())
    again = Trainer(TINY, SHORT, read_text([text]), "cpu")
    again.resume(tmp_path / "old")
    assert same(weights(again), weights(trainer))


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
    made = sample(load_model(str(out / "last.safetensors")), b"the ", 200, 0.5).decode()
    known = {"the", "a", "every", "red", "small", "sparse", "block", "graph", "wolf", "sees", "is", "eats"}
    found = [word.strip(".") in known for word in made.split(" ")[1:-1]]
    assert sum(found) > 0.6 * len(found)


SIZES = [
    "dense-1120",
    "ba-5600",
    "ws-5600",
    "dense-3168",
    "ba-18432",
    "ba-18432-b64",
    "ws-18432-b64",
    "random-18432-b64",
]


@pytest.mark.parametrize("name", SIZES)
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
    has_neighbours = name.startswith(("ws-18432", "random-18432"))  # every node has eight, and itself
    of_neighbours = 2592 / 2448 if has_neighbours else 1
    assert (4 + config.inner) * weights == expected[config.hidden] * of_neighbours
    if name in ("dense-1120", "ba-5600"):
        model = LanguageModel(config)
        assert sum(p.numel() for p in model.parameters()) == expected[config.hidden] + beside_the_matrices(config)


def beside_the_matrices(config):
    """Parameters of input, output, gains and shifts."""
    ports = config.hidden // config.stride
    return 6 * 64 * ports + 256 * 64 + 2 * (config.inner + 4) * config.hidden + 4 * ports + 3 * 256


def test_presets_of_two_matrices_have_as_many_parameters():
    """As many as the dense one of two matrices, and that as many as of six; the sparse ones up to 9 % fewer."""
    totals = {}
    for name in ("dense-3168", "dense-4080", "ba-18432-inner2", "balanced-8192-b128", "balanced-18432-b128"):
        config = PRESETS[name]
        weights = config.hidden**2
        if config.graph:
            weights = Layout.from_graph(config.graph, config.block, seed=0).blocks * config.block**2
        totals[name] = (config.inner + 4) * weights + beside_the_matrices(config)
    assert totals.pop("dense-3168") == 101_671_936
    assert list(totals.values()) == [101_527_552, 101_663_488, 97_665_792, 92_324_608]


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        (("small", "dense-small"), [615_168, 614_688]),
        (("balanced-2816-b64", "dense-1440"), [13_038_336, 13_034_752]),
    ],
)
def test_twins_of_small_presets_have_as_many_parameters(names, counts):
    sparse, dense = (LanguageModel(PRESETS[name]) for name in names)
    assert [sum(p.numel() for p in model.parameters()) for model in (sparse, dense)] == counts
    assert sparse.lstm.gates.layout.density == 1 / 4


def test_sample(tmp_path):
    model = LanguageModel(TINY)
    assert sample(model, b"ab", 20, seed=3) == sample(model, b"ab", 20, seed=3)
    assert sample(model, b"ab", 20, seed=3) != sample(model, b"ab", 20, seed=4)
    assert sample(model, b"ab", 9, 0.0, seed=3) == sample(model, b"ab", 9, 0.0, seed=4)
    with pytest.raises(ValueError, match="prompt is empty, needs a byte or more"):
        sample(model, b"", 3)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, stride=1),
        ModelConfig(40, "", inner=2, embedding=8, stride=3),
        ModelConfig(12, "", inner=2, embedding=8),
    ],
)
def test_byte_by_byte_as_at_once(config):
    model = LanguageModel(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    text = torch.randint(0, 256, (6, 3))
    step, state, made = Stepper(model), None, []
    for t in range(len(text)):
        logits, state = step(text[t : t + 1], state)
        made.append(logits)
    want, (h, c) = model(text)
    assert (torch.cat(made) - want).abs().max() < 1e-12
    assert (state[0] - h[0]).abs().max() < 1e-12
    assert (state[1] - c[0]).abs().max() < 1e-12
    assert not state[1].requires_grad
    for wrong in (-1, 256):
        with pytest.raises(IndexError):
            step(torch.tensor([[wrong]]))


@pytest.mark.parametrize("training", [True, False])
def test_reading_a_model_leaves_its_mode(training):
    model = LanguageModel(TINY).train(training)
    sample(model, b"ab", 2)
    bits_per_byte(model, torch.zeros(9, dtype=torch.uint8), 1)
    cell_states(model, [b"ab"])
    assert model.training == training


def test_importing_the_package_does_not_import_torch():
    code = "import sys, blocksparse.__main__ as m; m.main(['report', 'ba(8,2)']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
