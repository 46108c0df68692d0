"""The demo of examples/demo: its network against plain formulas, its text, and that it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from smallworld import arms, data, report, train  # noqa: E402
from smallworld.arms import KINDS, Settings  # noqa: E402
from smallworld.model import GATES, Model, Shape, count_parameters  # noqa: E402
from smallworld.store import Store  # noqa: E402

import demo  # noqa: E402
from blocksparse import graphs  # noqa: E402
from blocksparse.torch import from_dense  # noqa: E402

model_module = importlib.import_module("smallworld.model")
SMALL = Settings(width=112, links=3, inner=3, rows=4, time=8, test=1 << 10)
SPARSE = [kind for kind in KINDS.values() if kind.graph]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained_a_little(kind: arms.Kind) -> Model:
    """A network in float64 whose weights are no longer special."""
    model = arms.make(kind, SMALL).model(seed=3).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def some_text(time: int, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(32, 127, (time, rows), generator=torch.Generator().manual_seed(seed))


# ---- The network -----------------------------------------------------------------------------------------------------


def plain(model: Model, weights: list[torch.Tensor], text: torch.Tensor) -> torch.Tensor:
    """The logits [time, n, 256] by the formulas, with dense matrices, and a layer norm for each gate of its own."""

    def norm(x, gain, shift):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain + shift

    unit = model.embedding / model.embedding.norm(dim=1, keepdim=True) * model.embedding_gain
    rows = model.output / model.output.norm(dim=1, keepdim=True) * model.output_gain
    lstm, (h, c) = model.lstm, model.start(text.size(1))
    logits = []
    for symbols in text:
        m, a = (norm(unit[symbols] @ lstm.input[k].t(), *lstm.input_norm[k]) for k in (0, 1))
        for j in range(model.shape.inner):
            h = norm(h @ weights[j].t(), *lstm.matrix_norm[j])
            if j == 0:
                h = h * m
            if j == 1:
                h = h + a
            h = h if j == 0 else h.clamp(min=0)
        z = [norm(h @ w.t(), *lstm.gate_norm[:, k]) for k, w in enumerate(weights[-1].chunk(GATES))]
        c = z[1].sigmoid() * c + z[0].sigmoid() * z[2].tanh()
        h = z[3].sigmoid() * c.tanh()
        logits.append(h @ rows.t() + model.output_bias)
    return torch.stack(logits)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_model_is_its_formulas(kind: arms.Kind) -> None:
    model, text = trained_a_little(kind), some_text(time=5, rows=3)
    layers = [*model.lstm.matrices, model.lstm.gates]
    sparse = [layer if isinstance(layer, torch.nn.Linear) else layer.to_dense() for layer in layers]
    weights = [layer.weight.detach().clone().requires_grad_() for layer in sparse]
    others = {name: p for name, p in model.named_parameters() if name.split(".")[1:2] not in (["matrices"], ["gates"])}

    expected = plain(model, weights, text)
    scale = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_gradients = torch.autograd.grad((expected * scale).sum(), [*weights, *others.values()])
    logits, _ = model(text, model.start(3))
    gradients = torch.autograd.grad((logits * scale).sum(), [*(layer.weight for layer in layers), *others.values()])

    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert (logits.abs() > 1e-3).double().mean() > 0.9
    for layer, got, want in zip(layers, gradients, expected_gradients, strict=False):
        if not isinstance(layer, torch.nn.Linear):
            want = from_dense(want, layer.layout)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
        assert got.abs().max() > 1e-3
    for name, got, want in zip(others, gradients[len(layers) :], expected_gradients[len(layers) :], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_starts_as_the_identity(kind: arms.Kind) -> None:
    model = arms.make(kind, SMALL).model(seed=1)
    h = torch.randn(3, model.shape.width)
    for layer in model.lstm.matrices:
        torch.testing.assert_close(layer(h), h, rtol=0, atol=0)
    torch.testing.assert_close(model.lstm.gates(h), h.repeat(1, GATES), rtol=0, atol=0)


def test_chunks_carry_the_state() -> None:
    model, text = trained_a_little(KINDS["ba"]), some_text(time=12, rows=3)
    whole, (h, c) = model(text, model.start(3))
    state, parts = model.start(3), []
    for chunk in text.split((4, 1, 7)):
        logits, state = model(chunk, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, (h, c), rtol=1e-12, atol=1e-12)


def test_only_the_forget_gate_has_a_shift_at_first() -> None:
    model = arms.make(KINDS["ba"], SMALL).model(seed=1)
    assert model.lstm.gate_norm[1, 1].eq(1).all()
    assert model.lstm.gate_norm[1].sum() == SMALL.width


# ---- Parameters and graphs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [Settings(), demo.QUICK, SMALL], ids=["full", "quick", "small"])
def test_arms_have_as_many_parameters(settings: Settings) -> None:
    chosen = {name: arms.make(kind, settings) for name, kind in KINDS.items()}
    nodes, degree = settings.width // settings.block, 2 * settings.links + 1
    for name, arm in chosen.items():
        assert sum(p.numel() for p in arm.model(seed=0).parameters()) == arm.parameters
        assert abs(arm.parameters / chosen["ba"].parameters - 1) < 0.01
        if name != "dense":
            assert arm.layouts is not None
            assert [layout.blocks for layout in arm.layouts] == [nodes * degree] * (settings.inner + 1)


def test_count() -> None:
    """1152 dense units, D = 6."""
    dense = count_parameters(Shape(1152, inner=6))
    assert dense == 10 * 1152**2 + 2 * 64 * 1152 + 256 * 1152 + 256 * 64 + 20 * 1152 + 4 * 1152 + 3 * 256
    assert count_parameters(Shape(1152, inner=6), 32**2) == dense - 10 * (1152**2 - 32**2)


@pytest.mark.parametrize("kind", SPARSE, ids=[kind.name for kind in SPARSE])
def test_graphs(kind: arms.Kind) -> None:
    layouts, again = (arms.make(kind, Settings()).layouts for _ in range(2))
    assert layouts is not None
    assert layouts == again
    rewired = kind.name != "diagonal"
    assert (len(set(layouts)) == len(layouts)) == rewired, "a fresh graph for each matrix, where there is chance in it"
    about = graphs.report(layouts[0])
    assert (about.unreachable == 0) == rewired
    if rewired:
        assert about.mean_path < 5
        shared = graphs.mix([layouts[0]] * about.diameter)
        assert shared[-1] == 1
        assert shared[-2] < 1
        assert arms.make(kind, Settings()).mix[-1] > 0.99
    else:
        assert arms.make(kind, Settings()).mix == pytest.approx([17 / 68] * 3)


# ---- The text --------------------------------------------------------------------------------------------------------


def test_standard_library() -> None:
    files = data.standard_library()
    assert files == data.standard_library()
    names = {file.name for file in files}
    assert {"argparse.py", "decoder.py"} <= names
    assert not any({"test", "site-packages"} & set(file.parts[-3:]) for file in files)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no such file"), (b"", "the file is empty"), (b"short", "has 5 bytes, needs at least")],
    ids=["missing", "empty", "short"],
)
def test_bad_text_is_told(content, message, tmp_path, capsys, monkeypatch) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--quick", "--text", str(file), "--out", str(tmp_path / "out")])
    assert demo.main() == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("error: ")


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(data.TextError, match="cannot be read"):
        data.read_files([tmp_path])


def test_split_and_batches(tmp_path: Path) -> None:
    rows, time = 3, 4
    text = bytes(i % 251 for i in range(2000))
    split = data.Split.of(len(text), rows, time, test=150)
    data.save(text, tmp_path / "text.bin")
    train_text, test_text = data.load(tmp_path / "text.bin", split)
    assert bytes(train_text) + bytes(test_text) == text
    assert len(test_text) == 150
    batches = data.Batches(train_text, rows, time)
    for number in range(batches.count):
        batch = batches[number]
        assert batch.shape == (time + 1, rows)
        start = number * time
        assert bytes(batch[:, 1].byte()) == text[616 + start : 616 + start + time + 1]  # 1850 // 3 bytes a row
        assert batches.starts_over(number) == (number == 0)
    assert torch.equal(batches[batches.count], batches[0])
    assert batches.starts_over(batches.count)


# ---- Training --------------------------------------------------------------------------------------------------------


def job_in(folder: Path, text: bytes, kind: str = "ba", settings: Settings = SMALL, steps: int = 6) -> train.Job:
    folder.mkdir(parents=True, exist_ok=True)
    split = data.Split.of(len(text), settings.rows, settings.time, settings.test)
    job = train.Job(kind, settings, split, steps, folder, "one")
    data.save(text, job.text)
    return job


@pytest.mark.parametrize("kind", ["ba", "dense"])
def test_resumed_is_bit_equal(kind: str, tmp_path: Path) -> None:
    text = data.read_files([Path(data.__file__)])
    whole, sliced = (job_in(tmp_path / name, text, kind) for name in ("whole", "sliced"))
    assert train.train(whole, seconds=1e9).done
    slices = 1
    while not train.train(sliced, seconds=0).done:
        slices += 1
    assert slices == whole.steps
    a, b = train.Run.load(whole), train.Run.load(sliced)
    assert a.bits == b.bits
    assert a.test == b.test
    assert a.sample == b.sample
    for (name, p), (_, q) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert all(map(torch.equal, a.state, b.state))


def test_another_job_starts_anew(tmp_path: Path) -> None:
    job = job_in(tmp_path, data.read_files([Path(data.__file__)]))
    train.train(job, seconds=0)
    assert len(train.Run.load(job).bits) == 1
    assert train.Run.load(dataclasses.replace(job, identity="two")).bits == []


def test_learns(tmp_path: Path) -> None:
    """After a moment the next byte costs less than it would by the frequencies of bytes alone."""
    text = data.read_files([Path(train.__file__), Path(report.__file__), Path(model_module.__file__)] * 4)
    settings = dataclasses.replace(SMALL, width=56, inner=2, rows=16, time=8)
    counts = Counter(text)
    entropy = -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())
    for kind in ("ba", "dense"):
        job = job_in(tmp_path / kind, text, kind, settings, steps=60)
        train.train(job, seconds=1e9)
        bits = train.Run.load(job).bits
        assert bits[0] > 6
        assert train.smooth(bits)[-1] < entropy - 0.2


def test_rate() -> None:
    rates = [train.rate_at(step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(1, abs=0.05)
    assert rates[0] < 0.15
    assert rates[-1] == pytest.approx(train.LAST_RATE, abs=0.01)


def test_store(tmp_path: Path) -> None:
    made = []

    def make() -> int:
        made.append(1)
        return 7

    assert [Store(tmp_path, {"width": 8}).once("x", make) for _ in range(2)] == [7, 7]
    assert len(made) == 1
    other = Store(tmp_path, {"width": 16})
    assert other.changed == ["width 8 -> 16"]
    assert other.once("x", make) == 7
    assert len(made) == 2
    (tmp_path / "demo.json").write_text("damaged")
    assert Store(tmp_path, {"width": 16}).results == {}


def test_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = data.read_files([Path(data.__file__)])
    jobs = [job_in(tmp_path / "state", text, kind, steps=2) for kind in KINDS]
    for job in jobs:
        train.train(job, seconds=1e9)
    wide = arms.as_wide(SMALL)
    seconds = {**dict.fromkeys(KINDS, 0.1), wide.kind.name: 0.3}
    speed_ups = [[b, density, 1 / density, 0.5 / density] for b in (8, 32) for density in (0.02, 0.1, 0.5)]
    runs = [train.Run.load(job) for job in jobs]
    page = report.write(report.Results(SMALL, "<text>", len(text), runs, wide, seconds, speed_ups), tmp_path)
    for name in ("curves.png", "layouts.png", "speed.png", "table.txt"):
        assert (tmp_path / name).stat().st_size > 100
    content = page.read_text()
    assert "&lt;text&gt;" in content
    assert "$width" not in content
    assert all(kind.title in content for kind in KINDS.values())
