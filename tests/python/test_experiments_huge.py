"""The scripts of experiments/huge in miniature: every kind of arm, a second call that finds all done, tables."""

import argparse
import json
import random
import runpy

import pytest
from test_experiments import EXPERIMENTS, script

MODEL = ["--steps", 3, "--rows", 2, "--tokens", 16, "--width", 128, "--hidden", 64, "--layers", 1]
WORDS = ["--updates", 3, "--streams", 2, "--length", 4, "--width", 32, "--embedding", 8, "--words", 64]
UNITS = ["--updates", 15, "--rows", 4, "--units", 64, "--weights", 8192, "--ports", 32, "--longest", 3]
RUNS = {
    "feedforward": (MODEL, ["dense", "balanced-x4", "rigl-x8", "random-x16"]),
    "output_layer": ([*WORDS, "--frequent", 32, "--held-words", 64], ["dense", "adaptive", "sparse-10%", "low-rank"]),
    "memory": (UNITS, ["dense", "sparse-x2", "sparse-x4"]),
}
COUNTS = {"feedforward": 6, "output_layer": 8, "memory": 17}  # with other learning rates


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    draw = random.Random(0)
    path.write_text(" ".join(f"w{int(100 * draw.random() ** 2)}" for _ in range(800)))
    return path


def words_of(name, text, output, held=400):
    data = [] if name == "memory" else ["--data", text]
    data += ["--held-bytes", held] if name == "feedforward" else []
    return [*data, "--device", "cpu", "--output", output, "--seeds", 0, *RUNS[name][0]]


@pytest.mark.parametrize("name", RUNS)
def test_miniatures(name, text, tmp_path):
    pytest.importorskip("matplotlib")
    results, arms = tmp_path / "lines.jsonl", RUNS[name][1]
    words = [*words_of(name, text, results), "--arms", *arms]
    done = script(f"huge/{name}.py", *words)
    assert done.status == 0, done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert {line["arm"] for line in lines} == set(arms)
    assert len(lines) == COUNTS[name], [(line["arm"], line["rate"]) for line in lines]
    check(name, lines)
    results.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]) + '{"arm": "den')
    again = script(f"huge/{name}.py", *words)
    assert again.status == 0, again.stderr
    (told,) = (text for text in again.stdout.splitlines() if "seed" in text)  # of the one that was missing
    assert told.startswith(lines[0]["arm"])
    report = script("huge/report.py", name, results)
    assert report.status == 0, report.stderr
    assert results.with_suffix(".png").stat().st_size > 1000
    rows = {(line["arm"], line["rate"], line.get("task")) for line in lines}
    assert results.with_suffix(".md").read_text().count("\n") == 2 + len(rows)


def check(name, lines):
    """Weights are equal where the question says so, and what was measured can be."""
    by_arm = {line["arm"]: line for line in lines}
    if name == "feedforward":
        assert len({line["ffn_weights"] for line in lines}) == 1
        assert by_arm["random-x16"]["features"] == 16 * by_arm["dense"]["features"]
        assert by_arm["balanced-x4"]["used"] == 1
        assert by_arm["random-x16"]["used"] < 1
        assert all(4 < line["loss"] < 12 for line in lines)
    elif name == "output_layer":
        assert by_arm["low-rank"]["head_weights"] == pytest.approx(by_arm["sparse-10%"]["head_weights"], rel=0.1)
        assert by_arm["sparse-10%"]["head_weights"] < by_arm["dense"]["head_weights"]
        assert all(2 < line["loss"] < 6 for line in lines)
        assert all(line["vocabulary"] <= 64 for line in lines)
    else:
        assert by_arm["sparse-x4"]["units_of_all"] == 256
        weights = {line["recurrent_weights"] for line in lines}
        assert max(weights) < 1.1 * min(weights)  # a dense one is a square
        assert all(line["reached"] in (1, 2, 3) and 0 <= line["right"]["1"] <= 1 for line in lines)


def test_no_time(text, tmp_path):
    none = script("huge/memory.py", *words_of("memory", text, tmp_path / "lines.jsonl"), "--minutes", 0)
    assert none.status == 0, none.stderr
    assert none.stdout.startswith("Left for another run, as 0 minutes would be over:\n  dense, task copy")
    assert not (tmp_path / "lines.jsonl").exists()


def test_what_does_not_fit_is_refused(text, tmp_path):
    output = tmp_path / "lines.jsonl"
    for name, extra, message in [
        ("feedforward", ["--held-bytes", 1 << 30], "bytes, needs"),
        ("feedforward", ["--block", 32, "--arms", "balanced-x16"], "cannot have a share of 1/16 in each row"),
        ("output_layer", ["--frequent", 30], "frequent is 30, needs a multiple of the block, 8"),
        ("output_layer", ["--held-words", 1 << 30], "words, needs"),
        ("output_layer", ["--updates", 10**6], "1000000 are asked for"),
        ("memory", ["--weights", 1024, "--arms", "sparse-x4"], "blocks in a row, needs 3"),
    ]:
        ended = script(f"huge/{name}.py", *words_of(name, text, output), *extra)
        assert ended.status == 1
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr


def test_width(tmp_path):
    """Goes on behind half a line, and leaves out what cannot be."""
    pytest.importorskip("matplotlib")
    results = tmp_path / "lines.jsonl"
    results.write_text('{"kind": "spar')
    words = ["--weights", 16384, "--widths", 64, 256, "--steps", 1, "--dense-gb", 0, "--output", results]
    done = script("huge/width.py", *words)
    assert done.status == 0, done.stderr
    assert "sparse 64: skipped, 64 x 64 has fewer than 16384 weights" in done.stdout
    (line,) = map(json.loads, results.read_text().splitlines()[1:])
    assert (line["kind"], line["width"], line["weights"]) == ("sparse", 256, 16384)
    assert results.with_suffix(".png").stat().st_size > 1000


def test_times_of_two_machines_are_not_averaged(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(EXPERIMENTS / "huge")
    memory_table = runpy.run_path(str(EXPERIMENTS / "huge" / "report.py"))["memory_table"]  # not another report
    common = {"task": "copy", "arm": "dense", "rate": 1e-3, "units_of_all": 8, "recurrent_weights": 64, "right": {}}
    lines = [
        {**common, "seed": seed, "reached": 3 + seed, "ms": ms, "machine": machine, "beside_others": seed == 2}
        for seed, (ms, machine) in enumerate([(10.0, "A"), (20.0, "B"), (70.0, "B"), (30.0, "B")])
    ]
    head, _, row = memory_table(lines).splitlines()
    assert "| ms on A | ms on B |" in head
    assert "| 4.5 | 3, 4, 5, 6 |" in row
    assert "| 10.0 | 25.0 |" in row  # but for the one that shared its machine
    assert "| ms |" in memory_table(lines[:1])


def test_an_arm_that_fails_does_not_keep_others(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS / "huge")
    import arms

    options = argparse.Namespace(output=tmp_path / "lines", minutes=9.0, device="cpu", arms=None)

    def do(arm):
        if arm.settings["arm"] == "bad":
            raise RuntimeError("out of memory")
        return {"loss": 1}

    with pytest.raises(ValueError, match="1 arms have failed: bad"):
        arms.run_all([arms.Arm({"arm": name}) for name in ("bad", "good")], do, options, [])
    assert [line["arm"] for line in arms.read_lines(options.output)] == ["good"]
    assert "bad: failed, out of memory" in capsys.readouterr().err
    options.arms = ["good", "better"]
    with pytest.raises(ValueError, match="there is no arm better, needs one of bad, good"):
        arms.run_all([arms.Arm({"arm": name}) for name in ("bad", "good")], do, options, [])
