import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts"), str(ROOT / "docs/pictures")]

import check_pages  # noqa: E402

import crossover  # noqa: E402
import machine_pages  # noqa: E402
from machines import MACHINES, Machine, Source  # noqa: E402
from programs import feed_forward, pixelcnn  # noqa: E402


@pytest.mark.parametrize(
    ("sentence", "count"),
    [
        ("It takes 3 us, 2.5 times as long as 1.2 ms.", 3),
        ("Blocks of 32 in 4096 x 4096 with 64 tokens, since version 0.1.0 of 2026-11-26.", 0),
        ("Layouts of density 10 % with 5 % of their blocks take 3 to 4 us.", 1),
        ("The cache has 48 KB, 7.3x of it with `n=64 b=32 3 us`, 80 % busy.", 3),
    ],
)
def test_figures(sentence, count):
    assert len(check_pages.figures(check_pages.Paragraph(1, [sentence]).sentences()[0])) == count


def test_long_paragraphs_and_lists():
    prose = "A line of prose.\n" * 7
    assert "a paragraph of 7 lines" in next(check_pages.check_prose("docs/x.md", prose))
    for text in ("- An item.\n" * 9, "```\n" + prose + "```\n", "| a |\n" * 9, "A line.\n" * 6 + "\n" + "A line.\n"):
        assert not list(check_pages.check_prose("docs/x.md", text))
    assert list(check_pages.check_prose("docs/x.md", "word " * 200))  # one line that is not wrapped


def test_lengths():
    assert list(check_pages.check_prose("HACKING.md", "A line.\n\n" * 76)) == [
        "HACKING.md has 152 lines, of at most 150"
    ]
    assert list(check_pages.check_prose("README.md", "word\n\n" * 70 + "- word\n" * 9)) == []


def test_links(tmp_path, monkeypatch):
    monkeypatch.setattr(check_pages, "ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# One `thing`, two\n\n```\n# no heading\n```\n")
    text = "[a](there.md) [b](there.md#one-thing-two) [c](https://x.y/z) `[d](code.md)`\n"
    assert not list(check_pages.check_links("page.md", text))
    found = list(check_pages.check_links("page.md", "\n[a](gone.md) [b](there.md#no-heading)\n"))
    assert found == ["page.md:2: gone.md is not there", "page.md:2: there.md has no heading #no-heading"]


def test_pages_are_what_results_make():
    assert machine_pages.main(["--check"]) == 0


def test_every_result_has_a_page_or_a_word():
    named = {source.name for machine in MACHINES for source in machine.sources}
    told = (ROOT / "benchmarks/results/README.md").read_text().replace("{h100,h200}", "h100 2026-11-25-nvidia-h200")
    for path in (ROOT / "benchmarks/results").glob("*.jsonl"):
        assert path.stem in named or path.stem.split("-nvidia-h")[0] in told, path


def test_a_later_family_and_losses(tmp_path, monkeypatch):
    header = {"header": 1, "device": "cuda: a card", "cuda": "13", "opponents": {}, "date": "2026-01-02T00:00:00Z"}
    lines = [
        {"problem": f"linear:fprop bf16 n=256 b=64 random(64,{d}) device=cuda", "out": 4096, "in": 4096, "density": d}
        | {"kernel": "many", "us": us, "roofline_fraction": 0.2, "vs": {"cublas": 10.0, "cusparse_bsr": 90.0}}
        for d, us in ((0.5, 20.0), (0.25, 8.0), (0.1, 5.0), (0.05, 4.0))
    ]
    (tmp_path / "card.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    rows = [
        ("0.25", "row_wgmma", 4, "2026-01-03"),
        ("0.1", "row_wgmma", 4, "2026-01-01"),
        ("0.5", "wgmma", 19, "2026-01-03"),
        ("0.05", "wgmma", 2, "2026-01-03"),
    ]
    table = ["problem,family,us,commit,date,l2,source"]
    table += [f'"linear:fprop bf16 n=256 b=64 random(64,{d})",{f},{us},,{day},cold,x' for d, f, us, day in rows]
    (tmp_path / "card.csv").write_text("\n".join(table) + "\n")
    monkeypatch.setattr(machine_pages, "RESULTS", tmp_path)
    monkeypatch.setattr(machine_pages, "TABLES", tmp_path)
    page = machine_pages.Page(Machine("card", "A card", "", (Source("card", "made by", "all"),), crossover="card"))
    text = page.markdown()
    assert "| 256 | fprop | 50 % | **0.5** (20) |" in text  # a loss; a twentieth less may be noise
    assert "| 256 | fprop | 25 % | 2.5 (4†) |" in text
    assert "| 256 | fprop | 5 % | 5 (2†) |" in text  # the same family has changed
    assert "| 256 | fprop | 10 % | 2 (5) |" in text  # the other family's time is older
    assert "| `linear:fprop bf16 n=256 b=64 random(64,0.25)` | 22.5 (90) |" in text
    assert crossover.family_of("many", lines[0]["problem"]) == "wgmma"


def test_plain_kernels_stand_beside_ours(tmp_path, monkeypatch):
    header = {"header": 1, "device": "cuda: a card", "cuda": "13", "opponents": {}, "date": "2026-01-02T00:00:00Z"}
    line = {"by": "peers/gpu.py", "problem": "linear:fprop bf16 n=256 b=64 random(64,0.1) device=cuda", "us": 10.0}
    line |= {
        "out": 4096,
        "in": 4096,
        "density": 0.1,
        "us_hot": 9.0,
        "versions": {},
        "vs": {"torch_dense": 25.0, "triton_plain": 9.0},
    }
    (tmp_path / "card.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (header, line)))
    monkeypatch.setattr(machine_pages, "RESULTS", tmp_path)
    page = machine_pages.Page(Machine("card", "A card", "", (Source("card", "made by", "all"),)))
    text = page.markdown()
    assert "| fprop | 64 | 1 | 2.50x | 2.50x | 0 | 0.90x | 0.90x | 1 |" in text
    assert "| 256 | fprop | 10 % | 2.5, **0.9** (10) |" in text


def test_a_later_version_of_a_network(tmp_path, monkeypatch):
    def step(way, ms):
        return {"preset": "net", "way": way, "ms": ms, "memory_GB": 1.0, "batch": 64, "torch": "2"}

    for name, steps in (("old", [step("ours", 9.0), step("eager", 12.0)]), ("new", [step("ours", 5.0)])):
        header = {"header": 1, "commit": f"of {name}"}
        lines = [header, *steps, {"sampling": "net", "images": 1, "cached_s": 2, "plain_s": 8}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(machine_pages, "RESULTS", tmp_path)
    sources = tuple(Source(name, "made by", "all") for name in ("old", "new"))
    text = "\n".join(pixelcnn(machine_pages.Page(Machine("card", "A card", "", sources)).programs))
    assert "| `net` | ours | 5 | 1 | `of new` |" in text
    assert "| `net` | eager | 12 | 1 | `of old` |" in text
    assert "| 9 |" not in text
    assert text.count("| `net`, 1 images | 2 | 8 |") == 1


def test_feed_forward_parts_beside_the_faster_dense_one():
    case = {"features": 4, "hidden": 8, "dtype": "bf16", "pass": "inference", "density": 0.05, "block": 16}
    times = {"ours": 0.002, "separate": 0.003, "dense": 0.009, "compiled": 0.001}
    lines = [{**case, "tokens": 16, "plain": False, "ms": times}, {**case, "tokens": 1, "plain": True, "ms": times}]
    text = "\n".join(feed_forward([{"preset": "net", "ms": 1.0}, *lines]))
    assert "| SwiGLU, 4 x 8, bf16, inference | 5 % | 16 | 16 | 2 | 3 | 9 | 1 | **0.5** |" in text
    assert "| GELU, 4 x 8, bf16, inference | 5 % | 16 | 1 | 2 |" in text
    assert feed_forward([{"preset": "net", "ms": 1.0}]) == []


def test_the_map_has_a_place_for_every_folder(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import architecture

    architecture.main(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.delitem(architecture.OPS, "norm")
    with pytest.raises(SystemExit, match="no place for norm"):
        architecture.main(tmp_path / "map.png")
