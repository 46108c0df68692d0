"""Pictures and reports: labels apart, files whole, large graphs not without a word."""

import itertools
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from blocksparse import Layout, graphs
from blocksparse.__main__ import main

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg

from blocksparse.viz import draw_layout

GRAPHS = [
    "ba(384,8)",
    "banded(600,1)",  # 64 steps, none of which reaches all
    "diagonal(64,1)",
    "dense(256)",
    "dense(1)",
    "dense(2,500)",
    "dense(500,2)",
    "random(3000,1200,0.01)",
    "ws(3000,4,0.05)",
    "butterfly(1024)",
]


def texts_of(figure):
    """All that is drawn: ticks have labels outside of the axes, too."""
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        yield from axes.get_legend().get_texts() if axes.get_legend() else ()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            places = zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
            yield from (label for label, place in places if low <= place <= high)
    yield from figure.texts


@pytest.mark.parametrize("graph", GRAPHS)
def test_labels_do_not_overlap(graph):
    layout = Layout.from_graph(graph, 8)
    figure = draw_layout(layout, graphs.report(layout), "a rather long name of a layout, " * 3)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    shown = [(text.get_text(), text.get_window_extent(renderer)) for text in texts_of(figure) if text.get_text()]
    assert len(shown) > 10
    for (a, one), (b, other) in itertools.combinations(shown, 2):
        assert not one.padded(-0.5).overlaps(other.padded(-0.5)), (a, b)
    page = figure.bbox.padded(1)
    for text, box in shown:
        assert page.x0 <= box.x0 < box.x1 <= page.x1, text
        assert page.y0 <= box.y0 < box.y1 <= page.y1, text


def test_full_layouts_are_black():
    layout = Layout.from_graph("dense(256)", 8)
    image = draw_layout(layout, graphs.report(layout), "").axes[0].images[0]
    assert image.get_clim() == (0, 1)
    assert (image.get_array() == 1).all()


def test_large_layouts_are_drawn_by_their_share():
    layout = Layout.from_graph("dense(800,900)", 8)
    array = np.asarray(draw_layout(layout, graphs.report(layout), "").axes[0].images[0].get_array())
    assert array.shape == (768, 768)
    assert array.max() == array.min() == 1
    sparse = Layout.from_graph("random(2000,2000,0.001)", 8)
    image = draw_layout(sparse, graphs.report(sparse), "").axes[0].images[0]
    assert image.get_clim() == (0, np.asarray(image.get_array()).max())  # faint ones are seen
    assert image.norm(1 / 9) > 0.3 * image.norm(1)  # a pixel with one block of nine, say
    half = Layout.from_graph("random(800,800,0.5)", 8)
    array = np.asarray(draw_layout(half, graphs.report(half), "").axes[0].images[0].get_array())
    assert array.mean() == pytest.approx(0.5, abs=0.01)


def test_a_plot_is_whole_or_not_there(tmp_path, capsys, monkeypatch):
    path = tmp_path / "l.png"
    assert main(["plot", "ba(8,2)", "-o", str(path)]) == 0
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["plot", "ba(9,2)", "-o", str(path)]) == 2
    said = capsys.readouterr().err
    assert "l.png could not be written, what was there is kept: [Errno 28]" in said
    assert "[lm]" not in said
    assert main(["plot", "ba(9,2)", "-o", str(tmp_path / "new.png")]) == 2
    assert "what was there" not in capsys.readouterr().err
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["l.png"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("none/l.png", "none is no folder"),
        ("l.xyz", "l.xyz ends with .xyz, needs one of "),
        ("sub.png", "sub.png is a folder"),
    ],
)
def test_where_it_goes_is_tried_before_the_work(tmp_path, capsys, monkeypatch, out, message):
    (tmp_path / "sub.png").mkdir()
    monkeypatch.setattr("blocksparse.graphs.report", lambda layout: pytest.fail("it has begun"))
    assert main(["plot", "ba(8,2)", "-o", str(tmp_path / out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_without_an_ending_it_is_png(tmp_path, capsys):
    assert main(["plot", "ba(8,2)", "-o", str(tmp_path / "l")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'l.png'}\n"
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")


def test_long_work_is_not_silent(capsys, monkeypatch):
    monkeypatch.setattr("blocksparse.patience.PAUSES", (0.1, 0.1))
    report = graphs.report
    monkeypatch.setattr("blocksparse.graphs.report", lambda layout: time.sleep(0.5) or report(layout))
    assert main(["report", "ba(8,2)"]) == 0
    said = capsys.readouterr()
    assert "mean shortest path" in said.out
    lines = said.err.splitlines()
    assert 2 <= len(lines) <= 6
    assert all(re.fullmatch(r"blocksparse: measuring paths through 34 blocks: \d+ s so far", line) for line in lines)


def test_a_large_report_says_beforehand_how_long(capsys, monkeypatch):
    monkeypatch.setattr("blocksparse.__main__.LARGE", 100)
    assert main(["report", "ba(8,2)"]) == 0
    assert capsys.readouterr().err.startswith("blocksparse: paths from 8 of 8 blocks through 34 blocks may take ")


def test_errors_of_long_work_are_those_of_short(capsys):
    assert main(["report", "nonsense"]) == 2
    assert "is no graph name" in capsys.readouterr().err


def test_ctrl_c_ends_a_long_report():
    """Within the core's product of minutes."""
    running = subprocess.Popen(
        [sys.executable, "-m", "blocksparse", "report", "dense(3000)"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert any("may take" in line for line in running.stderr)  # of 9 million blocks
    begin = time.monotonic()
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 130
    assert said.endswith("\nblocksparse: stopped\n")
    assert "Traceback" not in said
    assert time.monotonic() - begin < 10


# ---- Files that are no layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"hello"), "it is no .npz archive"),
        (lambda path: path.write_bytes(b""), "it is no .npz archive"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\0v\0"), "it is no .npz archive"),
        (lambda path: np.savez(path, x=np.zeros(3)), "it has no array named pattern"),
        (lambda path: np.savez(path, pattern=np.array([{}], object)), "its array named pattern cannot be read"),
        (lambda path: np.savez(path, pattern=np.zeros((2, 2), np.int32)), "needs a row of integers"),
        (lambda path: np.savez(path, pattern=np.zeros(3)), "it holds no digits"),
    ],
)
def test_what_is_no_saved_layout(tmp_path, capsys, write, message):
    path = tmp_path / "bad.npz"
    write(path)
    assert main(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"bad.npz is no saved layout: {message}" in said or message in said
    assert "pickle" not in said
    assert said.count("\n") == 1
