import networkx
import numpy as np
import pytest

from blocksparse import Layout, graphs


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (graphs.dense(3, 4, block_size=8), "dense(3,4)"),
        (graphs.random(9, density=0.3, block_size=8, seed=2), "random(9,0.3)"),
        (graphs.random(9, 5, density=0.3, block_size=8, seed=2), "random(9,5,0.3)"),
        (graphs.balanced_random(12, 8, degree=3, block_size=8, seed=2), "balanced(12,8,3)"),
        (graphs.balanced_random(12, degree=3, block_size=8, seed=2, diagonal=True), "balanced(12,3,diagonal=1)"),
        (graphs.watts_strogatz(20, 4, 0.2, block_size=8, seed=2), "ws(20,4,0.2)"),
        (graphs.watts_strogatz_torus(6, 5, 4, 0.2, block_size=8, seed=2), "ws2d(6,5,4,0.2)"),
        (graphs.barabasi_albert(20, 3, block_size=8, seed=2), "ba(20,3)"),
        (graphs.barabasi_albert(20, 3, block_size=8, extra=4, seed=2), "ba(20,3,4)"),
        (graphs.barabasi_albert(20, 3, block_size=8, blocks=140, seed=2), "ba(20,3,blocks=140)"),
        (graphs.block_diagonal(9, 2, block_size=8), "diagonal(9,2)"),
        (graphs.banded(9, 2, block_size=8), "banded(9,2)"),
        (graphs.butterfly(8, block_size=8), "butterfly(8)"),
    ],
)
def test_functions_and_names_agree(layout, name):
    assert layout == Layout.from_graph(name, 8, seed=2)


@pytest.mark.parametrize("name", ["ws(60,6,0.2)", "ba(60,3,6)", "diagonal(60,7)", "butterfly(64)"])
def test_report_agrees_with_networkx(name):
    layout = Layout.from_graph(name, 8, seed=1)
    mask = layout.mask()
    graph = networkx.from_numpy_array(mask & ~np.eye(len(mask), dtype=bool))
    report = graphs.report(layout)
    assert report.clustering == pytest.approx(networkx.average_clustering(graph))
    lengths = [
        n for source, all_ in networkx.shortest_path_length(graph) for target, n in all_.items() if target != source
    ]
    assert report.mean_path == pytest.approx(np.mean(lengths))
    assert report.diameter == max(lengths)
    assert report.out_degrees.max == max(dict(graph.degree).values()) + 1
    reached = np.eye(len(mask), dtype=bool)
    for share in report.mix:
        reached = reached @ mask
        assert share == pytest.approx(reached.mean())


def test_mix_of_different_layouts():
    layouts = [Layout.from_graph("ws(40,4,0.3)", 8, seed=s) for s in range(3)]
    reached = np.eye(40, dtype=bool)
    for layout, share in zip(layouts, graphs.mix(layouts), strict=True):
        reached = reached @ layout.mask().T
        assert share == pytest.approx(reached.mean())
    with pytest.raises(ValueError, match="square and of one size"):
        graphs.mix([*layouts, graphs.dense(2, 3, block_size=8)])


def test_report_reads_well():
    text = str(graphs.report(Layout.from_graph("ba(384,8)", 32)))
    assert "mean shortest path" in text
    assert "4.38%" in text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: graphs.random(4, density=1.5, block_size=8), "density is 1.5"),
        (lambda: graphs.balanced_random(4, degree=5, block_size=8), "degree is 5"),
        (lambda: graphs.balanced_random(4, 5, degree=2, block_size=8, diagonal=True), "as many rows as columns"),
        (lambda: graphs.watts_strogatz(10, 3, 0.2, block_size=8), "neighbours is 3"),
        (lambda: graphs.barabasi_albert(10, 2, block_size=8, blocks=3), "blocks is 3"),
        (lambda: graphs.butterfly(9, block_size=8), "power of two"),
        (lambda: graphs.random(4, density=0.5, block_size=8, seed=-3), "seed is -3"),
    ],
)
def test_says_what_is_wrong(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_report_tells_rows_from_columns():
    said = graphs.report(Layout.from_mask([[1, 1, 1], [0, 0, 0], [0, 1, 0]], 8))
    assert said.out_degrees == graphs.Degrees(0, 1, 3)
    assert said.in_degrees == graphs.Degrees(1, 1, 2)


def test_only_all_is_100_percent():
    assert [graphs.percent(share) for share in (0, 0.9996, 1)] == ["0.0%", "99.9%", "100.0%"]
