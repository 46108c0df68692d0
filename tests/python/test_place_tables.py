"""Tables that are made anew from the places of blocks: to the bit what the C library makes of the same layout."""

import ctypes

import numpy as np
import pytest
import torch

from blocksparse import Layout, graphs
from blocksparse._core import library, structs
from blocksparse.layout import HostLayout
from blocksparse.torch.place_tables import (
    HASH,
    HEADER,
    PADDING,
    RESERVED,
    schedule_words,
    sections_of,
    tables_to_change,
    write_tables,
)
from blocksparse.torch.sparsify.sparse_to_sparse.rewired_layer import places_of


def hubs(row):
    """One row of all places, and two of some: cut into slices of different numbers."""
    mask = np.zeros((64, 5000), bool)
    mask[row] = True
    mask[row + 7 : row + 9, :50] = True
    return mask


PAIRS = {
    "scale-free": lambda seed: graphs.barabasi_albert(300, 4, blocks=3000, block_size=8, seed=seed),
    "wide": lambda seed: graphs.random(40, 900, density=0.2, block_size=16, seed=seed),
    "tall": lambda seed: graphs.random(4000, 30, density=0.2, block_size=8, seed=seed),
    "few slices": lambda seed: graphs.random(3, 400, density=0.3, block_size=8, seed=seed),
    "tiny": lambda seed: graphs.random(3, 2, density=0.5, block_size=8, seed=seed),
    "a row of all": lambda seed: Layout.from_mask(hubs(seed), 8, out_features=510),
    "a column of all": lambda seed: Layout.from_mask(hubs(seed).T, 8, in_features=505),
}


@pytest.mark.parametrize("name", PAIRS)
def test_tables_are_those_of_the_library(name):
    first, other = PAIRS[name](0), PAIRS[name](1)
    words = tables_to_change(first.host(), torch.device("cpu"))
    write_tables(words, places_of(other), other.grid)
    expected, made = other.index(), words.numpy().copy()
    assert not made[HASH : HASH + 2].any()  # as a card leaves it
    made[HASH : HASH + 2] = expected[HASH : HASH + 2]
    assert np.array_equal(made[: expected.size], expected)
    assert not made[expected.size :].any()
    assert sections_of(*other.grid, other.blocks).words <= expected.size <= made.size
    handle = ctypes.c_void_p()
    library.call("bs_layout_from_device_index", words.data_ptr(), words.numel(), ctypes.byref(handle))
    assert HostLayout(handle) == other
    assert first != other


@pytest.mark.parametrize("columns", [0, 15, 33, 700, 3000, 5000])
def test_there_is_as_much_room_as_a_card_needs(columns):
    for rows in (0, 1, 16, 132, 133, 264, 635, 660, 661, 1320, 1321, 2640, 2641):
        view, words = structs.LayoutView(None, library.CUDA, 0, 0, 8, 8 * rows, 8 * columns, 0), ctypes.c_int64()
        library.call("bs_layout_build_words", ctypes.byref(view), ctypes.byref(words))
        assert sections_of(rows, columns, 0).words + schedule_words(rows, columns) + PADDING == words.value


def test_tables_that_change_are_neither_dealt_nor_of_a_wrong_mask():
    first, other = PAIRS["scale-free"](0), PAIRS["scale-free"](1)
    words = torch.from_numpy(first.index_for_card())
    assert words.numel() == tables_to_change(first.host(), torch.device("cpu")).numel()
    assert words[RESERVED + 2] == 3  # both directions
    words[HASH : HASH + 2] = 0
    words[RESERVED] = 1  # as a card leaves it that found another number of blocks
    write_tables(words, places_of(other), other.grid)
    assert not words[RESERVED:HEADER].any()
    assert not other.index()[RESERVED:HEADER].any()
    handle = ctypes.c_void_p()
    library.call("bs_layout_from_device_index", words.data_ptr(), words.numel(), ctypes.byref(handle))
    assert HostLayout(handle) == other
