"""What the pages of the documentation show works: code runs, commands are understood."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import guides
import pytest

import blocksparse.__main__ as command_line

ROOT = guides.ROOT
# The first needs an environment of its own, the programs of the second are of several processes.
ELSEWHERE = {"jax.md": "test_jax_guide.py", "several-cards.md": "test_torch_parallel.py"}
NEED = {"linear.md": ("safetensors",), "language-models.md": ("safetensors", "constriction")}


def ids(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("page", guides.GUIDES, ids=ids(guides.GUIDES))
def test_code_runs(page, tmp_path, monkeypatch):
    if page.name in ELSEWHERE:
        pytest.skip(f"{ELSEWHERE[page.name]} runs its programs")
    pytest.importorskip("torch")
    for library in NEED.get(page.name, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    guides.run(page)


@pytest.mark.parametrize("page", guides.GUIDES, ids=ids(guides.GUIDES))
def test_other_languages_are_of_examples(page):
    for block in guides.blocks(page):
        if block.language in ("cpp", "c"):
            assert block.before.startswith("<!-- examples/"), f"{page.name}, line {block.line}"


# ---- Commands --------------------------------------------------------------------------------------------------------

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.M))
EXTRAS = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.S)[1]
PRESETS = json.loads((ROOT / "CMakePresets.json").read_text())
OTHERS = ("c++", "export", "cd", "pip install torch", "build/release/tools/blocksparse-bench", "scripts/on_card.sh")


def words_of(command):
    """Without what the shell takes: a comment, a pipe, redirections."""
    words = shlex.split(re.sub(r" [<>|&] ?.*", "", command), comments=True)
    return [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]


def check(command, page):
    """Fails if the command is none of ours, or is not understood."""
    words = words_of(command)
    text = " ".join(words)
    if "-m blocksparse" in text or words[0] == "blocksparse":
        begin = words.index("blocksparse") + 1
        if "..." in words:
            return
        if "--help" in words or words[begin:] in (["lm"], ["pixelcnn"], ["report"], ["plot"]):
            words = [word for word in words if word != "--help"]
            with pytest.raises(SystemExit):
                command_line._parser().parse_args([*words[begin:], "--help"])
            return
        command_line._parser().parse_args(words[begin:])
        if words[begin : begin + 1] == ["report"] or (words[begin : begin + 1] == ["plot"] and find_spec("matplotlib")):
            assert command_line.main(words[begin:]) == 0
    elif words[0] == "make":
        assert words[1] in TARGETS, command
    elif words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[([\w,]+)\]", text):
            if "jax[" not in text:
                assert set(extra.split(",")) <= set(re.findall(r"^(\w+) =", EXTRAS, re.M)), command
    elif Path(words[0]).name in ("python", "torchrun") and (
        scripts := [word for word in words if word.endswith(".py")]
    ):
        assert (ROOT / scripts[0]).is_file() or (page.parent / scripts[0]).is_file(), command
    elif words[0] == "cmake":
        kinds = ("configurePresets", "buildPresets")
        known = {preset["name"] for kind in kinds for preset in PRESETS[kind]}
        assert set(re.findall(r"--preset (\S+)", text)) <= known, command
    elif page not in guides.OTHERS:
        assert text.startswith(OTHERS), f"{page.name} has a command that no test knows: {command}"


@pytest.mark.parametrize("page", [*guides.GUIDES, *guides.OTHERS], ids=ids([*guides.GUIDES, *guides.OTHERS]))
def test_commands_are_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in guides.commands(page):
        for part in re.split(r" && ", command):
            check(part, page)


def test_a_wrong_command_is_found():
    with pytest.raises(SystemExit):
        check("python -m blocksparse lm trian", ROOT / "README.md")
    with pytest.raises(AssertionError, match="no test knows"):
        check("rm -rf build", ROOT / "README.md")
