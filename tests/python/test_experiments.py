"""The scripts of experiments/, on little data: every arm, a sweep, a second call that finds all done."""

import json
import re
from pathlib import Path

import pytest
from ranks import run_forked, run_script
from test_language_model import SHORT, TINY, sentences

from blocksparse.models.training import Trainer, read_text, train

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CONFIG = {
    "model": {"hidden": 64, "block": 8, "inner": 2, "embedding": 8},
    "training": {"updates": 4, "batch": 4, "steps": 8, "warmup": 1},
    "sweep_updates": 2,
    "valid_bytes": 400,
    "valid_streams": 4,
    "save_every": 2,
    "seeds": [0, 1],
    "arms": {
        "dense": {"model": {"hidden": 32, "graph": "", "stride": 1}, "rates": [1e-3, 1e-2]},
        "ba": {"model": {"graph": "ba(8,2)"}, "rates": [1e-2]},
    },
}


def script(name, *words):
    return run_forked(run_script, EXPERIMENTS / name, *words)


def test_configurations_name_models_of_equal_size():
    """All arms of a file have as many weights between units, but for a dense network of equal total."""
    from blocksparse import Layout

    for path in (EXPERIMENTS / "small_world_lstm" / "configs").glob("*.json"):
        config = json.loads(path.read_text())
        sizes = {}
        for arm, what in config["arms"].items():
            model = {**config["model"], **what["model"]}
            blocks = Layout.from_graph(model["graph"], model["block"], seed=0).blocks if model["graph"] else 0
            sizes[arm] = blocks * model["block"] ** 2 or model["hidden"] ** 2
        sparse = {size for arm, size in sizes.items() if "dense" not in arm}
        assert len(sparse) == 1
        assert sizes["dense"] == pytest.approx(sparse.pop(), rel=0.25)  # the small one is of equal total


def test_small_world_lstm(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_bytes(sentences(40))
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    results = tmp_path / "results.jsonl"
    words = [tmp_path / "tiny.json", "--text", tmp_path / "text", "--out", tmp_path / "out", "--results", results]
    assert script("small_world_lstm/run.py", *words, "--arms", "tree").status == 2
    first = script("small_world_lstm/run.py", *words, "--seeds", 0)
    assert first.status == 0, first.stderr
    assert script("small_world_lstm/run.py", *words).status == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted((line["arm"], line["sweep"], line["seed"]) for line in lines) == [
        ("ba", False, 0),
        ("ba", False, 1),
        ("dense", False, 0),
        ("dense", False, 1),
        ("dense", True, 0),
        ("dense", True, 0),
    ]
    best = min((line for line in lines if line["sweep"]), key=lambda line: line["valid"])["lr"]
    assert {line["lr"] for line in lines if line["arm"] == "dense" and not line["sweep"]} == {best}
    assert [len(line["curve"]) for line in lines if not line["sweep"]] == [2] * 4
    before = results.read_text()
    again = script("small_world_lstm/run.py", *words)
    assert again.status == 0
    assert again.stdout == ""
    assert results.read_text() == before
    report = script("small_world_lstm/report.py", results)
    assert report.status == 0, report.stderr
    assert results.with_suffix(".png").stat().st_size > 1000
    assert results.with_suffix(".md").read_text().count("\n") == 4
    missing = script("small_world_lstm/run.py", tmp_path / "tiny.json", "--text", tmp_path / "none", "--out", tmp_path)
    assert missing.status == 1
    assert "No such file" in missing.stderr


def test_sentiment(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_bytes(sentences(40))
    train(Trainer(TINY, SHORT, read_text([tmp_path / "text"]), "cpu"), tmp_path / "run", None)
    data = tmp_path / "data" / "sentiment"
    rows = [f"{i % 2} the {'good' if i % 2 else 'bad'} film number {i} ." for i in range(60)]
    (data / "data").mkdir(parents=True)
    (data / "data" / "custrev.all").write_text("\n".join(rows))
    (data / "openai-sst").mkdir()
    for part in ("train", "dev", "test"):
        text = "label,sentence\n" + "".join(f'{row[0]},"{row[2:]}"\n' for row in rows[:20])
        (data / "openai-sst" / f"{part}_binary_sent.csv").write_text(text)
    results = tmp_path / "results" / "tiny"
    words = ["--data", tmp_path / "data", "--results", results, "--out", tmp_path / "out", "--sets", "sst", "cr"]
    words += ["--model", f"ba={tmp_path / 'run' / 'last.safetensors'}"]
    done = script("sentiment/run.py", *words)
    assert done.status == 0, done.stderr
    lines = [json.loads(line) for line in results.with_suffix(".jsonl").read_text().splitlines()]
    assert [(line["set"], line["features"]) for line in lines] == [
        ("sst", "1- and 2-grams"),
        ("sst", "ba"),
        ("cr", "1- and 2-grams"),
        ("cr", "ba"),
    ]
    assert lines[2]["accuracy"] == 100
    assert "| ba |" in results.with_suffix(".md").read_text()
    assert re.search(r"\| CR \| 1- and 2-grams, ba \| \d+ \| 0 \| ", results.with_suffix(".md").read_text())
    assert (tmp_path / "out" / "ba-sst.png").stat().st_size > 1000
    assert "rgba(" in (tmp_path / "out" / "ba-sst.html").read_text()
    before = results.with_suffix(".jsonl").read_text()
    assert script("sentiment/run.py", *words).status == 0
    assert results.with_suffix(".jsonl").read_text() == before
    results.with_suffix(".jsonl").write_text(before + '{"set": "sst", "feat')
    some = script("sentiment/run.py", *words, "--sets", "cr", "--limit", 30, "--no-words")
    assert some.status == 0, some.stderr
    assert "1- and 2-grams" not in some.stdout  # those are of all texts
    (data / "data" / "mpqa.all").write_text("0 fine\nhmm\n")
    bad = script("sentiment/run.py", *words, "--sets", "mpqa")
    assert bad.status == 1
    assert "mpqa.all, line 2: the label is 'hmm'" in bad.stderr
