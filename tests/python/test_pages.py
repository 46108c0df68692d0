"""What the pages of the documentation show works: code runs, commands are understood, links lead somewhere."""

import json
import re
import shlex
import subprocess
from importlib.util import find_spec

import pages
import pytest

import blocksparse.__main__ as command_line

ROOT = pages.ROOT
ELSEWHERE = {"jax.md"}  # test_jax_pages.py, in an environment that has it
NEED = {"linear.md": ("safetensors",), "language-models.md": ("safetensors", "constriction")}
WRITTEN = [ROOT / name for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()]


def ids(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("page", pages.GUIDES, ids=ids(pages.GUIDES))
def test_code_runs(page, tmp_path, monkeypatch):
    if page.name in ELSEWHERE:
        pytest.skip("test_jax_pages.py runs it")
    pytest.importorskip("torch")
    for library in NEED.get(page.name, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    pages.run(page)


@pytest.mark.parametrize("page", pages.GUIDES, ids=ids(pages.GUIDES))
def test_other_languages_are_of_examples(page):
    for block in pages.blocks(page):
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


def check(command, page, tmp_path):
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
    elif words[0] in ("python", "torchrun") and (scripts := [word for word in words if word.endswith(".py")]):
        assert (ROOT / scripts[0]).is_file() or (page.parent / scripts[0]).is_file(), command
    elif words[0] == "cmake":
        kinds = ("configurePresets", "buildPresets")
        known = {preset["name"] for kind in kinds for preset in PRESETS[kind]}
        assert set(re.findall(r"--preset (\S+)", text)) <= known, command
    else:
        assert text.startswith(OTHERS), f"{page.name} has a command that no test knows: {command}"


@pytest.mark.parametrize("page", pages.GUIDES, ids=ids(pages.GUIDES))
def test_commands_are_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in pages.commands(page):
        for part in re.split(r" && ", command):
            check(part, page, tmp_path)


def test_a_wrong_command_is_found(tmp_path):
    with pytest.raises(SystemExit):
        check("python -m blocksparse lm trian", ROOT / "README.md", tmp_path)
    with pytest.raises(AssertionError, match="no test knows"):
        check("rm -rf build", ROOT / "README.md", tmp_path)


# ---- Links and form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", WRITTEN, ids=ids(WRITTEN))
def test_links_lead_somewhere(page):
    assert pages.broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One, two\n[a](#one-two) [b](#three) [c](none.md) [d](page.md#one-two)\n```\n[e](code.md)\n```\n")
    assert pages.broken_links(page) == ["#three", "none.md"]


@pytest.mark.parametrize("page", pages.GUIDES, ids=ids(pages.GUIDES))
def test_paragraphs_are_short(page):
    text = pages.PARTS.sub("\n", page.read_text(encoding="utf-8"))
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d\. |\|)", text):
        assert paragraph.startswith("|") or len(paragraph.strip().splitlines()) <= 6, paragraph
