"""Reports of small_world_lstm on results of little trainings: tables, pictures, and files that are no results."""

import json
import re

import pytest
from test_experiments import script
from test_experiments_small_world import CONFIG, results_of


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


def test_report_of_runs_at_several_rates(tmp_path):
    pytest.importorskip("matplotlib")
    for rate in ("1e-2", "2e-2"):
        done, lines = results_of(tmp_path, CONFIG, "--arms", "ba", "--seeds", 0, "--sweep", "--rates", rate)
        assert done.status == 0, done.stderr
    report = script("small_world_lstm/report.py", tmp_path / "results.jsonl")
    assert report.status == 0, report.stderr
    rows = re.findall(r"^\| ba, rate (\S+) \|.* (\d\.\d{4}) \| (\d\.\d{4}) \|", report.stdout, re.MULTILINE)
    best_first = sorted(lines, key=lambda line: line["valid"])
    assert rows == [(f"{line['lr']:g}", *[f"{line['valid']:.4f}"] * 2) for line in best_first]


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
    shown = [float(row.split("|")[8]) for row in rows]
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
    twice = (tmp_path / "results.jsonl").read_text() * 2  # a line is not another seed
    (tmp_path / "results.jsonl").write_text(twice)
    before = (tmp_path / "results.md").read_text()
    assert script("small_world_lstm/widths.py", tmp_path / "tiny.json", tmp_path / "results.jsonl").status == 0
    assert (tmp_path / "results.md").read_text() == before
    arms["64-b16"]["model"]["graph"] = "ba(4,2)"
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    made = script("small_world_lstm/widths.py", tmp_path / "tiny.json", tmp_path / "results.jsonl")
    assert made.status == 1
    assert "has 64-b16 with graph ba(4,1), " in made.stderr
    sweep = json.dumps({**lines[0], "sweep": True, "name": "64-b8-sweep-2-seed0-lr0.01"})
    (tmp_path / "results.jsonl").write_text(sweep)
    made = script("small_world_lstm/widths.py", tmp_path / "tiny.json", tmp_path / "results.jsonl")
    assert made.status == 1
    assert "error: there is no run among the results" in made.stderr


def test_picture_of_the_lead(tmp_path):
    pytest.importorskip("matplotlib")
    config = {**CONFIG, "evaluations": 2}
    for rate in (1e-2, 2e-2):
        done, lines = results_of(tmp_path, config, "--sweep", "--rates", rate)
        assert done.status == 0, done.stderr
    ends = {}
    for arm in ("dense", "ba"):
        its = {lr: [line["choose"] for line in lines if (line["arm"], line["lr"]) == (arm, lr)] for lr in (1e-2, 2e-2)}
        ends[arm] = min(sum(of_rate) / 2 for of_rate in its.values())
    pair = f"{tmp_path / 'results.jsonl'},dense,ba"
    of_ba = next(line for line in lines if line["arm"] == "ba")
    changes: list[dict[str, object]] = [{"arm": "strided", "stride": 2}, {"arm": "longer", "bytes": 256}]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.writelines(json.dumps({**of_ba, "name": change["arm"], **change}) + "\n" for change in changes)
    done = script("small_world_lstm/lead.py", pair, "--out", tmp_path / "lead.png")
    assert done.status == 0, done.stderr
    said = re.fullmatch(r"0\.0M, 64 units, b = 8 \(seeds 2, dense 2\): (\S+) after 0\.0 MB\n", done.stdout)
    assert float(said[1]) == pytest.approx(ends["dense"] - ends["ba"], abs=1e-4)
    assert (tmp_path / "lead.png").stat().st_size > 1000
    for given, message in (
        (pair.replace("dense", "tree"), "there is no run of tree, but of ba, dense"),
        (pair.replace(",ba", ""), "needs two commas: RESULTS,DENSE,SPARSE"),
        (pair.replace(".jsonl", ".json"), "does not exist"),
        (pair.replace("dense,ba", "ba,dense"), "ba needs to be a dense arm and dense one with a graph"),
        (pair.replace("dense,ba", "dense,strided"), "dense has stride 1 and strided 2, needs to be the same"),
        (pair.replace("dense,ba", "dense,longer"), f"dense has bytes 128 and longer {256}, needs to be the same"),
    ):
        done = script("small_world_lstm/lead.py", given, "--out", tmp_path / "other.png")
        assert done.status != 0
        assert message in done.stderr
    assert not (tmp_path / "other.png").exists()


HALF_A_RUN = {"name": "a", "arm": "a", "sweep": False, "seed": 0, "lr": 1, "parameters": 1, "graph": "", "hidden": 1}
HALF_A_RUN |= {"bytes": 1}


def test_files_without_results_are_refused(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    table = tmp_path / "results.md"
    table.write_text("| a | table |\n")
    for path, text, message in (
        (tmp_path / "none.jsonl", None, "does not exist"),
        (table, None, "has no line of results"),
        (tmp_path / "five.jsonl", "5\n", "line 1 is no line of results, needs an object"),
        (tmp_path / "other.jsonl", '{"name": "a", "arm": "b"}\n', "line 1 is no line of results, needs sweep, seed"),
        (tmp_path / "run.jsonl", json.dumps(HALF_A_RUN), "a has no valid, seconds, curve, machine, mix"),
    ):
        if text:
            path.write_text(text)
        for words in (["report.py", path], ["widths.py", tmp_path / "tiny.json", path]):
            done = script(f"small_world_lstm/{words[0]}", *words[1:])
            assert done.status == 1, words
            assert done.stderr.startswith("error: ")
            assert message in done.stderr
    assert table.read_text() == "| a | table |\n"
