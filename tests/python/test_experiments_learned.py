"""The programs of experiments/learned_structure in miniature; their reports are in test_experiments."""

import json

import pytest
from test_experiments import script
from tiny_language_models import sentences

SMALL_WORLD = ["--updates", 4, "--streams", 4, "--steps", 8, "--hidden", 64, "--block", 8, "--degree", 3]
SMALL_WORLD += ["--held-out", 200]
BYTE_LM = ["--steps", 4, "--rows", 2, "--tokens", 16, "--width", 256, "--hidden", 256, "--layers", 1]
BYTE_LM += ["--held-out", 200]
ARMS = {
    "small_world": ("ba-lr0.008", "gmp-lr0.002", "rigl-lr0.008", "narrow-lr0.002", "random-lr0.008"),
    "byte_lm": ("dense", "gmp-0.9-b64", "gmp-distil-0.9-b64", "rigl-0.9-b64"),
}
WORDS = {"small_world": SMALL_WORLD, "byte_lm": BYTE_LM}


def words_of(name, folder):
    return [*WORDS[name], "--data", folder / "text", "--out", folder / "out", "--device", "cpu"]


@pytest.mark.parametrize("name", ARMS)
def test_arms(tmp_path, name):
    (tmp_path / "text").write_bytes(sentences(60))
    words = [*words_of(name, tmp_path), "--arms", *ARMS[name]]
    results = tmp_path / "out" / f"{name}.jsonl"
    done = script(f"learned_structure/{name}.py", *words)
    assert done.status == 0, done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(line["arm"] for line in lines) == sorted(ARMS[name])
    assert all(5 < line["bits_per_byte"] < 9 for line in lines)
    if name == "small_world":  # sparse arms have as many weights
        assert len({line["recurrent_weights"] for line in lines if line["method"] != "narrow"}) == 1
    results.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    again = script(f"learned_structure/{name}.py", *words)
    assert again.status == 0, again.stderr
    assert [text.split(":")[0] for text in again.stdout.splitlines()] == [lines[0]["arm"]]
    assert script(f"learned_structure/{name}.py", *words).stdout.startswith("nothing is left to do")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("small_world", "--held-out 20", "error: --held-out is 20, needs 33 or more: --streams times --steps, and one"),
        ("small_world", "--held-out 900", "/text holds 1000 bytes, needs 2700 or more"),
        ("small_world", "--updates 100", "/text is too short for 100 updates: their streams end after 199"),
        ("small_world", "--arms ba", "error: there is no arm ba, needs one of ba-lr0.008, gmp-lr0.002"),
        ("small_world", "--streams 0", "error: argument --streams: is 0, needs 1 or more"),
        ("byte_lm", "--held-out 16", "error: --held-out is 16, needs more than --tokens, 16"),
        ("byte_lm", "--arms gmp", "error: there is no arm gmp, needs one of dense"),
        ("byte_lm", "--steps 0", "error: argument --steps: is 0, needs 1 or more"),
    ],
)
def test_bad_input(tmp_path, name, words, message):
    (tmp_path / "text").write_bytes(sentences(60)[:1000])
    done = script(f"learned_structure/{name}.py", *words_of(name, tmp_path), *words.split())
    assert done.status in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
