"""The convolutions of the 2017 release against loops over their blocks."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from blocksparse.conv import BlocksparseConv, BlocksparseDeconv


def diagonal(blocks, c, k):
    return [(range(i * c, i * c + c), range(i * k, i * k + k)) for i in range(blocks)]


def shuffled(seed=0):
    """Three lists of inputs by two of outputs, of channels anywhere, five of the six pairs."""
    rng = np.random.default_rng(seed)
    c, k = rng.permutation(48).reshape(3, 16), rng.permutation(48).reshape(2, 24)
    return [(c[i], k[j]) for i, j in itertools.product(range(3), range(2)) if (i, j) != (1, 1)]


def overlapping(c=8, k=16):
    return [(range(i * c, i * c + 2 * c), range(i * k, i * k + 2 * k)) for i in range(4)]


UNEVEN = [([0, 3, 1], [2, 0]), ([2, 1, 4, 5, 6], [1]), ([3], [0, 1, 3])]

CASES = {  # (layout, block size, fill)
    "squares": (diagonal(4, 32, 32), 32, 1.0),
    "rectangles": (diagonal(4, 32, 48), 16, 1.0),
    "shuffled": (shuffled(), 8, 1.0),
    "overlapping": (overlapping(), 8, 1.0),
    "uneven": (UNEVEN, 8, 13 / 64),
}
GEOMETRIES = [
    {"TRS": (1,), "DHW": (6,), "padding": "VALID"},
    {"TRS": (3,), "DHW": (7,), "strides": (2,)},
    {"TRS": (5,), "DHW": (9,), "strides": (1, 1, 2), "dilates": (1, 1, 2)},
    {"TRS": (1, 3, 2), "DHW": (1, 5, 4), "padding": (0, 1, 0)},
    {"TRS": (2, 2, 2), "DHW": (3, 4, 3), "padding": "VALID", "strides": (1, 2, 1)},
]


def by_loops(conv, filters, x):
    """Each block a dense convolution of its channels, added where its results belong."""
    y = torch.zeros(conv.o_shape(x.shape[0]), dtype=x.dtype)
    geometry = {"stride": conv.strides, "padding": conv.padding, "dilation": conv.dilates}
    for (c, k), block in zip(conv.BCK, filters, strict=True):
        part = F.conv3d(x[:, c], block.reshape(*block.shape[:2], *conv.TRS), **geometry)
        y = y.index_add(1, torch.from_numpy(k), part)
    return y


def blocks_of(conv, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(conv.f_shape(i)) for i in range(conv.blocks)]


@pytest.mark.parametrize("geometry", range(len(GEOMETRIES)))
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_loops_over_blocks(case, geometry):
    bck, block_size, fill = CASES[case]
    conv = BlocksparseConv(bck, **GEOMETRIES[geometry])
    assert conv.layout.block_size == block_size
    assert conv.fill == pytest.approx(fill)
    filters = blocks_of(conv)
    flat = conv.collapse_filter(filters, np.float64)
    x = np.random.default_rng(1).standard_normal(conv.i_shape(3))
    expected = by_loops(conv, [torch.from_numpy(f) for f in filters], torch.from_numpy(x))
    np.testing.assert_allclose(conv(flat, x), expected, rtol=1e-10, atol=1e-10)
    if conv.fixed_block_size:
        assert conv.f_shape() == [conv.blocks, *conv.f_shape(0)]
        np.testing.assert_array_equal(conv(flat.reshape(conv.f_shape()), x), conv(flat, x))


@pytest.mark.parametrize("geometry", range(len(GEOMETRIES)))
@pytest.mark.parametrize("case", CASES)
def test_transposed_is_the_gradient_of_the_other(case, geometry):
    options = GEOMETRIES[geometry]
    forward = BlocksparseConv([(k, c) for c, k in CASES[case][0]], **options)
    options = {**options, "DHW": forward.MPQ[-len(options["TRS"]) :], "MPQ": options["DHW"]}
    conv = BlocksparseDeconv(CASES[case][0], **options)
    assert conv.i_shape(3) == forward.o_shape(3)
    assert conv.o_shape(3) == forward.i_shape(3)
    assert conv.f_shape(0) == forward.f_shape(0)
    filters = blocks_of(conv)
    flat = torch.from_numpy(conv.collapse_filter(filters)).requires_grad_()
    x = torch.randn(conv.i_shape(3), dtype=torch.float64, requires_grad=True)
    y = conv(flat, x)
    np.testing.assert_allclose(conv(flat.detach().numpy(), x.detach().numpy()), y.detach(), rtol=1e-10, atol=1e-10)
    z = torch.zeros(forward.i_shape(3), dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(flat, z), z, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    conv = BlocksparseConv(CASES[case][0], (3,), (5,), strides=(2,))
    filters = [torch.from_numpy(f).requires_grad_() for f in blocks_of(conv)]
    flat = torch.cat([f.detach().flatten() for f in filters]).requires_grad_()
    x = torch.randn(conv.i_shape(2), dtype=torch.float64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    y, expected = conv(flat, x), by_loops(conv, filters, x2)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(flat.grad, torch.cat([f.grad.flatten() for f in filters]))


def test_attributes_of_the_original():
    conv = BlocksparseConv(diagonal(4, 32, 48), (3, 3), (8, 8))
    assert (conv.C, conv.K, conv.blocks, conv.sizeF) == (128, 192, 4, 4 * 32 * 48 * 9)
    assert conv.flops == 2 * conv.sizeF * 64
    assert conv.i_shape(2) == [2, 128, 1, 8, 8]
    assert conv.f_shape() == [4, 48, 32, 3, 3]
    assert not conv.overlapC
    assert not conv.overlapK
    assert BlocksparseConv(overlapping(), (3,), (8,)).overlapK
    assert BlocksparseConv(UNEVEN, (3,), (8,)).f_shape() == [14 * 3]
    assert BlocksparseDeconv(diagonal(2, 8, 16), (3, 3), (4, 4), strides=(2, 2)).o_shape(1) == [1, 32, 1, 8, 8]


@pytest.mark.parametrize("kind", [BlocksparseConv, BlocksparseDeconv])
def test_l2_normalize(kind):
    conv = kind(diagonal(3, 8, 16), (3, 2), (6, 6))
    flat = torch.from_numpy(conv.collapse_filter(blocks_of(conv)))
    axes = (1, 3, 4) if kind is BlocksparseDeconv else (2, 3, 4)
    gain = torch.rand(48, dtype=torch.float64)
    for scale in (None, gain):
        got = conv.l2_normalize(flat, scale).view(conv.f_shape())
        lengths = got.square().sum(axes).sqrt().flatten()
        torch.testing.assert_close(lengths, torch.ones(48, dtype=torch.float64) if scale is None else gain)
        same = conv.l2_normalize(flat.numpy(), None if scale is None else gain.numpy())
        np.testing.assert_allclose(same, got.flatten(), rtol=1e-12)
    other = kind(overlapping(), (3,), (6,))
    with pytest.raises(ValueError, match="in several blocks"):
        other.l2_normalize(np.ones(other.sizeF), np.ones(other.K))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"BCK": []}, "BCK has no block"),
        ({"BCK": [([0, 1], [0, 0])]}, "the K of block 0 name a channel twice"),
        ({"BCK": [([0, 2], [0])]}, "BCK has 2 C, which are not 0 to 1"),
        ({"BCK": [([0.5], [0])]}, "the C of block 0 are no list of channels"),
        ({"TRS": (3,)}, "needs as many sizes of each"),
        ({"TRS": (1, 1, 1, 1), "DHW": (1, 1, 1, 1)}, "1 to 3"),
        ({"padding": "FULL"}, "padding is 'FULL', needs"),
        ({"strides": ()}, r"strides is \(\), needs 1 to 3 numbers"),
        ({"MPQ": (1, 5)}, r"MPQ is \[1, 1, 5\], the other sizes give \[1, 3, 5\]"),
        ({"strides": [0]}, r"strides is \[0\], needs 1 to 3 numbers, integers from 1 on"),
        ({"dilates": 2}, "dilates is 2, needs 1 to 3 numbers"),
        ({"padding": (-1, 0)}, "integers from 0 on"),
        ({"TRS": (3, 9), "padding": "VALID"}, "kernel"),
    ],
)
def test_says_what_is_wrong(options, text):
    with pytest.raises(ValueError, match=text):
        BlocksparseConv(**{"BCK": [(range(8), range(8))], "TRS": (3, 3), "DHW": (4, 5), **options})


def test_calls_say_what_is_wrong():
    conv = BlocksparseConv([(range(8), range(8))], (3, 3), (4, 5))
    with pytest.raises(ValueError, match=r"F is \[8, 8\], needs \[1, 8, 8, 3, 3\] or \[576\]"):
        conv(np.ones((8, 8)), np.ones((1, 8, 1, 4, 5)))
    with pytest.raises(
        TypeError,
        match="F is a ndarray, I is a Tensor, needs NumPy arrays, PyTorch tensors or",
    ):
        conv(np.ones(576), torch.ones(1, 8, 1, 4, 5))
    with pytest.raises(TypeError, match="F is a list, I is a Tensor, needs"):
        conv([1.0], torch.ones(1, 8, 1, 4, 5))
    with pytest.raises(ValueError, match=r"MPQ is \[1, 1, 13\], the other sizes give \[1, 1, 11\]"):
        BlocksparseDeconv([(range(8), range(8))], (2,), (5,), (13,), strides=(2,), padding="VALID")
    with pytest.raises(ValueError, match=r"I is \[1, 8, 4, 5\], needs \[N, 8, 1, 4, 5\]"):
        conv(np.ones(576), np.ones((1, 8, 4, 5)))


@pytest.mark.parametrize("taps", [2, 4])
def test_transposed_even_filters_end_with_zeros(taps):
    """The usual size of the result is one pixel more than output padding can give."""
    conv = BlocksparseDeconv(diagonal(2, 8, 8), (taps, 3), (5, 4), strides=(2, 1), padding="VALID")
    assert tuple(conv.MPQ) == (1, 10 + taps, 6)
    flat = torch.from_numpy(conv.collapse_filter(blocks_of(conv))).requires_grad_()
    x = torch.randn(conv.i_shape(2), dtype=torch.float64)
    y = conv(flat, x)
    dense = torch.block_diag(*[torch.ones(8, 8)] * 2).double()[..., None, None, None].repeat(1, 1, 1, taps, 3)
    with torch.no_grad():
        for (c, k), block in zip(conv.BCK, flat.view(conv.f_shape()), strict=True):
            dense[c[0] : c[-1] + 1, k[0] : k[-1] + 1] = block.unsqueeze(2)
    expected = F.pad(F.conv_transpose3d(x, dense, stride=(1, 2, 1)), (0, 0, 0, 2))
    torch.testing.assert_close(y, expected)
    np.testing.assert_allclose(conv(flat.detach().numpy(), x.numpy()), y.detach(), rtol=1e-12, atol=1e-12)
    assert list(y.shape) == conv.o_shape(2)
    y.sum().backward()
    given = BlocksparseDeconv(diagonal(2, 8, 8), (taps, 3), (5, 4), conv.MPQ[1:], (2, 1), padding="VALID")
    torch.testing.assert_close(given(flat, x), y)
