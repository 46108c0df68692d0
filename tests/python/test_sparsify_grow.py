"""Grow scores of absent blocks, which blocks are exchanged, and densities of layers: pure functions."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout
from blocksparse._core.geometry import make_geometry
from blocksparse.torch.sparsify.sparse_to_sparse.exchange import (
    best_candidates,
    best_of_strips,
    exchange,
    random_candidates,
    random_priorities,
)
from blocksparse.torch.sparsify.sparse_to_sparse.grow_scores import (
    conv_grow_scores,
    grow_bound,
    grow_scores,
    score_strips,
)

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def of_dense(x, dy, b):
    """Block norms of dW, in float64."""
    return bss.block_norms(dy.double().flatten(0, -2).T @ x.double().flatten(0, -2), b)


# ---- Scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("in_", "out", "b"), [(96, 64, 16), (90, 61, 16), (7, 130, 8), (128, 5, 128)])
def test_exact_scores_are_block_norms_of_a_dense_gradient(dtype, in_, out, b):
    x, dy = torch.randn(3, 11, in_, dtype=dtype), torch.randn(3, 11, out, dtype=dtype)
    expected = of_dense(x, dy, b)
    for strip in (1, b * in_ + 1, 2 * b * in_, 1 << 22):
        scores = grow_scores(x, dy, b, strip=strip)
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert scores.shape == (-(-out // b), -(-in_ // b))
        torch.testing.assert_close(scores.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_half_precision_does_not_overflow():
    x = torch.full((64, 16), 100.0, dtype=torch.float16)
    assert grow_scores(x, x, 16).item() == pytest.approx(64 * 1e4 * 16)


class Largest(TorchDispatchMode):
    """The most numbers that any result had."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numel = max(self.numel, made.numel())
        return made


def test_a_dense_gradient_is_never_stored():
    x, dy = torch.randn(8, 512), torch.randn(8, 1024)
    with Largest() as largest:
        scores = grow_scores(x, dy, 32, strip=64 * 512)
    assert largest.numel == 64 * 512
    torch.testing.assert_close(scores.double(), of_dense(x, dy, 32), rtol=1e-5, atol=1e-5)
    with Largest() as largest:
        grow_bound(x, dy, 32)
    assert largest.numel <= dy.numel()


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_the_bound_is_its_formula(norm):
    x, dy = torch.randn(2, 5, 90), torch.randn(2, 5, 61)
    xs, dys = (F.pad(t, (0, -t.size(-1) % 16)).view(10, -1, 16) for t in (x, dy))
    sizes = [t.norm(dim=2) if norm == "l2" else t.abs().amax(2) for t in (dys, xs)]
    expected = sum(torch.outer(d, e) for d, e in zip(*sizes, strict=True))
    torch.testing.assert_close(grow_bound(x, dy, 16, norm=norm), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 8, 16]), st.integers(0, 1 << 30))
def test_the_bound_is_never_smaller(n, in_, out, b, seed):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (in_, out))
    exact, bound = grow_scores(x, dy, b), grow_bound(x, dy, b)
    assert (bound >= exact * (1 - 1e-12)).all()
    assert n != 1 or torch.allclose(bound, exact)  # of one token they are equal


def test_scores_see_that_gradients_cancel_and_bounds_do_not():
    x, dy = torch.ones(2, 8), torch.tensor([[1.0], [-1.0]]).expand(2, 8)
    assert grow_scores(x, dy, 8).item() == 0
    assert grow_bound(x, dy, 8).item() == pytest.approx(16)


GEOMETRIES = {
    "1d, same": (1, 3, {"padding": "same", "dilation": 2}),
    "2d, stride, uneven pads": (2, (3, 2), {"stride": 2, "padding": [(1, 2), 0]}),
    "2d, 1 x 1": (2, 1, {"stride": 3}),
    "3d": (3, 2, {}),
    "transposed": (2, 3, {"stride": 2, "padding": 1, "output_padding": 1, "transposed": True}),
    "transposed 1d": (1, 4, {"padding": [(2, 1)], "dilation": 3, "transposed": True}),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_scores_of_convolutions(name):
    """Against the gradient of a layer that has all blocks."""
    rank, kernel, options = GEOMETRIES[name]
    options = dict(options)
    kind = "Transpose" if options.pop("transposed", False) else ""
    full = Layout.from_mask(np.ones((3, 4)), 8, out_features=21, in_features=30)
    layer = getattr(bst, f"BlockSparseConv{kind}{rank}d")(30, 21, kernel, full, dtype=torch.float64, **options)
    x = torch.randn(2, 30, *(13, 9, 8)[:rank], dtype=torch.float64)
    y = layer(x)
    y.backward(dy := torch.randn_like(y))
    taps = layer.weight.grad.view(12, -1, 64).norm(dim=2)
    for strip in (1, 1 << 22):
        scores = conv_grow_scores(x, dy, layer.geometry, 8, strip=strip)
        torch.testing.assert_close(scores, layer.weight.grad.flatten(1).norm(dim=1).view(3, 4))
    bound = conv_grow_scores(x, dy, layer.geometry, 8, grow="bound")
    assert (bound >= scores).all()
    assert (bound <= 60 * taps.norm(dim=1).view(3, 4)).all()  # and of the size of dW


@pytest.mark.parametrize("f", [grow_scores, grow_bound])
def test_what_has_no_scores_is_refused(f):
    x, dy = torch.randn(4, 16), torch.randn(4, 8)
    for bad, error, message in [
        ((x[:3], dy, 8), ValueError, r"x is \[3, 16\] and dy \[4, 8\]"),
        ((x.double(), dy, 8), ValueError, "x is torch.float64 and dy torch.float32, needs real numbers of one"),
        ((x.long(), dy.long(), 8), ValueError, "needs real numbers"),
        ((x, dy, 0), ValueError, "block_size is 0"),
        ((x, None, 8), TypeError, "dy is None"),
        ((x.to_sparse(), dy, 8), ValueError, "torch.sparse_coo"),
        ((x, dy, 8.5), TypeError, "needs an integer"),
    ]:
        with pytest.raises(error, match=message):
            f(*bad)
    with pytest.raises(ValueError, match="norm is 'l1', needs one of l2, max"):
        grow_bound(x, dy, 8, norm="l1")
    with pytest.raises(ValueError, match=r"needs \[n, in, size...\]"):
        conv_grow_scores(x, dy, make_geometry(2, 3), 8)


# ---- Exchanges -----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_exchange_keeps_the_count_and_knows_where_blocks_were(data):
    grid = data.draw(st.integers(2, 60))
    blocks = data.draw(st.integers(1, grid - 1))
    most = data.draw(st.integers(1, min(blocks, grid - blocks)))
    count = data.draw(st.integers(0, most))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    places = torch.randperm(grid, generator=generator)[:blocks].sort().values
    norms, priorities = (torch.randint(0, 5, (n,), generator=generator).float() for n in (blocks, grid))
    candidates = best_candidates(priorities, places, most)
    strips = best_of_strips(priorities.split(data.draw(st.integers(1, grid))), places, most)
    assert torch.equal(candidates.places, strips.places)
    assert int(candidates.there) == int(strips.there) == most
    change = exchange(places, norms, candidates.places, torch.tensor(count), most)
    assert change.places.numel() == blocks
    assert (change.places.diff() > 0).all()
    assert int(change.kept.sum()) == blocks - count
    assert torch.equal(places[change.source][change.kept], change.places[change.kept])
    # Plainly: the lowest go, the highest come, of equal ones the first.
    gone = sorted(range(blocks), key=lambda i: (norms[i], i))[:count]
    empty = sorted(set(range(grid)) - set(places.tolist()), key=lambda i: (-priorities[i], i))[:count]
    expected = sorted([*(int(places[i]) for i in range(blocks) if i not in gone), *empty])
    assert change.places.tolist() == expected
    assert sorted(change.places[~change.kept].tolist()) == sorted(empty)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_candidates_say_what_is_not_finite(bad):
    places, priorities = torch.tensor([1, 4]), torch.rand(9)
    for found in (best_candidates(priorities, places, 3), best_of_strips(priorities.split(2), places, 3)):
        assert found.finite
    priorities[7] = bad
    for found in (best_candidates(priorities, places, 3), best_of_strips(priorities.split(2), places, 3)):
        assert not found.finite


@pytest.mark.parametrize("grow", ["exact", "bound"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_strips_of_scores(grow, dtype):
    x, dy = torch.randn(3, 11, 90, dtype=dtype), torch.randn(3, 11, 61, dtype=dtype)
    whole = grow_scores(x, dy, 8) if grow == "exact" else grow_bound(x, dy, 8)
    for strip in (1, 30, 1 << 22):
        made = torch.cat(list(score_strips(x, dy, 8, grow, strip)))
        torch.testing.assert_close(made.view(whole.shape), whole)


def test_random_candidates_of_large_grids():
    """Empty places, all different, evenly spread, a pure function; of any density."""
    for grid, blocks, most in ((1 << 34, 1000, 300), (1 << 23, 400_000, 120_000), (1 << 23, 1, 1), (100, 60, 40)):
        generator = torch.Generator().manual_seed(1)
        places = torch.randint(grid, (2 * blocks,), generator=generator).unique()
        places = places[torch.randperm(places.numel(), generator=generator)[:blocks]].sort().values
        step = torch.tensor(7)
        found = random_candidates(3, 0, step, places, grid, most)
        assert int(found.there) == found.places.numel() == most
        assert found.finite
        assert found.places.unique().numel() == most
        assert not torch.isin(found.places, places).any()
        assert 0 <= found.places.min() <= found.places.max() < grid
        assert torch.equal(found.places, random_candidates(3, 0, step, places, grid, most).places)
        assert not torch.equal(found.places, random_candidates(3, 0, step + 1, places, grid, most).places)
        if most > 1000:
            seen = torch.histc(found.places.double(), 10, 0, grid)
            assert (seen / most - 0.1).abs().max() < 0.005
    # As dense as a grid may be that is not looked at as a whole, and all blocks exchanged.
    places = torch.arange(0, 1 << 23, 17)
    found = random_candidates(0, 0, torch.tensor(1), places, 1 << 23, places.numel())
    assert int(found.there) == places.numel()
    assert (found.places % 17 != 0).all()


def test_random_priorities_are_random_and_the_same_everywhere():
    a, b = (random_priorities(3, 0, torch.tensor(t), 100_000) for t in (7, 8))
    assert torch.equal(a, random_priorities(3, 0, torch.tensor(7), 100_000))
    assert a.unique().numel() == 100_000
    assert 0 <= a.min() < a.max() < 1
    for sample in (
        a,
        b,
        random_priorities(3, 1, torch.tensor(7), 100_000),
        random_priorities(4, 0, torch.tensor(7), 100_000),
    ):
        assert sample.mean().item() == pytest.approx(0.5, abs=0.005)
        assert sample.var().item() == pytest.approx(1 / 12, abs=0.002)
        assert sample is a or abs(torch.corrcoef(torch.stack([a, sample]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1]) < 0.02
    # SplitMix64 of the seeds' own sequence, in Python's integers.
    mask = (1 << 64) - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((3 + golden) & mask) + 0) & mask)
    base = mix((7 * golden + key) & mask)
    assert a[:5].tolist() == [(mix((i * golden + base) & mask) >> 11) * 2.0**-53 for i in range(1, 6)]


def test_the_share_is_a_cosine():
    schedule = bss.CosineDrop(end_step=1000, alpha=0.3, frequency=100)
    assert [t for t in range(2000) if schedule.acts_at(t)] == list(range(100, 1000, 100))
    assert schedule.share(0) == pytest.approx(0.3)
    assert schedule.share(500) == pytest.approx(0.15)
    assert schedule.share(250) == pytest.approx(0.15 * (1 + math.sqrt(0.5)))
    assert schedule.share(1000) == schedule.share(5000) == 0
    for t in (0, 1, 333, 999, 1000, 4000):
        assert int(schedule.count(torch.tensor(t), 1234)) == math.floor(schedule.share(t) * 1234 + 0.5)
    for bad, message in [
        ({"end_step": 0}, "end_step is 0, needs 1"),
        ({"end_step": 10, "frequency": 0}, "frequency is 0"),
        ({"end_step": 10, "alpha": 1.0}, "alpha is 1.0, needs 0 <= alpha < 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            bss.CosineDrop(**bad)


# ---- Densities -----------------------------------------------------------------------------------------------------


def test_erk_densities():
    shapes = {"a": (512, 512), "b": (64, 512), "c": (10, 64), "conv": (64, 64, 3, 3)}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    for density in (0.01, 0.1, 0.5, 0.9, 1.0):
        made = bss.erk_densities(shapes, density)
        assert sum(made[n] * sizes[n] for n in shapes) == pytest.approx(density * sum(sizes.values()))
        assert all(0 < d <= 1 for d in made.values())
        below = [n for n in shapes if made[n] < 1]
        scales = [made[n] * sizes[n] / sum(shapes[n]) for n in below]
        assert scales == pytest.approx([scales[0]] * len(below)) if below else density == 1
    assert bss.erk_densities(shapes, 0.5)["c"] == 1
    assert bss.uniform_densities(shapes, 0.2) == dict.fromkeys(shapes, 0.2)
    for f in (bss.erk_densities, bss.uniform_densities):
        with pytest.raises(ValueError, match="density is 0, needs more than 0"):
            f(shapes, 0)
        with pytest.raises(ValueError, match=r"the shape of a is \[3\]"):
            f({"a": (3,)}, 0.5)
