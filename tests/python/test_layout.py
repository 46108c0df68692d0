import copy
import os
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse import Layout
from blocksparse._core.arguments import to_int
from blocksparse._core.digits import from_digits, to_digits


def test_is_the_same_however_it_is_made():
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]])
    layout = Layout.from_mask(mask, 8)
    assert layout == Layout.from_mask(mask.astype(bool), 8)
    assert layout == Layout.from_coordinates([2, 0, 2, 0], [2, 2, 1, 0], (3, 3), 8)
    assert layout == Layout.from_csr([0, 2, 2, 4], [0, 2, 1, 2], 3, 8)
    data = np.ones((4, 8, 8))
    bsr = scipy.sparse.bsr_array((data, [0, 2, 1, 2], [0, 2, 2, 4]), shape=(24, 24))
    assert layout == Layout.from_scipy(bsr)
    dense = torch.kron(torch.tensor(mask), torch.ones(8, 8))
    assert layout == Layout.from_torch(dense.to_sparse_bsr((8, 8)))
    assert hash(layout) == hash(Layout.from_mask(mask, 8))
    assert (layout.mask() == mask).all()
    assert repr(layout) == "Layout(24 x 24 in 3 x 3 blocks of 8: 4 of 9 (44.44%))"


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([8, 16, 32, 64, 128]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_mask_survives(rows, columns, b, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, columns)) < rng.random()
    out = None if rows == 0 else int(rows * b - rng.integers(b))
    in_ = None if columns == 0 else int(columns * b - rng.integers(b))
    layout = Layout.from_mask(mask, b, out_features=out, in_features=in_)
    assert (layout.mask() == mask).all()
    assert layout == Layout.from_pattern(layout.pattern())
    assert layout == Layout.from_coordinates(*layout.coordinates(), mask.shape, b, out_features=out, in_features=in_)
    assert (layout.t().mask() == mask.T).all()
    assert layout.t().t() == layout
    assert layout.blocks == mask.sum()


def test_save_and_load(tmp_path, layout):
    path = tmp_path / "layout.npz"
    layout.save(path)
    assert Layout.load(path) == layout
    assert list(tmp_path.iterdir()) == [path]


def test_transposition_is_saved(tmp_path, layout):
    path = tmp_path / "layout.npz"
    layout.t().save(path)
    assert Layout.load(path) == layout.t()
    assert Layout.from_pattern(layout.t().pattern()) == layout.t()
    altered = layout.pattern()
    altered[12] = 1
    with pytest.raises(ValueError, match="damaged"):
        Layout.from_pattern(altered)
    previous = os.umask(0o022)
    os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o666 & ~previous


def test_is_immutable(layout):
    with pytest.raises(AttributeError, match="immutable"):
        layout.sizes = (1, 1)


def test_damaged_files_are_refused(tmp_path, layout):
    path = tmp_path / "layout.npz"
    layout.save(path)
    good = path.read_bytes()
    for cut in (0, 1, 10, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(ValueError, match="is no saved layout"):
            Layout.load(path)
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="is no saved layout"):
        Layout.load(path)
    pattern = layout.pattern()
    pattern[-1] ^= 1
    np.savez(path, pattern=pattern)
    with pytest.raises(ValueError, match="damaged"):
        Layout.load(path)
    with pytest.raises(FileNotFoundError):
        Layout.load(tmp_path / "nowhere.npz")


def test_a_failed_save_keeps_what_was_there(tmp_path, layout, monkeypatch):
    path = tmp_path / "layout.npz"
    layout.save(path)

    def full(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="disk full"):
        Layout.from_graph("dense(2)", 8).save(path)
    assert Layout.load(path) == layout
    assert list(tmp_path.iterdir()) == [path]


def test_copies_and_pickles(layout):
    assert copy.deepcopy(layout) is layout
    for one in (layout, layout.t()):
        assert pickle.loads(pickle.dumps(one)) == one


def test_tables_outlive_the_layout():
    index = Layout.from_graph("ba(50,3)", 8).index()
    assert index[0] == 0x58495342
    with pytest.raises(ValueError, match="read-only"):
        index[0] = 1


def test_to_dense_places_blocks(layout, rng):
    values = rng.standard_normal(layout.values_shape)
    dense = layout.to_dense(values)
    assert dense.shape == (60, 90)
    b, (out, in_) = layout.block_size, layout.coordinates()
    for block, o, i in zip(values, out, in_, strict=True):
        part = dense[o * b : (o + 1) * b, i * b : (i + 1) * b]
        assert (part == block[: part.shape[0], : part.shape[1]]).all()
    assert (layout.t().to_dense(values) == dense.T).all()
    with pytest.raises(ValueError, match="values are"):
        layout.to_dense(values[1:])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Layout.from_mask([1, 0], 8), r"mask has shape \(2,\), needs"),
        (lambda: Layout.from_mask([[[1]]], 8), "mask has shape"),
        (lambda: Layout.from_mask([[0, 2]], 8), r"mask\[0, 1\] is 2, needs 0 or 1"),
        (lambda: Layout.from_mask([[0.5]], 8), r"is 0.5, needs 0 or 1"),
        (lambda: Layout.from_mask([[np.nan]], 8), r"is nan, needs 0 or 1"),
        (lambda: Layout.from_mask([[1]], 33), "block_size is 33"),
        (lambda: Layout.from_mask([[1]], -8), "block_size is -8"),
        (lambda: Layout.from_mask([[1]], 2**40), "does not fit"),
        (lambda: Layout.from_mask([[1]], 32, out_features=33), "out_features is 33, 1 blocks of 32 need 1 to 32"),
        (lambda: Layout.from_mask([[1]], 32, in_features=0), "in_features is 0"),
        (lambda: Layout.from_coordinates([0, 3], [0, 0], (2, 2), 8), r"at \(3, 0\), outside of 2 x 2"),
        (lambda: Layout.from_coordinates([0, 0], [1, 1], (2, 2), 8), r"at \(0, 1\) is there twice"),
        (lambda: Layout.from_coordinates([0], [1, 1], (2, 2), 8), "1 out and 2 in"),
        (lambda: Layout.from_coordinates([0.5], [1], (2, 2), 8), "needs a row of integers"),
        (lambda: Layout.from_coordinates([2**40], [1], (2, 2), 8), "does not fit"),
        (lambda: Layout.from_csr([0, 2], [1, 0], 2, 8), "need to rise"),
        (lambda: Layout.from_csr([0, 2], [0], 2, 8), "crow ends with 2, needs 1"),
        (lambda: Layout.from_csr([], [], 2, 8), "crow ends with nothing"),
        (lambda: Layout.from_scipy(scipy.sparse.bsr_array(np.ones((4, 8)), blocksize=(2, 4))), "needs square ones"),
        (lambda: Layout.from_graph("ba(4,8)", 8), "links is 8"),
        (lambda: Layout.from_graph("ba(40,8)", 8, seed=-1), "seed is -1"),
        (lambda: Layout.from_graph("", 8), "is no graph name"),
        (lambda: Layout.from_pattern([1, 2, 3]), "no saved layout"),
    ],
)
def test_says_what_is_wrong(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_wrong_kinds_are_type_errors():
    with pytest.raises(TypeError, match="block_size is '32', needs an integer"):
        Layout.from_mask([[1]], "32")


def test_rectangular_torch_blocks_are_refused():
    with pytest.raises(ValueError, match="square blocks"):
        Layout.from_torch(torch.ones(8, 16).to_sparse_bsr((4, 8)))


def test_unsorted_scipy_indices_are_refused():
    bsr = scipy.sparse.bsr_array((np.ones((2, 8, 8)), [1, 0], [0, 2]), shape=(8, 16))
    with pytest.raises(ValueError, match="rise"):
        Layout.from_scipy(bsr)


@pytest.mark.parametrize("name", ["random(4,6,0.4)", "random(300,300,0.01)", "dense(1)", "random(5,70000,0.001)"])
def test_digits_of_a_pattern(name):
    """What state dicts hold: rounded in any way by less than a half they are the pattern, and else they are refused."""
    layout = Layout.from_graph(name, 16, seed=3)
    for one in (layout, layout.t()):
        pattern = one.pattern()
        digits = to_digits(pattern)
        assert digits.dtype == np.float32
        assert np.abs(digits).max() <= 128
        noise = np.random.default_rng(1).uniform(-0.49, 0.49, digits.shape)
        for near in (digits, digits.astype(np.float16), digits.astype(np.float64), digits + noise):
            assert np.array_equal(from_digits(near), pattern)
            assert Layout.from_pattern(near) == one
        for i in np.random.default_rng(2).integers(0, digits.size, 30):
            altered = digits.copy()
            altered[i] += 1 if altered[i] < 127 else -1
            if one.transposed and 49 <= i < 53:
                assert Layout.from_pattern(altered) == one, "any number but 0 says that it is a view"
                continue
            with pytest.raises(ValueError, match=r"no saved layout|damaged|saved as version"):
                Layout.from_pattern(altered)
            with pytest.raises(ValueError, match=r"no saved layout|damaged"):
                Layout.from_pattern(digits[:i])
    for wrong in ([], [np.nan] * 99, [1e30] * 99, [7.0] * 99, [0.0] * 99):
        with pytest.raises(ValueError, match=r"no saved layout|damaged"):
            Layout.from_pattern(np.array(wrong, np.float32))
    with pytest.raises(ValueError, match="more than 32 bits"):
        from_digits(np.array([5.0] + 52 * [0.0] + 5 * [127.0]))


@pytest.mark.parametrize("step", [127, 128, 255, 256, 32767, 32768, 65535, (1 << 23) - 1, 1 << 23, (1 << 31) - 1])
def test_digits_of_steps_at_the_edges_of_bytes(step):
    head = [0] * 13
    for words in ([step], [1, step, 0], [-1, 0, step, -(1 << 31)]):
        words = np.array(head + words, np.int32)
        assert np.array_equal(from_digits(to_digits(words)), words)


def test_digits_beyond_a_byte_are_refused():
    digits = to_digits(Layout.from_graph("dense(2)", 8).pattern())
    for wrong in (256, -256, 1e9, np.nan, np.inf):
        altered = digits.copy()
        altered[20] += wrong
        with pytest.raises(ValueError, match="it holds no digits"):
            from_digits(altered)


def test_counts_that_do_not_fit():
    with pytest.raises(ValueError, match="crow ends with 1, needs 2, the number of columns"):
        Layout.from_csr([0, 1], [0, 1], 2, 8)
    for bits in (31, 63):
        assert to_int("n", (1 << bits) - 1, bits) == (1 << bits) - 1
        assert to_int("n", -(1 << bits), bits) == -(1 << bits)
        for wrong in (1 << bits, -(1 << bits) - 1):
            with pytest.raises(ValueError, match=f"does not fit into {bits + 1} bits"):
                to_int("n", wrong, bits)
