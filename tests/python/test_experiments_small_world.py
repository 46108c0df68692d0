"""The scripts of experiments/small_world_lstm on little data: every arm, sweeps, a second call that finds all done."""

import json
import math
import re
import runpy

import pytest
from test_experiments import EXPERIMENTS, script
from tiny_language_models import sentences

from blocksparse.models.language import LanguageModel, ModelConfig, bits_per_byte
from blocksparse.models.language.training import load_model, read_text

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
    assert again.stdout == f"nothing is left to do: all that was asked for is in {results}\n"
    assert results.read_text() == before
    (tmp_path / "other").write_bytes(sentences(41))
    other = script("small_world_lstm/run.py", *[tmp_path / "other" if w == tmp_path / "text" else w for w in words])
    assert other.status == 1
    assert "with text " in other.stderr
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


def test_lines_of_another_text_or_configuration_are_not_taken(tmp_path):
    dense = {"dense": CONFIG["arms"]["dense"]}
    first = {**CONFIG, "arms": dense, "seeds": [0]}
    done, lines = results_of(tmp_path, first, "--sweep-only")
    assert (done.status, len(lines)) == (0, 2)
    longer = {"dense": {**dense["dense"], "model": {"hidden": 40, "graph": "", "stride": 1}}}
    cases = {
        "with hidden 32, not 40": {**first, "arms": longer},
        "with valid_bytes 400, not 300": {**first, "valid_bytes": 300},
        "with ema 0.999, not 0.9": {**first, "training": {**first["training"], "ema": 0.9}},
    }
    for message, config in cases.items():
        done, after = results_of(tmp_path, config, "--sweep-only")
        assert (done.status, after) == (1, lines), done.stderr
        assert f"{message}: --results names another file" in done.stderr
    done, _ = results_of(tmp_path, first)
    assert done.status == 0
    (tmp_path / "other").write_bytes(sentences(41))
    words = [tmp_path / "other" if word == tmp_path / "text" else word for word in named_files(tmp_path)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = script("small_world_lstm/run.py", *words)
    assert done.status == 1
    assert "with text " in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid_bytes": None}, "needs arms, model, save_every"),
        ({"rates": [1e-2]}, "has rates; knows"),
        ({"model": {"hiden": 64}}, "model of the usual arm has hiden; knows block"),
        (
            {"arms": {"ba": {"model": {"graph": "ba(8,2)"}, "rates": []}}},
            "ba has model, rates; needs",
        ),
        ({"evaluations": 0}, "evaluations is 0, needs to be above 0"),
        ({"valid_bytes": 1}, "1 bytes are reported and 0 choose, needs 2 or more of each"),
    ],
)
def test_bad_configurations(tmp_path, change, message):
    config = {name: value for name, value in {**CONFIG, **change}.items() if value is not None}
    done, lines = results_of(tmp_path, config)
    assert (done.status, lines) == (1, [])
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--epochs", 0.0),
        ("--epochs", "inf"),
        ("--updates", -1),
        ("--sweep-updates", 0),
        ("--trials", -1),
        ("--minutes", "nan"),
        ("--seeds", -1),
    ],
)
def test_bad_numbers_are_refused(tmp_path, words):
    done, lines = results_of(tmp_path, CONFIG, *words)
    assert done.status == 2
    assert re.search(rf"{words[0]} (?:is|has) {words[1]}, needs", done.stderr)
    assert lines == []


def test_a_rate_that_diverges_is_not_chosen(tmp_path):
    config = {**CONFIG, "arms": {"ba": {"model": {"graph": "ba(8,2)"}, "rates": [1e-2, 1e30]}}, "seeds": [0]}
    done, lines = results_of(tmp_path, config)
    assert done.status == 0, done.stderr
    assert [(line["lr"], line.get("diverged", False)) for line in lines] == [(1e-2, False), (1e30, True), (1e-2, False)]
    config["arms"]["ba"]["rates"] = [1e30, 1e29]
    done, lines = results_of(tmp_path, config)
    assert done.status == 1
    assert done.stderr == "error: diverged: ba with all that was tried\n"
    beside = {"arms": {"ba": config["arms"]["ba"], "dense": {**CONFIG["arms"]["dense"], "rates": [1e-2]}}}
    done, lines = results_of(tmp_path, {**config, **beside})
    assert (done.status, done.stderr) == (1, "error: diverged: ba with all that was tried\n")
    assert [line["arm"] for line in lines if "valid" in line] == ["ba", "dense"]  # this ba was trained before
    done, lines = results_of(tmp_path, {**config, "arms": {"other": config["arms"]["ba"]}, "trials": 2})
    assert done.status == 1
    lower = [line["lr"] for line in lines if line["arm"] == "other"][2:]
    assert lower == [5e28, 2.5e28, 1.25e28, 6.25e27]  # an edge is followed
    pytest.importorskip("matplotlib")
    report = script("small_world_lstm/report.py", tmp_path / "results.jsonl")
    assert report.status == 0, report.stderr
    row = next(row for row in report.stdout.splitlines() if row.startswith("| other | 2 | rate |"))
    assert row.count("diverged") == 6
    assert "**" not in row
    assert row.endswith("| none |")


def test_others_are_trained_behind_a_run_that_diverges(tmp_path):
    pytest.importorskip("matplotlib")
    words = ["--arms", "dense", "ba", "--sweep"]
    assert results_of(tmp_path, {**CONFIG, "seeds": [0]}, *words, "--rates", 1e30)[0].status == 1
    done, lines = results_of(tmp_path, CONFIG, *words, "--rates", 1e-2)
    assert done.status == 0, done.stderr
    done, _ = results_of(tmp_path, CONFIG, "--arms", "dense", "--sweep", "--rates", 1e30, "--seeds", 0)
    assert (done.status, done.stderr) == (1, "error: diverged: dense-run-4-seed0-lr1e+30\n")  # it is not tried again
    assert [line["arm"] for line in lines] == ["dense", "ba"] * 3
    assert [line.get("diverged", False) for line in lines] == [True, True, False, False, False, False]
    for words in (["report.py"], ["widths.py", tmp_path / "tiny.json"]):
        done = script(f"small_world_lstm/{words[0]}", *words[1:], tmp_path / "results.jsonl")
        assert done.status == 0, done.stderr
        assert len(re.findall(r"^\| (?:dense|ba) \|", done.stdout, re.MULTILINE)) == 2
        assert "\nDiverged: dense-run-4-seed0-lr1e+30, ba-run-4-seed0-lr1e+30.\n" in done.stdout
    pair = f"{tmp_path / 'results.jsonl'},dense,ba"
    done = script("small_world_lstm/lead.py", pair, "--out", tmp_path / "lead.png")
    assert done.status == 0, done.stderr
    assert done.stdout.count("left out, for it diverged: ") == 2


def test_configurations_that_are_none(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_bytes(sentences(40))
    (tmp_path / "tiny.json").write_bytes(sentences(2))
    done = script("small_world_lstm/run.py", *named_files(tmp_path))
    assert done.status == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'tiny.json'} is no JSON: ")
    done, _ = results_of(tmp_path, CONFIG, "--arms", "ba", "--seeds", 0)
    (tmp_path / "tiny.json").write_text("{}")
    done = script("small_world_lstm/widths.py", tmp_path / "tiny.json", tmp_path / "results.jsonl")
    assert done.status == 1
    assert "tiny.json has ; needs arms" in done.stderr


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
    assert not rate.is_inside({2: math.inf, 1: math.inf, 4: math.inf})


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
