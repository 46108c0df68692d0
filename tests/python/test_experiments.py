"""The scripts of experiments/compression and experiments/sentiment, and a report of learned_structure."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import run_forked, run_script
from tiny_language_models import SHORT, TINY, sentences

from blocksparse.models.language.training import Trainer, read_text, train

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def script(name, *words):
    return run_forked(run_script, EXPERIMENTS / name, *words)


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
    for left in (True, False):
        done = script("compression/run.py", *words)
        assert done.status == 0, done.stderr
        assert (f"nothing is left to do: all that was asked for is in {results}\n" == done.stdout) != left
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["by"] for line in lines] == [*packers, "ba"]
    assert lines[-1]["bytes"] == 600
    assert lines[-1]["checked"] == 300
    assert 0 < lines[-1]["compressed"] < 640
    assert lines[-1]["model_bytes"]["bf16"] == 2 * lines[-1]["parameters"]
    if packers:
        for seed in (0, 0, 1):  # the same text behind, as many bytes of another one
            (tmp_path / "before").write_bytes(sentences(40, seed=seed)[:800])
            behind = script("compression/run.py", *words, "--behind", tmp_path / "before")
            assert behind.status == seed
        assert "of words with other behind_sha256: " in behind.stderr
    before = results.read_text()
    refused = {
        "--streams 5": "has ba of words with other streams: give it another name",
        "--file words": "--file is words, needs NAME=FILE",
        f"--file none={os.devnull}": "is empty, needs a byte or more",
        "--first 0": "argument --first: is 0, needs 1 or more",
        "--threads -1": "argument --threads: is -1, needs 1 or more",
        f"--model ba={tmp_path / 'other'}": "needs a name for each",
        f"--results {tmp_path / 'text'}": f"error: {tmp_path / 'text'} is no file of results",
    }
    train(Trainer(replace(TINY, seed=1), SHORT, read_text([tmp_path / "text"]), "cpu"), tmp_path / "other", None)
    model = {name: f"ba={tmp_path / name / 'last.safetensors'}" for name in ("run", "other")}
    others = [model["other"] if word == model["run"] else word for word in words]
    cases = [(others, "has ba of words with other model: "), *(([*words, *o.split()], m) for o, m in refused.items())]
    (tmp_path / "text").write_bytes(sentences(40, seed=1))
    cases.append((words, "of words with other sha256: "))
    for given, message in reversed(cases):
        done = script("compression/run.py", *given)
        assert done.status == (2 if message.startswith("argument") else 1), message
        assert message in done.stderr
        (tmp_path / "text").write_bytes(sentences(40))
    assert results.read_text() == before
    asked = script("compression/run.py", *words[:6])
    assert asked.status == 1
    assert "neither --packers nor --model is given" in asked.stderr
    default = [*words[: words.index("--streams")], "--results", tmp_path / "default.jsonl"]
    assert script("compression/run.py", *default).status == 0
    (line,) = [json.loads(line) for line in (tmp_path / "default.jsonl").read_text().splitlines()]
    assert line["streams"] == 1
    (tmp_path / "default.jsonl").write_text(json.dumps(line | {"streams": None}) + "\n")  # as in older files
    assert script("compression/run.py", *default).stdout.startswith("nothing is left to do")
    packed = EXPERIMENTS / "compression" / "results" / "packers.jsonl"
    report = script("compression/report.py", packed, results, "--out", tmp_path / "table.md")
    assert report.status == 0, report.stderr
    rows = (tmp_path / "table.md").read_text().splitlines()
    known = packed.read_text().splitlines() + before.splitlines()
    assert len([row for row in rows if row.startswith("| ")]) == 2 * 4 + len(known)
    assert "| `brotli -q 11` | 315,197 | 2.522 | -2.4 % | 2.63 | 0.01 | AMD EPYC | none |" in rows
    assert "| `brotli -q 11` | 21,158 | 2.821 | -9.9 % | 0.1 | 0 | AMD EPYC | none |" in rows
    (row,) = [row for row in rows if row.startswith("| ba | ")]
    assert f"| {lines[-1]['compressed']} |" in row
    assert "(300 bytes) |" in row


INTERRUPTED = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_packer_ends_with_the_program(tmp_path, number):
    """Also where the signal comes to the program alone."""
    (tmp_path / "made").mkdir()
    (tmp_path / "zpaq").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nsleep 50\n")
    (tmp_path / "zpaq").chmod(0o755)
    words = ["--file", f"a={tmp_path / 'zpaq'}", "--packers", "zpaq -m5", "--results", tmp_path / "results.jsonl"]
    command = [sys.executable, "-c", INTERRUPTED, EXPERIMENTS / "compression" / "run.py", *words]
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path / "made")}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < end:
        time.sleep(0.05)
    running.send_signal(number)
    said = running.communicate(timeout=40)[1]
    assert running.returncode == 128 + number
    assert ("Stopped. The same command goes on" in said) == (number == signal.SIGINT)
    assert "Traceback" not in said
    about = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not about.exists() or about.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not list((tmp_path / "made").glob("*/text"))
    assert not (tmp_path / "results.jsonl").exists()


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
    table = results.with_suffix(".md").read_text()
    assert re.search(r"\| CR \| 1- and 2-grams, ba \| \d+ \| 0 \| ", table)
    assert (tmp_path / "out" / "ba-sst.png").stat().st_size > 1000
    assert "rgba(" in (tmp_path / "out" / "ba-sst.html").read_text()
    bars, units = tmp_path / "bars.png", sorted((tmp_path / "out").glob("*.npz"))
    drawn = script("sentiment/report.py", results.with_suffix(".jsonl"), "--out", bars)
    assert (drawn.status, bars.stat().st_size > 1000) == (0, True), drawn.stderr
    drawn = script("sentiment/report.py", "--units", *units, "--out", tmp_path)
    pictures = f"{tmp_path / 'ba-sst.png'}\n{tmp_path / 'ba-sst-text.png'}\n"
    assert (drawn.stdout, drawn.status) == (pictures, 0), drawn.stderr
    assert (tmp_path / "ba-sst.png").read_bytes() == (tmp_path / "out" / "ba-sst.png").read_bytes()
    before = results.with_suffix(".jsonl").read_text()
    elsewhere = [tmp_path / "elsewhere" if word == tmp_path / "out" else word for word in words]
    for again in (words, elsewhere):  # the pairs are kept where the rows are not
        assert script("sentiment/run.py", *again).status == 0
        assert results.with_suffix(".jsonl").read_text() == before
        assert results.with_suffix(".md").read_text() == table
    kept = results.with_name("tiny-pairs.jsonl")
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    turned = [
        line
        | {key: line[key][::-1] for key in ("features", "models")}
        | {"first": line["second"], "second": line["first"]}
        for line in lines
    ]
    kept.write_text("".join(json.dumps(line) + "\n" for line in turned))
    assert script("sentiment/run.py", *words).status == 0
    assert [json.loads(line) for line in kept.read_text().splitlines()] == turned  # none is added
    (data / "data" / "custrev.all").write_text("\n".join(reversed(rows)))
    fresh = [tmp_path / "results" / "fresh" if word == results else word for word in words]
    shuffled = script("sentiment/run.py", *fresh, "--sets", "cr")
    assert shuffled.status == 0, shuffled.stderr
    assert "ba-cr: 60 texts" in shuffled.stdout  # read again: those were of other rows
    (data / "data" / "custrev.all").write_text("\n".join(rows))
    other = script("sentiment/run.py", *fresh, "--sets", "cr", "--model", words[-1].replace("ba=", "second="))
    assert other.status == 1
    assert "has cr of other texts" in other.stderr
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
    for report in ("compression", "sentiment"):
        none = script(f"{report}/report.py", tmp_path / "none.jsonl", "--out", bars)
        assert none.status == 1
        assert "none.jsonl does not exist" in none.stderr


@pytest.mark.parametrize("what", ["byte_lm", "small_world"])
def test_report_of_learned_structure(tmp_path, what):
    """The tables are those of the results."""
    pytest.importorskip("matplotlib")
    results = EXPERIMENTS / "learned_structure" / "results"
    shutil.copy(results / f"{what}.jsonl", tmp_path)
    done = script("learned_structure/report.py", what, tmp_path / f"{what}.jsonl")
    assert done.status == 0, done.stderr
    assert (tmp_path / f"{what}.md").read_text() == (results / f"{what}.md").read_text()


def test_report_of_masks_that_are_not_there(tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(EXPERIMENTS / "learned_structure" / "results" / "small_world.jsonl", tmp_path)
    words = ["small_world", tmp_path / "small_world.jsonl", "--masks", tmp_path]
    done = script("learned_structure/report.py", *words)
    assert done.status == 1
    assert f"error: {tmp_path} has none of masks-" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "small_world.jsonl").read_text().splitlines()]
    np.savez(tmp_path / f"masks-{lines[0]['arm']}-seed{lines[0]['seed']}.npz", gates=np.eye(4, dtype=bool))
    done = script("learned_structure/report.py", *words)
    assert done.status == 0, done.stderr
    assert (tmp_path / "small_world.png").stat().st_size > 1000
