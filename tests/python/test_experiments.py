"""The scripts of experiments/, on little data: every arm, a sweep, a second call that finds all done."""

import json
import math
import os
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_forked, run_script
from tiny_language_models import SHORT, TINY, sentences

from blocksparse.models.language import LanguageModel, ModelConfig, bits_per_byte
from blocksparse.models.language.training import Trainer, load_model, read_text, train

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


SWEPT = ("lr", "warmup", "min_lr_ratio")


def script(name, *words):
    return run_forked(run_script, EXPERIMENTS / name, *words)


def size(model):
    """Weights between units, and all parameters, of a language model."""
    from blocksparse import Layout

    hidden, symbols, embedding = model["hidden"], 256, model.get("embedding", 64)
    weights = hidden**2
    if model["graph"]:
        layout = Layout.from_graph(model["graph"], model["block"], seed=0)
        rows, columns = layout.coordinates()
        assert layout.in_features == hidden
        assert (rows == columns).sum() == hidden // model["block"]  # matrices begin as identities
        weights = layout.blocks * model["block"] ** 2
    ports, matrices = math.ceil(hidden / model["stride"]), 4 + model["inner"]
    others = ports * (2 * embedding + symbols + 4) + symbols * (embedding + 3) + 2 * matrices * hidden
    return matrices * weights, matrices * weights + others


def test_configurations_name_models_of_equal_size():
    """Each arm has as many weights between units as another, to 6 %, or as many parameters in all, to 1 %.

    Or it has up to 10 % fewer parameters than dense: rows of large blocks grow by a whole block.
    """
    for path in (EXPERIMENTS / "small_world_lstm" / "configs").glob("*.json"):
        config = json.loads(path.read_text())
        sizes = {arm: size(config["model"] | what["model"]) for arm, what in config["arms"].items()}
        for arm, (weights, parameters) in sizes.items():
            others = [its for other, its in sizes.items() if other != arm]
            as_heavy = any(weights == pytest.approx(its[0], rel=0.06) for its in others)
            as_large = any(parameters == pytest.approx(its[1], rel=0.01) for its in others)
            assert as_heavy or as_large or 0.9 < parameters / sizes["dense"][1] < 1, arm
        assert sizes["dense"][1] < 1.11 * min(its[1] for its in sizes.values())
        trials = {max(config.get("trials", 0), len(what["rates"])) for what in config["arms"].values()}
        assert "trials" not in config or len(trials) == 1


def test_size_of_a_model():
    """By hand, beside the parameters that there are."""
    for model in ({**CONFIG["model"], "graph": "ba(8,2)", "stride": 2}, {"hidden": 32, "graph": "", "inner": 2}):
        model = {"block": 8, "stride": 1, "embedding": 8, **model}
        made = LanguageModel(ModelConfig(**model))
        assert size(model)[1] == sum(parameter.numel() for parameter in made.parameters())


def test_small_world_lstm(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_bytes(sentences(40))
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    results = tmp_path / "results.jsonl"
    words = [tmp_path / "tiny.json", "--text", tmp_path / "text", "--out", tmp_path / "out", "--results", results]
    assert script("small_world_lstm/run.py", *words, "--arms", "tree").status == 2
    stopped = script("small_world_lstm/run.py", *words, "--minutes", 0)
    assert stopped.status == 0, stopped.stderr
    assert "stopped at update 0 of" in stopped.stdout
    assert not results.exists()
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
    best = min((line for line in lines if line["sweep"]), key=lambda line: line["choose"])["lr"]
    assert {line["lr"] for line in lines if line["arm"] == "dense" and not line["sweep"]} == {best}
    assert [len(line["curve"]) for line in lines if not line["sweep"]] == [2] * 4
    before = results.read_text()
    again = script("small_world_lstm/run.py", *words)
    assert again.status == 0
    assert again.stdout == ""
    assert results.read_text() == before
    (tmp_path / "other").write_bytes(sentences(41))
    other = script("small_world_lstm/run.py", *[tmp_path / "other" if w == tmp_path / "text" else w for w in words])
    assert other.status == 1
    assert "of another text" in other.stderr
    report = script("small_world_lstm/report.py", results)
    assert report.status == 0, report.stderr
    assert results.with_suffix(".png").stat().st_size > 1000
    assert len(re.findall(r"^\| (?:ba|dense) \|", results.with_suffix(".md").read_text(), re.MULTILINE)) == 3
    missing = script("small_world_lstm/run.py", tmp_path / "tiny.json", "--text", tmp_path / "none", "--out", tmp_path)
    assert missing.status == 1
    assert "No such file" in missing.stderr


def results_of(tmp_path, config, *words):
    """Status of small_world_lstm/run.py with a configuration, what it said, and its lines."""
    (tmp_path / "text").write_bytes(sentences(40))
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    results = tmp_path / "results.jsonl"
    done = script("small_world_lstm/run.py", *named_files(tmp_path), *words)
    return done, [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def named_files(tmp_path):
    """What names the files of `results_of`."""
    files = {"--text": "text", "--out": "out", "--results": "results.jsonl"}
    return [tmp_path / "tiny.json", *(word for option, name in files.items() for word in (option, tmp_path / name))]


def test_rates_and_warmups_are_chosen_on_a_part_of_their_own(tmp_path):
    config = {**CONFIG, "trials": 4, "warmups": [0, 2], "min_lr_ratios": [0, 0.4]}
    config |= {"choose_bytes": 200, "choose_streams": 2, "evaluations": 2, "seeds": [0]}
    config["arms"] = {"ba": {"model": {"graph": "ba(8,2)"}, "rates": [1e-2, 2e-2, 4e-2]}}
    done, sweeps = results_of(tmp_path, config, "--sweep-only")
    assert done.status == 0, done.stderr
    assert all(line["sweep"] and "valid" not in line for line in sweeps)
    best, before = sweeps[0], [sweeps[0]]
    for field, least in (("lr", 4), ("warmup", 3), ("min_lr_ratio", 3)):
        its = [best, *sweeps[len(before) :]]
        its = [line for line in its if {key for key in SWEPT if line[key] != best[key]} <= {field}]
        assert len(its) >= least
        best = min(its, key=lambda line: line["choose"])
        before += its[1:]
    assert before == sweeps
    done, lines = results_of(tmp_path, config, "--epochs", 2)
    assert done.status == 0, done.stderr
    assert lines[:-1] == sweeps
    run = lines[-1]
    assert [run[field] for field in SWEPT] == [best[field] for field in SWEPT]
    per_epoch = (len(sentences(40)) - 600 - 1) // 4 // 8
    assert run["bytes"] == 2 * per_epoch * 4 * 8
    assert [point[0] for point in run["curve"]][-1] == run["bytes"]
    assert run["curve"][-1][3] == run["choose"]
    model = load_model(tmp_path / "out" / run["name"] / "last.safetensors")
    held_out = read_text([tmp_path / "text"])[-600:]
    assert run["choose"] == pytest.approx(bits_per_byte(model, held_out[:200], 2), abs=1e-4)
    assert run["valid"] == pytest.approx(bits_per_byte(model, held_out[200:], 4), abs=1e-4)


def test_named_rates_alone(tmp_path):
    words = ["--arms", "ba", "--sweep", "lr", "--sweep-only", "--trials", "0", "--rates", "3e-3"]
    done, lines = results_of(tmp_path, {**CONFIG, "trials": 4}, *words)
    assert done.status == 0, done.stderr
    assert [(line["arm"], line["sweep"], line["lr"]) for line in lines] == [("ba", True, 3e-3)]


def test_report_of_rates_that_were_tried(tmp_path):
    pytest.importorskip("matplotlib")
    arms = {"64-b8": {"model": {"graph": "ba(8,2)"}, "rates": [1e-2, 5e-3]}, "dense": CONFIG["arms"]["dense"]}
    config = {**CONFIG, "arms": arms, "seeds": [0], "trials": 3}
    done, lines = results_of(tmp_path, config)
    assert done.status == 0, done.stderr
    trials = [sum(line["sweep"] and line["arm"] == arm for line in lines) for arm in arms]
    assert trials[0] == trials[1] >= 3
    assert results_of(tmp_path, config, "--arms", "dense", "--trials", 1)[1] == lines  # what both needed is known
    report = script("small_world_lstm/report.py", tmp_path / "results.jsonl")
    assert report.status == 0, report.stderr
    assert (tmp_path / "results.png").stat().st_size > 1000
    tables = (tmp_path / "results.md").read_text()
    for arm in arms:
        tried = {line["lr"]: line["choose"] for line in lines if line["sweep"] and line["arm"] == arm}
        best = min(tried, key=tried.get)
        row = re.search(rf"^\| {arm} \| 2 \| rate \|.*$", tables, re.MULTILINE)[0]
        assert f"{best:g}: **{tried[best]:.3f}**" in row
        assert row.count("**") == 2
        assert row.endswith("| at the edge |" if best in (min(tried), max(tried)) else "| inside |")


def test_table_of_widths(tmp_path):
    pytest.importorskip("matplotlib")
    arms = {
        "64-b8": {"model": {"graph": "ba(8,2)"}, "rates": [1e-2]},
        "64-b8-stride1": {"model": {"graph": "ba(8,2)", "stride": 1}, "rates": [1e-2]},
        "64-b16": {"model": {"block": 16, "graph": "ba(4,1)"}, "rates": [1e-2]},
        "dense": {"model": CONFIG["arms"]["dense"]["model"], "rates": [1e-2]},
        "short": {"model": {"graph": "ba(8,1)"}, "rates": [1e-2]},
    }
    config = {**CONFIG, "model": {**CONFIG["model"], "stride": 2}, "arms": arms, "seeds": [0], "evaluations": 2}
    long = ("--arms", "64-b8", "64-b8-stride1", "64-b16", "dense")
    several = (long, (*long, "--seeds", 1), (*long, "--rates", 2e-2, "--beside-others"))
    for words in (*several, ("--updates", 2, "--rates", 4e-2)):
        done, lines = results_of(tmp_path, config, *words)
        assert done.status == 0, done.stderr
    made = script("small_world_lstm/widths.py", tmp_path / "tiny.json", tmp_path / "results.jsonl")
    assert made.status == 0, made.stderr
    assert (tmp_path / "results.png").stat().st_size > 1000
    rows = (tmp_path / "results.md").read_text().splitlines()[2:]
    assert len(rows) == len(arms) - 1
    shown = [float(row.split("|")[7]) for row in rows]
    assert shown == sorted(shown)
    longest = [line for line in lines if line["arm"] == "dense" and line["bytes"] == 4 * 4 * 8]
    means = {lr: [line["valid"] for line in longest if line["lr"] == lr] for lr in (1e-2, 2e-2)}
    assert sorted(map(len, means.values())) == [1, 2]
    best, other = sorted(means, key=lambda lr: sum(means[lr]) / len(means[lr]))
    row = next(row for row in rows if "| dense |" in row)
    shown = [f"{sum(means[lr]) / len(means[lr]):.4f}" for lr in (best, other)]
    assert f"| {shown[0]} | {best:g} | {other:g}: {shown[1]} |" in row
    assert "not measured" not in row
    assert "left out, for no run of theirs is as long as those of others: short" in made.stdout
    (tmp_path / "results.jsonl").write_text("")
    made = script("small_world_lstm/widths.py", tmp_path / "tiny.json", tmp_path / "results.jsonl")
    assert made.status == 1
    assert "error: there is no run among the results" in made.stderr


def test_behind_half_a_line_begins_a_new_one(tmp_path):
    done, lines = results_of(tmp_path, {**CONFIG, "seeds": [0]})
    assert done.status == 0, done.stderr
    results = tmp_path / "results.jsonl"
    results.write_text(results.read_text()[:-30])
    script("small_world_lstm/run.py", *named_files(tmp_path))
    again = [line for line in results.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["name"] for line in again] == [line["name"] for line in lines]
    report = script("small_world_lstm/report.py", results)
    assert report.status == 0, report.stderr


@pytest.mark.parametrize("words", [("--epochs", 0), ("--updates", 0), ("--updates", -1)])
def test_no_updates_are_refused(tmp_path, words):
    done, lines = results_of(tmp_path, CONFIG, *words)
    assert done.status == 2
    assert "needs more than 0" in done.stderr
    assert lines == []


def test_a_rate_that_diverges_is_not_chosen(tmp_path):
    config = {**CONFIG, "arms": {"ba": {"model": {"graph": "ba(8,2)"}, "rates": [1e-2, 1e30]}}, "seeds": [0]}
    done, lines = results_of(tmp_path, config)
    assert done.status == 0, done.stderr
    assert [(line["lr"], line.get("diverged", False)) for line in lines] == [(1e-2, False), (1e30, True), (1e-2, False)]
    config["arms"]["ba"]["rates"] = [1e30, 1e29]
    done, lines = results_of(tmp_path, config)
    assert done.status == 1
    assert "ba diverged with each rate of 1e+30, 1e+29" in done.stderr


def sweeps():
    return runpy.run_path(str(EXPERIMENTS / "small_world_lstm" / "sweeps.py"))


def test_the_next_value_is_beyond_an_edge_or_beside_the_best():
    rate, warmup, end = sweeps()["SETTINGS"]
    assert rate.next_value({1: 3.0, 2: 2.0, 4: 1.0}) == 8
    assert rate.next_value({1: 1.0, 2: 2.0}) == 0.5
    assert rate.next_value({1: 3.0, 2: 1.0, 4: 2.0}) == 2.83
    assert rate.next_value({1: 2.0, 2: 1.0, 4: math.inf}) == 1.41
    assert warmup.next_value({0: 1.0, 1: 2.0}) is None
    assert warmup.next_value({30: 2.0, 100: 1.0, 300: 1.5}) == 173
    assert end.next_value({0.05: 2.0, 0.8: 1.0}) == 1
    assert end.next_value({0: 1.0, 0.05: 2.0}) == 0.025
    assert [end.is_inside({0: a, 0.1: b, 0.2: c}) for a, b, c in ((1, 2, 3), (2, 1, 3), (3, 2, 1))] == [1, 1, 0]


@pytest.mark.parametrize("best", [8, 20, 1e9])
def test_arms_are_swept_until_the_best_lies_inside_all_as_often(best):
    """The losses of two arms are parabolas of the logarithm; one of them has its least far from the first values."""
    module, tried = sweeps(), {"near": [], "far": []}
    rate = module["SETTINGS"][0]

    def loss(arm, value):
        assert value not in tried[arm]
        tried[arm].append(value)
        return math.log(value / (2.1 if arm == "near" else best)) ** 2

    values, known = {"near": [2, 1, 4], "far": [2, 1, 4]}, {"near": {}, "far": {2: loss("far", 2)}}
    found = module["sweep"](rate, values, known, 4, loss)
    assert len(tried["near"]) == len(tried["far"]) == {8: 5, 20: 6, 1e9: 8}[best]
    for arm, its in tried.items():
        assert its[:3] == [2, 1, 4]
        assert (min(its) < found[arm] < max(its)) == (arm == "near" or best < 1e9)
    again = {arm: {value: loss_of for value, loss_of in zip(its, range(9), strict=False)} for arm, its in tried.items()}
    assert module["sweep"](rate, values, again, 0, loss) == {"near": 2, "far": 2}  # first in both, and known
    assert module["sweep"](rate, {}, {}, 4, loss) == {}


def test_compression(tmp_path):
    """Two packers, if they are there, and a model; a second call finds all done."""
    pytest.importorskip("constriction")
    (tmp_path / "text").write_bytes(sentences(40))
    train(Trainer(TINY, SHORT, read_text([tmp_path / "text"]), "cpu"), tmp_path / "run", None)
    packers = ["xz -9e"] if shutil.which("xz") else []
    results = tmp_path / "results" / "tiny.jsonl"
    words = ["--file", f"words={tmp_path / 'text'}", "--first", 600, "--results", results, "--check", 300]
    words += ["--model", f"ba={tmp_path / 'run' / 'last.safetensors'}", "--streams", 4]
    words += ["--packers", *packers] if packers else []
    for _ in range(2):
        done = script("compression/run.py", *words)
        assert done.status == 0, done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["by"] for line in lines] == [*packers, "ba"]
    assert lines[-1]["bytes"] == 600
    assert lines[-1]["checked"] == 300
    assert 0 < lines[-1]["compressed"] < 640
    assert lines[-1]["model_bytes"]["bf16"] == 2 * lines[-1]["parameters"]
    before = results.read_text()
    refused = {
        "--streams 5": "has ba of words with other streams: give it another name",
        "--file words": "--file is words, needs NAME=FILE",
        f"--file none={os.devnull}": "is empty, needs a byte or more",
    }
    train(Trainer(replace(TINY, seed=1), SHORT, read_text([tmp_path / "text"]), "cpu"), tmp_path / "other", None)
    others = [*words, "--model", f"ba={tmp_path / 'other' / 'last.safetensors'}"]
    cases = [(others, "has ba of words with other model: "), *(([*words, *o.split()], m) for o, m in refused.items())]
    (tmp_path / "text").write_bytes(sentences(40, seed=1))
    cases.append((words, "of words with other sha256: "))
    for given, message in reversed(cases):
        done = script("compression/run.py", *given)
        assert done.status == 1, message
        assert message in done.stderr
        (tmp_path / "text").write_bytes(sentences(40))
    assert results.read_text() == before
    packed = EXPERIMENTS / "compression" / "results" / "packers.jsonl"
    report = script("compression/report.py", packed, results, "--out", tmp_path / "table.md")
    assert report.status == 0, report.stderr
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert len([row for row in rows if row.startswith("| ")]) == 2 * 4 + len(packed.read_text().splitlines()) + len(
        lines
    )
    assert "| `brotli -q 11` | 315,197 | 2.522 | -2.4 % | 2.63 | 0.01 | AMD EPYC | none |" in rows
    (row,) = [row for row in rows if row.startswith("| ba | ")]
    assert f"| {lines[-1]['compressed']} |" in row
    assert "(300 bytes) |" in row


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
    bars, units = tmp_path / "bars.png", sorted((tmp_path / "out").glob("*.npz"))
    drawn = script("sentiment/report.py", results.with_suffix(".jsonl"), "--out", bars)
    assert (drawn.status, bars.stat().st_size > 1000) == (0, True), drawn.stderr
    drawn = script("sentiment/report.py", "--units", *units, "--out", tmp_path)
    assert (drawn.stdout, drawn.status) == (f"{tmp_path / 'ba-sst.png'}\n", 0), drawn.stderr
    assert (tmp_path / "ba-sst.png").read_bytes() == (tmp_path / "out" / "ba-sst.png").read_bytes()
    before = results.with_suffix(".jsonl").read_text()
    assert script("sentiment/run.py", *words).status == 0
    assert results.with_suffix(".jsonl").read_text() == before
    train(Trainer(replace(TINY, seed=1), SHORT, read_text([tmp_path / "text"]), "cpu"), tmp_path / "other", None)
    other = script("sentiment/run.py", *words[:-1], f"ba={tmp_path / 'other' / 'last.safetensors'}")
    assert other.status == 1
    assert "has ba of another model: give it another name" in other.stderr
    results.with_suffix(".jsonl").write_text(before + '{"set": "sst", "feat')
    some = script("sentiment/run.py", *words, "--sets", "cr", "--limit", 30, "--no-words")
    assert some.status == 0, some.stderr
    assert "1- and 2-grams" not in some.stdout  # those are of all texts
    (data / "data" / "mpqa.all").write_text("0 fine\nhmm\n")
    bad = script("sentiment/run.py", *words, "--sets", "mpqa")
    assert bad.status == 1
    assert "mpqa.all, line 2: the label is 'hmm'" in bad.stderr
