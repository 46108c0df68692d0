"""Activation that spreads through a graph: the steps, the files, and what is refused before any work."""

import contextlib
import signal

import numpy as np
import pytest

from blocksparse import Layout, graphs
from blocksparse.__main__ import main

pytest.importorskip("matplotlib")

from PIL import Image

from blocksparse.spread import Torus, interrupts, steps_from


def test_steps_are_those_of_products():
    layout = Layout.from_graph("ws2d(8,9,4,0.3)", 8, seed=3)
    mask = layout.mask().astype(int)
    reached, expected = np.eye(72, dtype=int)[40], np.full(72, -1)
    for step in range(72):
        expected[(expected < 0) & (reached > 0)] = step
        reached = np.minimum(mask @ reached, 1)
    assert (steps_from(layout, 40) == expected).all()


def test_steps_without_rewiring_are_distances_on_the_torus():
    row, column = np.divmod(np.arange(7 * 10), 10)
    distances = np.minimum(row, 7 - row) + np.minimum(column, 10 - column)
    assert (steps_from(Layout.from_graph("ws2d(7,10,4,0)", 8), 0) == distances).all()


def test_what_is_never_reached():
    assert steps_from(Layout.from_graph("diagonal(6,2)", 8), 2).tolist() == [-1, -1, 0, 1, -1, -1]


def test_shortcuts_are_links_that_were_moved():
    torus, before = Torus.of("ws2d(9,12,8,0.1)"), Layout.from_graph("ws2d(9,12,8,0)", 8)
    out, in_ = before.coordinates()
    assert not torus.is_shortcut(in_, out).any()
    layout = Layout.from_graph(torus.name, 8)
    out, in_ = layout.coordinates()
    moved = layout.mask() & ~before.mask()
    assert moved.any()
    assert (torus.is_shortcut(in_, out) <= moved[out, in_]).all()
    assert torus.is_shortcut(in_, out).sum() > 0.8 * moved.sum()  # some are moved to where they are as near


def test_lines_take_the_shortest_way_over_the_edges():
    torus = Torus.of("ws2d(6,8,4,0)")
    here, there = np.array([9, 0, 0, 7]), np.array([19, 47, 7, 0])
    lines = torus.shortest_lines(here, there)
    assert [line.tolist() for line in lines] == [
        [[1, 1], [3, 2]],
        [[0, 0], [-1, -1]],
        [[0, 0], [-1, 0]],
        [[7, 0], [8, 0]],
        [[8, 6], [7, 5]],
        [[8, 0], [7, 0]],
        [[-1, 0], [0, 0]],
    ]


def test_without_links_there_is_no_path(tmp_path):
    from blocksparse.spread import _Spread

    for graph, words in (("ws2d(5,5,0,0)", "no paths"), ("ws2d(5,5,4,0)", "average path length 2.50")):
        layout = Layout.from_graph(graph, 8)
        assert _Spread(Torus.of(graph), layout, graphs.report(layout))._caption().splitlines()[0] == words


@pytest.fixture
def usual_interrupts():
    """Ctrl-C as in a program of its own: where tests run in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_python_drops_is_raised_by_the_check(usual_interrupts):
    with interrupts() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_names_may_have_spaces_and_words():
    torus = Torus.of(" ws2d( 16, 24, rewire=0.2, neighbours=8 )")
    assert (torus.height, torus.width, torus.neighbours, torus.centre) == (16, 24, 8, 8 * 24 + 12)


def test_a_gif_has_a_frame_for_each_step(tmp_path, capsys):
    path = tmp_path / "spread.gif"
    assert main(["animate", "ws2d(6,8,4,0)", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    with Image.open(path) as image:
        assert image.n_frames == 8  # 0 to 3 + 4
        frames = []
        for i in range(image.n_frames):
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
            assert image.info["duration"] == (3000 if i == 7 else 800)
    assert image.info["loop"] == 0
    unreached = [(frame == (0xEC, 0xEC, 0xEC)).all(-1).sum() for frame in frames]
    assert unreached == sorted(unreached, reverse=True)
    assert unreached[-1] < 0.01 * unreached[0]  # letters have grey edges


def test_one_node_is_one_frame(tmp_path):
    assert main(["animate", "ws2d(1,1,0,0)", "-o", str(tmp_path / "one.gif")]) == 0
    with Image.open(tmp_path / "one.gif") as image:
        assert image.n_frames == 1


def test_other_endings_are_strips(tmp_path, capsys):
    assert main(["animate", "ws2d(6,8,4,0.1)", "--seed", "1", "-o", str(tmp_path / "strip.png")]) == 0
    assert main(["animate", "ws2d(6,8,4,0.1)", "-o", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.splitlines()[1] == str(tmp_path / "none.gif")
    assert (tmp_path / "strip.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "none.gif").read_bytes().startswith(b"GIF89a")


def test_names_may_be_as_long_as_files_have_them(tmp_path, capsys, monkeypatch):
    path = tmp_path / ("a" * 251 + ".gif")
    assert main(["animate", "ws2d(4,4,4,0)", "-o", str(path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    path.unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["animate", f"ws2d(4,4,4,0.{'0' * 300})"]) == 0  # the beginning of the graph's name
    assert capsys.readouterr().out.endswith(f"\nws2d-4-4-4-0.{'0' * 87}.gif\n")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("graph", "out", "message"),
    [
        (
            "ba(384,8)",
            "a.gif",
            "ba(384,8) is no graph on a torus, needs one whose nodes have coordinates: ws2d(height,",
        ),
        ("saved.npz", "a.gif", "saved.npz is no graph on a torus"),
        ("ws2d(16,24)", "a.gif", "does not fit ws2d(height,width,neighbours,rewire)"),
        ("ws2d(16,x,8,0.2)", "a.gif", '"x" is no number'),
        ("ws2d(-1,24,8,0.2)", "a.gif", "-1 blocks per side"),
        ("ws2d(3,3,8,2)", "a.gif", "rewire is 2, needs 0 to 1"),
        ("ws2d(700,1000,8,0.2)", "a.gif", "has 700 x 1000 nodes, needs 768 a side at most"),
        ("ws2d(700,700,400000,0.2)", "a.gif", "GB of memory"),
        ("ws2d(16,24,8,0.2)", "nowhere/a.gif", "nowhere is no folder"),
        ("ws2d(16,24,8,0.2)", "a.xyz", "a.xyz ends with .xyz, needs one of "),
        ("ws2d(16,24,8,0.2)", "folder.gif", "folder.gif is a folder"),
        ("ws2d(16,24,8,0.2)", "a" * 260, "has a name of 260 bytes, needs 255 or fewer"),
        ("ws2d(16,24,8,0.2)", "a" * 253, "has a name of 257 bytes, needs 255 or fewer"),
        ("ws2d(16,24,8,0.2)", "ä" * 130 + ".gif", "has a name of 264 bytes, needs 255 or fewer"),
    ],
)
def test_what_is_refused(tmp_path, capsys, monkeypatch, graph, out, message):
    (tmp_path / "folder.gif").mkdir()
    monkeypatch.setattr("blocksparse.graphs.report", lambda layout: pytest.fail("it has begun"))
    assert main(["animate", graph, "-o", str(tmp_path / out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.gif"]


@pytest.mark.parametrize("command", ["animate", "plot"])
@pytest.mark.parametrize("out", ["", "-"])
def test_pictures_need_a_file(capsys, command, out):
    assert main([command, "ws2d(4,4,4,0.2)", "-o", out]) == 2
    assert f'[{command}] the picture is "{out}", needs a file' in capsys.readouterr().err


def test_what_was_there_is_kept(tmp_path, capsys, monkeypatch):
    path = tmp_path / "spread.gif"
    path.write_bytes(b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["animate", "ws2d(4,4,4,0)", "-o", str(path)]) == 2
    assert "spread.gif could not be written, what was there is kept" in capsys.readouterr().err
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["spread.gif"]
