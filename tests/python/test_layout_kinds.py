"""Both kinds of layouts answer alike: tables on the host, and tables that lie elsewhere and are copied when asked for.

What a card makes of a mask is tested in test_torch_device_layout.py. Here the tables of a `DeviceLayout` lie in the
memory of the CPU, so no card is needed.
"""

import copy
import pickle

import numpy as np
import pytest
import torch

import blocksparse.torch as bst
from blocksparse import Layout, graphs
from blocksparse.torch.device_layout import DeviceLayout


@pytest.fixture(autouse=True)
def _without_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def elsewhere(layout, remade=False):
    words = torch.from_numpy(layout.index_memory().copy())
    size = layout.block_size, layout.blocks, layout.grid, layout.sizes
    return DeviceLayout(words, *size, False, remade)


@pytest.fixture(params=["host", "device", "remade"])
def kind(request, layout):
    """A layout of each kind, as (itself, its twin on the host)."""
    return (layout if request.param == "host" else elsewhere(layout, request.param == "remade")), layout


@pytest.mark.parametrize("turned", [False, True])
def test_kinds_answer_alike(kind, turned, tmp_path):
    mine, twin = (layout.t() if turned else layout for layout in kind)
    assert isinstance(mine, Layout)
    for name in ("block_size", "blocks", "grid", "sizes", "transposed", "density", "values_shape", "out_features"):
        assert getattr(mine, name) == getattr(twin, name)
        assert type(getattr(mine, name)) is type(getattr(twin, name))
    assert mine == twin == mine.t().t() == mine.host()
    assert twin == mine != twin.t()
    assert hash(mine) == hash(twin)
    assert repr(mine) == repr(twin)
    assert mine != "a layout"
    assert np.array_equal(mine.mask(), twin.mask())
    assert np.array_equal(mine.pattern(), twin.pattern())
    for arrays in zip((*mine.csr(), *mine.coordinates()), (*twin.csr(), *twin.coordinates()), strict=True):
        assert np.array_equal(*arrays)
    w = np.random.default_rng(0).standard_normal(twin.values_shape)
    assert np.array_equal(mine.to_dense(w), twin.to_dense(w))
    assert copy.deepcopy(mine) is mine
    assert pickle.loads(pickle.dumps(mine)) == twin
    mine.save(tmp_path / "layout.npz")
    assert Layout.load(tmp_path / "layout.npz") == twin
    assert graphs.report(mine) == graphs.report(twin)
    with pytest.raises(AttributeError, match="blocks cannot be set"):
        mine.blocks = 3


def test_ops_take_either(kind):
    mine, twin = kind
    x, dy, w = torch.randn(3, mine.in_features), torch.randn(3, mine.out_features), torch.randn(mine.values_shape)
    assert torch.equal(bst.linear(x, w, mine), bst.linear(x, w, twin))
    assert torch.equal(bst.linear(dy, w, mine.t()), bst.linear(dy, w, twin.t()))
    assert bst.index_of(mine.t()) is bst.index_of(mine)  # one table for both directions


def test_views_share_tables(layout):
    assert layout.t().tables is layout.tables
    there = elsewhere(layout)
    assert there.t().tables is there.tables


def test_tables_that_a_graph_remakes_stay_where_they_are(layout):
    there = elsewhere(layout, remade=True)
    for ask in (there.view, there.index_memory, there.index):
        with pytest.raises(RuntimeError, match="made anew by each replay"):
            ask()
    assert elsewhere(layout).view().blocks == layout.blocks


def test_steps_through_one_layout_that_is_remade():
    square = graphs.watts_strogatz(64, 4, 0.2, block_size=8)
    there = elsewhere(square, remade=True)
    assert graphs.mix([there] * 3) == graphs.mix([square] * 3)


def test_stacked(layout):
    square = graphs.dense(3, block_size=8)
    assert elsewhere(square).stack(4) == square.stack(4)
    with pytest.raises(ValueError, match="needs a multiple of 16"):
        elsewhere(layout).stack(2)
