import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import crossover  # noqa: E402
from crossover import Time, canonical, family_of  # noqa: E402

TABLES = sorted((ROOT / "src" / "gemm" / "cuda" / "crossover").glob("*.csv"))
CARD = "cuda: NVIDIA H200"
FPROP, WGRAD = "linear:fprop bf16 n=512 b=32 random(128,0.1)", "linear:wgrad bf16 n=512 b=32 random(128,0.1)"


def line(problem, kernel, **others):
    return {"problem": f"{problem} device=cuda", "device": CARD, "kernel": kernel, **others}


def write(path, date, *records, commit="abc"):
    header = [{"header": 1, "device": CARD, "commit": commit, "date": date}] if date else []
    path.write_text("".join(json.dumps(record) + "\n" for record in [*header, *records]))
    return path


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "h200.csv"
    crossover.write(path, {})
    return path


def run(*arguments):
    return crossover.main([str(argument) for argument in arguments])


def rows(path):
    return {key: time.us for key, time in crossover.read(path).items()}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_tables_are_as_they_would_be_written(path, tmp_path):
    times = crossover.read(path)
    assert all(time.us > 0 and time.source and len(time.date) == 10 for time in times.values())
    again = tmp_path / path.name
    crossover.write(again, times)
    assert again.read_text() == path.read_text()


def test_there_is_a_table_for_both_cards():
    assert [path.name for path in TABLES] == ["h100.csv", "h200.csv"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("linear:fprop n=4 b=8 random(8,0.10) device=cuda", "linear:fprop f32 n=4 b=8 random(8,0.1)"),
        ("linear:fprop bf16 random(8,16,0.50)", "linear:fprop bf16 n=64 b=32 random(8,16,0.5)"),
        ("linear:wgrad bf16 ba(8,2) dw=f32 pairs=8 y=first x=first", None),
        ("linear:fprop tf32 f32 ba(8,2) act=gelu bias t seed=3", None),
        ("linear:fprop bf16 ba(8,2) x=last act=none pairs=1 seed=0 threads=3", "linear:fprop bf16 n=64 b=32 ba(8,2)"),
    ],
)
def test_a_problem_has_one_line(given, wanted):
    others = {
        "wgrad": "linear:wgrad bf16 n=64 b=32 ba(8,2) x=first y=first pairs=8 dw=f32",
        "fprop": "linear:fprop f32 n=64 b=32 ba(8,2) seed=3 t bias act=gelu tf32",
    }
    line = canonical(given)
    assert line == (wanted or others[given[7:12]])
    assert canonical(line) == line


@pytest.mark.parametrize(
    "given",
    [
        "",
        "linear:fprop n=4",
        "conv:fprop n=4 hw=8 random(8,8,0.5)",
        "linear:fprop ba(8,2) spam",
        "linear:fprop ba(8,2) t=1",
    ],
)
def test_what_has_no_line(given):
    with pytest.raises(ValueError, match=r"needs to begin|names no graph|linear op|means nothing"):
        canonical(given)


def test_families_by_their_older_names():
    f32 = "linear:dgrad f32 n=64 b=32 random(128,0.1)"
    assert family_of("few", FPROP) == family_of("few", f"{f32} tf32") == "stream_w"
    assert family_of("few", f32) == "stream_w_f32"
    assert (family_of("few", WGRAD), family_of("many", WGRAD)) == ("wgrad_stream", "wgrad_wgmma")
    assert (family_of("many", FPROP), family_of("rows", FPROP)) == ("wgmma", "row_wgmma")
    assert (family_of("sweep", FPROP), family_of("resident", FPROP)) == ("stream_x", "w_in_smem")
    assert (family_of("regions", WGRAD), family_of("tiled", f32)) == ("wgrad_in_registers", "tiled_f32")
    assert all(family_of(family, FPROP) == family for family in crossover.FAMILIES)
    with pytest.raises(ValueError, match="there is no family 'spam'"):
        family_of("spam", FPROP)


def test_add(table, tmp_path, capsys):
    results = write(
        tmp_path / "2026-11-24-nvidia-h200.jsonl",
        "2026-11-24T10:00:00Z",
        line(FPROP, "rows", us=14, us_hot=13),
        line(FPROP, "stream_w", us_hot=19),
        line(WGRAD, "few", us=15),
        {**line(FPROP, "rows", us=1), "device": "cuda: NVIDIA H100 80GB HBM3"},
        {"by": "peers/gpu.py", "problem": FPROP, "device": CARD, "us": 2},
        line("conv:fprop bf16 n=4 hw=8 r=3 b=32 random(8,8,0.5)", "halo", us=3),
    )
    assert run("add", results, "--csv", table) == 0
    assert capsys.readouterr().out == "nvidia-h200.jsonl: 4 times\n"
    assert rows(table) == {
        (FPROP, "row_wgmma", "cold"): 14,
        (FPROP, "row_wgmma", "hot"): 13,
        (FPROP, "stream_w", "hot"): 19,
        (WGRAD, "wgrad_stream", "cold"): 15,
    }
    assert table.read_text().splitlines()[:2] == [
        "problem,family,us,commit,date,l2,source",
        f'"{FPROP}",row_wgmma,14,abc,2026-11-24,cold,nvidia-h200.jsonl',
    ]
    assert run("add", results, "--csv", table) == 0
    assert capsys.readouterr().out == "nvidia-h200.jsonl: 0 times\n"


def test_the_newest_time_counts(table, tmp_path):
    key = (FPROP, "row_wgmma", "hot")
    bare = write(tmp_path / "2026-11-21-nvidia-h200-by-kernel.jsonl", None, line(FPROP, "rows", us_hot=20))
    early = write(tmp_path / "b.jsonl", "2026-11-22T05:00:00Z", line(FPROP, "rows", us_hot=18))
    late = write(tmp_path / "a.jsonl", "2026-11-22T15:00:00Z", line(FPROP, "rows", us_hot=16))
    assert run("add", late, bare, early, "--csv", table) == 0
    assert rows(table) == {key: 16}
    assert run("add", bare, "--csv", table) == 0
    assert rows(table) == {key: 16}
    newest = write(tmp_path / "2026-11-25-c.jsonl", None, line(WGRAD, "few", us_hot=9))
    assert run("add", newest, "--commit", "def", "--csv", table) == 0
    assert crossover.read(table)[WGRAD, "wgrad_stream", "hot"].commit == "def"
    assert crossover.read(table)[key] == Time(FPROP, "row_wgmma", 16, "abc", "2026-11-22", "hot", "a.jsonl")


def test_show(table, tmp_path, capsys):
    small = FPROP.replace("512", "64")
    times = [("many", 12), ("few", 10), ("rows", 11)]
    lines = [line(FPROP, kernel, us=us) for kernel, us in times] + [line(small, "few", us_hot=4)]
    assert run("add", write(tmp_path / "r.jsonl", "2026-11-22", *lines), "--csv", table) == 0
    capsys.readouterr()
    assert run("show", "--csv", table) == 0
    first, second = (text.split()[5:] for text in capsys.readouterr().out.splitlines())
    assert first == ["hot", "stream_w", "4"]
    assert second == ["cold", "stream_w", "10", "row_wgmma", "11", "1.10"]


def test_without(table, tmp_path, capsys):
    def of(n, **us):
        return [line(FPROP.replace("512", str(n)), kernel, us_hot=time) for kernel, time in us.items()]

    lines = [*of(300, rows=10, many=12, few=11), *of(512, rows=10, many=10.2), *of(400, many=10, rows=10.2)]
    lines += [line(FPROP, "rows", us=9), line(FPROP, "many", us=9.5), *of(64, rows=5)]  # 512 from memory; one alone
    assert run("add", write(tmp_path / "r.jsonl", "2026-11-22", *lines), "--csv", table) == 0

    def cells(*families):
        capsys.readouterr()
        assert run("without", *families, "--csv", table) == 0
        lines = capsys.readouterr().out.splitlines()[2:]
        return [[cell.strip() for cell in text.strip("|").split("|")] for text in lines]

    alone, one = cells("row_wgmma")
    assert alone == ["16 bits fprop, dgrad", "32", "1 to 64", "0", "1", *[""] * 7]
    # 300 tokens lose 10 % to few, 512 tokens 5.6 % from memory, which is worse than 2 % in cache.
    assert one[2:9] == ["257 to 1024", "2", "", "7.8 %", "10.0 %", "2", "0"]
    assert one[9:] == [f"`{FPROP.replace('512', '300')}` hot", "row_wgmma 10 us", "stream_w 11 us"]
    together = cells("row_wgmma", "stream_w")
    assert together[1][3:9] == ["2", "", "12.8 %", "20.0 %", "2", "1"]
    assert cells("stream_w") == []


def test_drop(table, tmp_path, capsys):
    for day, us in (("2026-11-21", 20), ("2026-11-22", 16)):
        lines = [line(FPROP.replace("512", day[-2:]), kernel, us_hot=us) for kernel in ("rows", "many")]
        assert run("add", write(tmp_path / f"{day}.jsonl", day, *lines), "--csv", table) == 0
    capsys.readouterr()
    assert run("drop", "row_wgmma", "--before", "2026-11-22", "--csv", table) == 0
    assert capsys.readouterr().out == "1 times dropped\n"
    assert sorted(rows(table).values()) == [16, 16, 20]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("problem,us\n", "has columns"),
        ("spam,1,,2026-11-22,hot,x\n", "line 2"),
        ("stream_w,1,,2026-11-22,warm,x\n", "line 2"),
        ("stream_w,fast,,2026-11-22,hot,x\n", "could not convert"),
        ("stream_w,1,,2026-11-22,hot,x\n" * 2, "a second time"),
    ],
)
def test_a_wrong_table_is_refused(table, text, reason, capsys):
    head = "problem,family,us,commit,date,l2,source\n"
    body = "".join(f'"{FPROP}",{row}' for row in text.splitlines(keepends=True))
    table.write_text(text if text.startswith("problem") else head + body)
    assert run("show", "--csv", table) == 1
    assert reason in capsys.readouterr().err


def test_wrong_results_are_refused(table, tmp_path, capsys):
    undated = write(tmp_path / "results.jsonl", None, line(FPROP, "rows", us=1))
    unknown = write(tmp_path / "2026-11-22-r.jsonl", None, line(FPROP, "spam", us=1))
    for path, reason in ((undated, "has no date"), (unknown, "no family"), (tmp_path / "none.jsonl", "No such file")):
        assert run("add", path, "--csv", table) == 1
        assert reason in capsys.readouterr().err
    assert rows(table) == {}
