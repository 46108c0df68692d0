"""The scripts of experiments/sentiment, and imdb_text: what they take for theirs, and what they refuse."""

import importlib.util
import io
import json
import shlex
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from ranks import run_forked, run_script
from tiny_language_models import sentences, trained_in

from blocksparse.models import lines

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def script(name, *words):
    return run_forked(run_script, EXPERIMENTS / name, *words)


def module(name):
    spec = importlib.util.spec_from_file_location(f"sentiment_{name}", EXPERIMENTS / "sentiment" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def main_of(made, monkeypatch, *words):
    """The script's status; its errors come through."""
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, words)])
    return made.main()


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line_of(features, accuracy, **more):
    return {"set": "sst", "features": features, "limit": None, "accuracy": accuracy, "sha256": "texts"} | more


def test_rows_are_of_the_models_of_the_lines(tmp_path, monkeypatch, capsys):
    """They are brought with their lines, and compared without models or texts."""
    pytest.importorskip("scipy")
    run, out = module("run"), tmp_path / "out"
    one, other = line_of("a", 75.0, model="m1"), line_of("b.5", 50.0, model="m2")
    words = line_of("1- and 2-grams", 25.0)
    results = write(tmp_path / "tiny.jsonl", one, other, words)
    call = ["--data", tmp_path, "--out", out, "--results", tmp_path / "tiny", "--no-words"]

    def compared():
        (tmp_path / "tiny-pairs.jsonl").unlink(missing_ok=True)
        assert main_of(run, monkeypatch, *call) == 0
        rows = [row for row in (tmp_path / "tiny.md").read_text().splitlines() if row.startswith("| SST ")]
        return rows, capsys.readouterr().err

    run.keep_rows(out, one, np.array([True, True, True, False]))
    run.keep_rows(out, other, np.array([False, True, False, True]))
    run.keep_rows(out, words, np.array([False, False, False, True]))
    assert len(compared()[0]) == 3
    assert "| SST | a, b.5 | 2 | 1 | 1 |" in compared()[0]
    of_another = [
        (other | {"model": "m3"}, "another model than its line"),
        (other | {"sha256": "others"}, "another sha256 than its line"),
        (other | {"model": "m3", "accuracy": 75.0}, "another model and accuracy than its line"),
    ]
    for of, message in of_another:
        run.keep_rows(out, of, np.array([False, True, False, True]))
        rows, said = compared()
        assert rows == ["| SST | 1- and 2-grams, a | 1 | 3 | 0.62 |"]
        assert f"left out of the pairs: {out / 'b.5-sst-right.safetensors'} has {message} of results\n" in said
    (out / "b.5-sst-right.safetensors").unlink()
    np.save(out / "b.5-sst.npy", np.array([False, True, False, True]))
    rows, said = compared()
    assert len(rows) == 1
    assert f"{out / 'b.5-sst.npy'} does not say of which model it is, needs b.5-sst-right.safetensors\n" in said
    run.keep_rows(out, other, np.array([False, True, False, True]))
    write(results, one)
    assert compared() == ([], "")  # the others have no line
    write(tmp_path / "tiny-pairs.jsonl", line_of(["a", "gone"], 0.0, first=1, second=2, p=1.0))
    assert script("sentiment/run.py", *call).status == 0
    assert "| a | 75.0 |" in (tmp_path / "tiny.md").read_text()
    assert "gone" not in (tmp_path / "tiny.md").read_text()


def test_pairs_of_a_model_that_was_trained_again_are_left_out(tmp_path, monkeypatch):
    """Until its new rows are there."""
    pytest.importorskip("scipy")
    run, out, pairs = module("run"), tmp_path / "out", tmp_path / "tiny-pairs.jsonl"
    one, other, again = line_of("a", 75.0, model="m1"), line_of("b", 50.0, model="m2"), line_of("b", 75.0, model="m3")
    call = ["--data", tmp_path, "--out", out, "--results", tmp_path / "tiny", "--no-words"]

    def table(*lines):
        write(tmp_path / "tiny.jsonl", *lines)
        assert main_of(run, monkeypatch, *call) == 0
        return (tmp_path / "tiny.md").read_text()

    run.keep_rows(out, one, np.array([True, True, True, False]))
    run.keep_rows(out, other, np.array([False, True, False, True]))
    assert "| SST | a, b | 2 | 1 | 1 |" in table(one, other)
    kept = pairs.read_bytes()
    assert "a, b" not in table(one, again)
    run.keep_rows(out, again, np.array([True, True, False, True]))
    assert "| SST | a, b | 1 | 1 | 1 |" in table(one, again)
    assert pairs.read_bytes().startswith(kept)
    write(pairs, {"set": "sst", "features": ["a", "b"], "limit": None, "first": 5, "second": 6, "p": 1.0})  # an old one
    (out / "b-sst-right.safetensors").unlink()
    assert "| SST | a, b | 5 | 6 | 1 |" in table(one, again)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return trained_in(tmp_path_factory.mktemp("run"))


def test_a_limit_has_files_of_its_own(tmp_path, checkpoint):
    """Also a model whose name has a dot."""
    files = tmp_path / "data" / "sentiment" / "openai-sst"
    files.mkdir(parents=True)
    for part in ("train", "dev", "test"):
        rows = [f'{i % 2},"the {"good" if i % 2 else "bad"} film {part} {i}."' for i in range(20)]
        (files / f"{part}_binary_sent.csv").write_text("\n".join(["label,sentence", *rows]))
    out = tmp_path / "out"
    words = ["--data", tmp_path / "data", "--out", out, "--results", tmp_path / "tiny", "--sets", "sst", "--no-words"]
    words += ["--model", f"ba0.5={checkpoint}"]
    assert script("sentiment/run.py", *words).status == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert {f"ba0.5-sst{end}" for end in (".safetensors", "-right.safetensors", ".npz", ".html")} <= {
        path.name for path in before
    }
    pytest.importorskip("matplotlib")
    (tmp_path / "drawn").mkdir()
    drawn = script("sentiment/report.py", "--units", out / "ba0.5-sst.npz", "--out", tmp_path / "drawn")
    assert drawn.status == 0, drawn.stderr
    for picture in ("ba0.5-sst.png", "ba0.5-sst-text.png"):  # as run.py has drawn them
        assert (tmp_path / "drawn" / picture).read_bytes() == before[out / picture]
        assert str(tmp_path / "drawn" / picture) in drawn.stdout
    some = script("sentiment/run.py", *words, "--limit", 12)
    assert some.status == 0, some.stderr
    assert "ba0.5-sst-12: 36 texts" in some.stdout
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in out.iterdir()} == {
        name for path in before for name in (path.name, path.name.replace("-sst", "-sst-12"))
    }
    write(tmp_path / "tiny.jsonl", line_of("ba0.5", 50.0, set="cr", model="0" * 16))
    other = script("sentiment/run.py", *words)  # of a set that is not asked for
    assert (other.status, "has ba0.5 of another model" in other.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model ba=A --model ba=B", "--model ba is both A and B, needs a name for each"),
        ("--model run/last.safetensors", "--model is run/last.safetensors, needs NAME=FILE"),
        ("--model =A", "--model is =A, needs NAME=FILE"),
        ("--model words=A", "--model is words=A, needs another name: words is taken"),
        ("--model '1- and 2-grams=A'", "needs another name: 1- and 2-grams is taken"),
    ],
)
def test_run_refuses(tmp_path, words, message):
    call = ["--data", tmp_path, "--out", tmp_path, "--results", tmp_path / "results" / "tiny"]
    done = script("sentiment/run.py", *call, *shlex.split(words))
    assert (done.status, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("option", "given"), [("limit", 0), ("limit", -5), ("batch", 0)])
def test_numbers_are_positive(tmp_path, option, given):
    call = ["--data", tmp_path, "--out", tmp_path, "--results", tmp_path / "results" / "tiny"]
    done = script("sentiment/run.py", *call, f"--{option}", given)
    assert done.status == 2
    assert done.stderr.endswith(f"argument --{option}: is {given}, needs 1 or more\n")
    assert not (tmp_path / "results").exists()


def interrupted(*words):
    def stop(*_):
        raise KeyboardInterrupt

    lines.read_lines = stop
    run_script(EXPERIMENTS / "sentiment" / "run.py", *words)


def test_ctrl_c(tmp_path):
    done = run_forked(interrupted, "--data", tmp_path, "--out", tmp_path, "--results", tmp_path / "tiny")
    assert (done.status, done.stderr) == (130, "\nStopped. The same command goes on from here.\n")


# ---- report.py -------------------------------------------------------------------------------------------------------


def test_a_width_is_no_seed(tmp_path):
    pytest.importorskip("matplotlib")
    report, arm = module("report"), "balanced-stride1-inner2-b128"
    names = [f"x-{arm}", f"x-{arm}-8192", f"x-{arm}-8192-0", f"x-{arm}-8192-11", "y-dense"]
    results = write(tmp_path / "tiny.jsonl", *(line_of(name, 100.0 - i) for i, name in enumerate(names)))
    assert report.read([results], "x-") == {arm: {"sst": [0.0]}, f"{arm}-8192": {"sst": [1.0, 2.0, 3.0]}}
    assert report.read([results], "") == {
        f"x-{arm}": {"sst": [0.0]},
        f"x-{arm}-8192": {"sst": [1.0, 2.0, 3.0]},
        "y-dense": {"sst": [4.0]},
    }


def test_report_refuses(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    report, words = module("report"), line_of("1- and 2-grams", 80.0)
    results = write(tmp_path / "tiny.jsonl", words, line_of("12M-ba-0", 70.0), line_of("12M-ba-1", 70.0))
    alone, some = write(tmp_path / "alone.jsonl", words), write(tmp_path / "some.jsonl", words | {"limit": 9})
    np.save(tmp_path / "x.npy", np.zeros(4))
    np.savez(tmp_path / "x.npz", values=np.zeros(4))
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04torn")
    (tmp_path / "none.npz").write_bytes(b"")
    out = ["--out", tmp_path / "made.png"]
    refused = [
        (
            [results, "--prefix", "100M-", *out],
            "--prefix is 100M-, needs the beginning of a name that is there: 12M-ba-0",
        ),
        ([alone, "--prefix", "100M-", *out], "that is there: words alone"),
        ([some, *out], "some.jsonl: no line is of all texts, needs one without --limit"),
        ([results, "--out", tmp_path], f"{tmp_path} is a folder, needs to be a file"),
        ([results, "--out", tmp_path / "made.docx"], "made.docx ends with .docx, needs one of"),
        *(
            (["--units", tmp_path / name, "--out", tmp_path], f"{name} is no histogram of run.py, needs an .npz file")
            for name in ("x.npy", "x.npz", "torn.npz", "none.npz", "tiny.jsonl")
        ),
        (["--units", tmp_path / "gone.npz", "--out", tmp_path], "No such file"),
    ]
    there = sorted(tmp_path.iterdir())
    for given, message in refused:
        with pytest.raises((ValueError, OSError)) as error:
            main_of(report, monkeypatch, *given)
        assert message in str(error.value)
    done = script("sentiment/report.py", *refused[0][0])
    assert (done.status, done.stderr) == (1, f"error: {refused[0][1]}, 12M-ba-1\n")
    for given in (out, [results, "--units", tmp_path / "x.npz", *out]):
        with pytest.raises(SystemExit, match="2"):
            main_of(report, monkeypatch, *given)
        assert "given, needs either files of results or --units" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == there
    assert main_of(report, monkeypatch, alone, "--out", tmp_path / "made") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'made.png'}\n"
    assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")


# ---- imdb_text.py ----------------------------------------------------------------------------------------------------


def archive(path, folder, kind="xz"):
    with tarfile.open(path, f"w:{kind}") as tar:
        for i in range(40):
            text = sentences(30, seed=i)
            info = tarfile.TarInfo(f"aclImdb/train/{folder}/{i}_0.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return path


def test_imdb_text(tmp_path):
    whole, labelled = archive(tmp_path / "whole.tar.xz", "unsup"), archive(tmp_path / "labelled.tar.xz", "pos")
    out = tmp_path / "imdb.txt"
    done = script("imdb_text.py", whole, out)
    assert (done.status, done.stdout) == (0, f"{out}: {out.stat().st_size} bytes\n")
    assert out.read_bytes() == b"".join(b"\n " + sentences(30, seed=i) + b" " for i in range(40))
    before, (torn, altered, other, gzip) = out.read_bytes(), (tmp_path / name for name in ("torn", "alt", "o", "gz"))
    content = whole.read_bytes()
    torn.write_bytes(content[: len(content) // 2])
    altered.write_bytes(content[:600] + bytes(40) + content[640:])
    other.write_bytes(b"x" * 999)
    content = archive(tmp_path / "whole.tar.gz", "unsup", "gz").read_bytes()
    gzip.write_bytes(content[:600] + bytes(40) + content[640:])
    refused = [
        (tmp_path / "gone", out, "No such file"),
        (labelled, out, "has no reviews in aclImdb/train/unsup"),
        *((path, out, f"{path} is damaged: ") for path in (torn, altered, other, gzip)),
        (tmp_path, out, "Is a directory"),
        (whole, tmp_path, f"{tmp_path} is a folder, needs to be a file"),
    ]
    for source, target, message in refused:
        done = script("imdb_text.py", source, target)
        assert (done.status, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
    assert out.read_bytes() == before
