"""The convolution's functional ops against PyTorch's dense ones, in f64 and narrower."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, make_channels, refusals
from convolutions import (
    CONV,
    GEOMETRIES,
    SIZE,
    TOLERANCE,
    TRANSPOSED,
    dense_conv,
    error,
    leaf,
    of_rank,
    op_calls,
    to_format,
)
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.conv import make_geometry
from blocksparse.torch.ops import conv as conv_ops
from blocksparse.torch.ops.calls import sum_dtype


@pytest.fixture
def tiny():
    return Layout.from_graph("random(2,2,0.7)", 8, seed=1, out_features=9, in_features=13)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_agrees_with_dense(channels, rank, transposed, last):
    order = torch.randperm(30)
    for options, dtype in itertools.product(GEOMETRIES, TOLERANCE):
        options = of_rank(options, rank)
        kernel = options["kernel_size"]
        kernel = (kernel,) * rank if isinstance(kernel, int) else kernel
        x = to_format(torch.randn(2, 30, *SIZE[:rank], dtype=dtype), last).requires_grad_()
        taps = torch.Size(kernel).numel()
        values, bias = leaf(channels.blocks, taps, 8, 8, dtype=dtype), leaf(21, dtype=dtype)
        gates = torch.rand(channels.blocks, dtype=sum_dtype(dtype), requires_grad=True)
        inputs = (x, values, bias, gates)
        op = (TRANSPOSED if transposed else CONV)[rank - 1]
        y = op(x, values, channels, bias, gates=gates, channel_order=order, **options)

        x64, v64, b64, g64 = (t.detach().double().requires_grad_() for t in inputs)
        w64 = bst.to_dense(v64 * g64.view(-1, 1, 1, 1), channels, kernel)
        expected = dense_conv(x64[:, order], w64, rank, options, transposed) + b64.view(-1, *(1,) * rank)
        assert y.shape == expected.shape
        assert y.dtype == dtype
        assert error(y, expected) < TOLERANCE[dtype], options
        dy = torch.randn_like(y)
        y.backward(dy)
        expected.backward(dy.double())
        for got, want in zip(inputs, (x64, v64, b64, g64), strict=True):
            assert error(got.grad, want.grad) < 3 * TOLERANCE[dtype], options
        for result in (y, x.grad):
            assert to_format(result, last).stride() == result.stride(), "answered in kind"


@pytest.mark.parametrize("transposed_layout", [False, True])
@pytest.mark.parametrize("op", [bst.conv1d, bst.conv_transpose1d])
def test_gradients_of_all_orders(tiny, op, transposed_layout):
    layout = tiny.t() if transposed_layout else tiny
    x, values, bias = leaf(2, layout.in_features, 3), leaf(layout.blocks, 2, 8, 8), leaf(layout.out_features)
    gates = torch.rand(layout.blocks, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(layout.in_features)

    def f(x, values, bias, gates):
        options = {"stride": 2, "padding": ((1, 0),), "channel_order": order, "activation": "silu"}
        return op(x, values, layout, bias, gates=gates, kernel_size=2, **options)

    inputs = (x, values, bias, gates)
    assert torch.autograd.gradcheck(f, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)
    if op is bst.conv1d:
        assert torch.autograd.gradcheck(f, inputs)


def test_second_gradients_of_images(tiny):
    x = to_format(torch.randn(1, 13, 3, 2, dtype=torch.float64), True).requires_grad_()
    values, residual = leaf(tiny.blocks, 4, 8, 8), leaf(1, 9, 3, 2)

    def f(x, values, residual):
        return bst.conv2d(x, values, tiny, kernel_size=2, padding="same", residual=residual, activation="gelu")

    assert torch.autograd.gradgradcheck(f, (x, values, residual), fast_mode=True)


def test_words_for_padding(tiny):
    x, values = torch.randn(2, 13, 6, 5), torch.randn(tiny.blocks, 6, 8, 8)
    w = bst.to_dense(values, tiny, (3, 2))
    options = {"kernel_size": (3, 2), "dilation": (1, 2)}
    same = bst.conv2d(x, values, tiny, padding="same", **options)
    torch.testing.assert_close(same, F.conv2d(x, w, padding="same", dilation=(1, 2)), rtol=1e-4, atol=1e-4)
    causal = bst.conv2d(x, values, tiny, padding="causal", **options)
    expected = F.conv2d(F.pad(x, (2, 0, 2, 0)), w, dilation=(1, 2))
    torch.testing.assert_close(causal, expected, rtol=1e-4, atol=1e-4)
    mixed = bst.conv2d(x, values, tiny, padding=("causal", (0, 1)), **options)
    torch.testing.assert_close(mixed, F.conv2d(F.pad(x, (0, 1, 2, 0)), w, dilation=(1, 2)), rtol=1e-4, atol=1e-4)
    later = x.clone()
    later[:, :, 4:] += 1
    assert torch.equal(bst.conv2d(later, values, tiny, padding="causal", **options)[:, :, :4], causal[:, :, :4])


def test_memory_formats(tiny):
    values = torch.randn(tiny.blocks, 9, 8, 8)
    x = torch.randn(2, 13, 4, 5)
    expected = bst.conv2d(x, values, tiny, kernel_size=3)
    assert expected.is_contiguous()
    for other in (
        x.to(memory_format=torch.channels_last),
        torch.randn(2, 13, 4, 10)[..., ::2].copy_(x),
        x.transpose(2, 3).contiguous().transpose(2, 3),
        torch.randn(2, 20, 4, 5)[:, 3:16].copy_(x),
    ):
        y = bst.conv2d(other, values, tiny, kernel_size=3)
        assert y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y, expected)
    torch.testing.assert_close(bst.conv2d(x[0], values, tiny, kernel_size=3), expected[0])
    assert bst.conv2d(x[:0], values, tiny, kernel_size=3).shape == (0, 9, 2, 3)


def test_one_channel_and_one_pixel_keep_the_format():
    layout = Layout.from_graph("dense(1)", 8, in_features=1)
    values = torch.randn(1, 9, 8, 8)
    for last in (False, True):
        memory_format = torch.channels_last if last else torch.contiguous_format
        x = torch.randn(2, 1, 5, 5).to(memory_format=memory_format)
        assert bst.conv2d(x, values, layout, kernel_size=3).is_contiguous(memory_format=memory_format)
        x = torch.randn(2, 8, 1, 1).to(memory_format=memory_format)
        y = bst.conv_transpose2d(x, values, Layout.from_graph("dense(1)", 8), kernel_size=3)
        assert y.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("transposed", [False, True])
def test_where_contiguous_images_are_turned_nothing_else_changes(tiny, monkeypatch, transposed):
    conv = bst.conv_transpose2d if transposed else bst.conv2d
    values, bias, x = leaf(tiny.blocks, 6, 8, 8), leaf(9), leaf(2, 13, 4, 5)
    options = {"kernel_size": (3, 2), "activation": "silu"}

    def run():
        y = conv(x, values, tiny, bias, **options)
        first = torch.autograd.grad(y.square().sum(), (x, values, bias), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, values, bias))
        with torch.no_grad():
            plain = conv(x, values, tiny, bias, residual=y, **options)
        assert y.is_contiguous()
        assert plain.is_contiguous()
        return y, *first, *second, plain

    expected, turned = run(), []
    monkeypatch.setattr(conv_ops, "wants_channels_last", lambda x: turned.append(x) or True)
    for got, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert len(turned) == 2


def test_contiguous_images_are_turned_for_16_bits_on_a_card():
    for dtype, shape, wanted in (
        (torch.bfloat16, (2, 8, 4, 4), True),
        (torch.float16, (2, 8, 4), True),
        (torch.float32, (2, 8, 4, 4), False),
        (torch.bfloat16, (2, 8, 1, 1), False),
    ):
        with FakeTensorMode():
            assert conv_ops.wants_channels_last(torch.empty(shape, dtype=dtype, device="cuda")) == wanted
        assert not conv_ops.wants_channels_last(torch.empty(shape, dtype=dtype))


def test_activation_and_residual_are_fused_without_gradient_only_in_speed(channels):
    values, bias = torch.randn(channels.blocks, 9, 8, 8), torch.randn(21)
    x, residual = to_format(torch.randn(2, 30, 4, 4), True), torch.randn(2, 21, 4, 4)
    for activation in ("none", "relu", "gelu", "silu"):
        options = {"kernel_size": 3, "padding": 1, "residual": residual, "activation": activation}
        fused = bst.conv2d(x, values, channels, bias, **options)
        apart = bst.conv2d(x, values.clone().requires_grad_(), channels, bias, **options)
        torch.testing.assert_close(fused, apart.detach(), rtol=1e-4, atol=1e-4)


def test_only_wanted_gradients_are_made(tiny):
    for wants in itertools.product((False, True), repeat=4):
        tensors = (torch.randn(1, 13, 4), torch.randn(tiny.blocks, 3, 8, 8), torch.randn(9), torch.rand(tiny.blocks))
        x, values, bias, gates = (t.requires_grad_(want) for t, want in zip(tensors, wants, strict=True))
        y = bst.conv1d(x, values, tiny, bias, gates=gates, kernel_size=3)
        assert y.requires_grad == any(wants)
        if any(wants):
            y.sum().backward()
        assert [t.grad is not None for t in (x, values, bias, gates)] == list(wants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(channels, dtype):
    for op, arguments, options in op_calls(channels, dtype):
        opcheck(op, arguments, options)


def results_of_calls():
    """Whether the kernels are C++, what they answer, and how they refuse."""
    layout = make_channels()
    results = (op(*arguments, **options) for op, arguments, options in op_calls(layout))
    return [conv_ops.KERNELS == "C++", *results, *refusals(_wrong_calls(layout))]


def test_python_kernels_give_the_same_bits(with_python_kernels):
    """The kernels over ctypes, which older PyTorch gets, against the C++ ones."""
    is_cpp, *theirs = with_python_kernels("test_torch_conv.results_of_calls")
    assert not is_cpp
    is_cpp, *mine = results_of_calls()
    assert is_cpp
    assert_same(mine, theirs)


@pytest.mark.parametrize("last", [False, True])
def test_compile_with_gradients(channels, last):
    for kind in (bst.BlockSparseConv2d, bst.BlockSparseConvTranspose2d):
        order = torch.randperm(30)
        layer = kind(30, 21, 3, channels, stride=2, padding=1, gates=True, activation="gelu", channel_order=order)
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
        x = to_format(torch.randn(2, 30, 5, 4), last).requires_grad_()
        y = compiled(x)
        y.square().sum().backward()
        grads = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
        x.grad = None
        layer.zero_grad()
        expected = layer(x)
        assert y.stride() == expected.stride()
        expected.square().sum().backward()
        for got, want in zip(grads, [x.grad, *(p.grad for p in layer.parameters())], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_compile_with_dynamic_shapes(channels):
    values = torch.randn(channels.blocks, 9, 8, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x: bst.conv2d(x, values, channels, kernel_size=3, padding=1).relu(), fullgraph=True, dynamic=True
    )
    for n, height in ((2, 5), (3, 7), (5, 4)):
        x = torch.randn(n, 30, height, 6)
        y = compiled(x)
        torch.testing.assert_close(y, bst.conv2d(x, values, channels, kernel_size=3, padding=1).relu())
        y.sum().backward()


def test_export(channels):
    layer = bst.BlockSparseConv2d(30, 21, 3, channels, padding="same").eval()
    x = torch.randn(2, 30, 5, 4)
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(channels, dtype):
    layer = bst.BlockSparseConv2d(30, 21, 3, channels, padding=1)
    dense = layer.to_dense()
    x = torch.randn(4, 30, 6, 6)

    def gradients(module, autocast):
        module.zero_grad()
        z = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast):
            y = module(z)
        assert (y.dtype == dtype) == autocast
        (dz,) = torch.autograd.grad(y.float().square().sum(), z, create_graph=True)
        dz.square().sum().backward()
        return y, dz, module.weight.grad

    y, dz, dw = gradients(dense, False)
    truth = y, dz, bst.from_dense(dw, channels)
    for autocast, tolerance in ((False, 1e-5), (True, 3e-2)):
        for got, want in zip(gradients(layer, autocast), truth, strict=True):
            assert error(got, want) < tolerance
    assert layer.weight.grad.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert layer(x).dtype == dtype


def test_deterministic_and_independent_of_threads(channels):
    layer, x = bst.BlockSparseConv2d(30, 21, 3, channels, padding=1), torch.randn(3, 30, 9, 9)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, threads):
        torch.set_num_threads(count)
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        results.append((y.detach(), layer.weight.grad.clone()))
    torch.set_num_threads(threads)
    for y, dw in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(dw, results[0][1])


def _call(x=(2, 30, 5, 4), values=None, layout=None, kernel_size=3, op=bst.conv2d, **options):
    x = torch.randn(*x) if isinstance(x, tuple) else x
    values = torch.randn(layout.blocks, 9, 8, 8) if values is None else values
    return op(x, values, layout, kernel_size=kernel_size, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"x": (2, 29, 5, 4)}, r"x is \[2, 29, 5, 4\], needs \[n, 30, height, width\]"),
        ({"x": (2, 30, 5, 4, 3)}, r"x is \[2, 30, 5, 4, 3\], needs"),
        ({"x": (30,)}, r"x is \[30\], needs"),
        ({"x": (2, 30, 2, 4)}, r"kernel \[3, 3\] with dilation \[1, 1\] covers 3 pixels, more than the 2"),
        ({"kernel_size": 2}, r"w is \[.*, 9, 8, 8\], needs \[.*, 4, 8, 8\]"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size is \(3, 3, 3\), needs an integer, or 2 of them"),
        ({"kernel_size": 3.0}, r"kernel_size is 3.0, needs an integer"),
        ({"stride": 0}, r"stride is \[0, 0\], needs 1 to"),
        ({"dilation": -1}, r"dilation is \[-1, -1\], needs 1 to"),
        ({"padding": -1}, r"padding_before is \[-1, -1\], needs 0 to"),
        ({"padding": "mirror"}, "padding is 'mirror', needs a number"),
        ({"padding": ((1, 2, 3), 0)}, r"padding is \(1, 2, 3\), needs a number, \(before, after\)"),
        ({"padding": 0.5}, "padding is 0.5, needs a number"),
        ({"padding": (1, 2, 3)}, r"padding is \(1, 2, 3\), needs one for all sizes, or 2 of them"),
        ({"padding": "same", "stride": 2}, "padding is 'same', which stride 2 does not have"),
        ({"op": bst.conv_transpose2d, "padding": "causal"}, "which a transposed convolution does not have"),
        ({"op": bst.conv_transpose2d, "padding": 9}, r"would give one of size"),
        ({"op": bst.conv_transpose2d, "output_padding": 2, "stride": 2}, "needs to be less than stride"),
        ({"bias": torch.zeros(20)}, r"bias is \[20\], needs \[21\]"),
        ({"gates": torch.zeros(3)}, r"gates is \[3\], needs"),
        ({"residual": torch.zeros(2, 21, 3, 3)}, r"residual is .*\[2, 21, 3, 3\]"),
        ({"residual": torch.zeros(21, 3, 2)}, r"residual is .*\[21, 3, 2\]"),
        ({"activation": "tanh"}, "activation is 'tanh', needs one of"),
        ({"channel_order": torch.arange(29)}, r"channel_order is torch.int32 \[29\], needs int32 \[30\]"),
        ({"channel_order": torch.zeros(30).int()}, "channel_order holds channel 0 twice"),
        ({"channel_order": torch.zeros(30)}, "channel_order is torch.float32, needs integers"),
        ({"channel_order": torch.arange(30) + (1 << 32)}, r"channel_order\[0\] is 4294967296, needs 0 to 29"),
        ({"channel_order": [*range(29), -1]}, r"channel_order\[29\] is -1, needs 0 to 29"),
        ({"channel_order": [*range(29), 0]}, "channel_order holds channel 0 twice"),
        (
            {"channel_order": torch.arange(30, device="meta")},
            "channel_order is on meta, x on cpu: needs to have values",
        ),
        ({"channel_order": torch.arange(1, 31).int()}, r"channel_order\[29\] is 30, needs 0 to 29"),
        ({"channel_order": ["a"] * 30}, "channel_order is a list, needs integers"),
        ({"gates": torch.ones(6).int()}, r"\[conv\] a tensor of torch\.int32"),
        ({"channel_order": torch.arange(1, 31)}, r"channel_order\[29\] is 30, needs 0 to 29"),
        ({"values": torch.randn(1, 9, 8, 8)}, r"w is \[1, 9, 8, 8\], needs"),
        ({"values": torch.randn(9, 8, 8)}, r"values are \[9, 8, 8\], needs \[blocks, taps, b, b\]"),
        ({"values": torch.randn(2, 9, 8, 8).double()}, "values are torch.float64, needs torch.float32"),
        ({"x": torch.zeros(2, 30, 5, 4, dtype=torch.int32)}, "x is torch.int32, needs one of torch.float32"),
    ],
)
@pytest.mark.parametrize("wanted", [False, True])
def test_says_what_is_wrong(channels, options, text, wanted):
    if wanted and "values" not in options:
        options = {**options, "values": torch.randn(channels.blocks, 9, 8, 8, requires_grad=True)}
    with pytest.raises(ValueError, match=text):
        _call(layout=channels, **options)


def _wrong_calls(layout):
    """(op, arguments, part of the message)."""
    index, x, values = bst.index_of(layout), torch.randn(2, 30, 5, 4), torch.randn(layout.blocks, 9, 8, 8)
    dy, geometry, blocks, order = torch.randn(2, 21, 3, 2), make_geometry(2, 3), layout.blocks, torch.arange(30)
    fprop, dgrad, wgrad = conv_ops.fprop, conv_ops.dgrad, conv_ops.wgrad
    yield fprop, (x, values, index, geometry[:-1], 21, False), "geometry has 12 numbers"
    yield fprop, (x, values, index, (), 21, False), "geometry has 0 numbers"
    yield fprop, (x, values, index, (0, *(1,) * 24), 21, False), "geometry has 25 numbers"
    yield fprop, (x[0], values, index, geometry, 21, False), r"x has 1 sizes, the geometry 2"
    yield fprop, (x[0, 0, 0, 0], values, index, geometry, 21, False), r"x has 0 sizes, the geometry 2"
    yield fprop, (x, values, torch.zeros(40, dtype=torch.int32), geometry, 21, False), "no layout index"
    yield fprop, (x, values, torch.zeros(40), geometry, 21, False), r"\[conv\] index is torch.float32 \[40\], needs"
    yield fprop, (x, values, index[None], geometry, 21, False), r"\[conv\] index is torch.int32 \[1, .*\], needs"
    yield fprop, (x, values, index[::2], geometry, 21, False), r"\[conv\] index is torch.int32"
    yield fprop, (x, values, index, geometry, 22, False), r"y is \[2, 22, 3, 2\], needs \[n, 21\]"
    yield fprop, (x, values, index, geometry, -1, False), "-1 channels, needs 0 or more"
    yield fprop, (x, values, index, (*geometry[:-1], 1), 21, False), "output_padding is given"
    yield fprop, (x, values[0], index, geometry, 21, False), r"values are \[9, 8, 8\], needs \[blocks, taps, b, b\]"
    yield fprop, (x.short(), values, index, geometry, 21, False), "a tensor of torch.int16, needs one of torch.float32"
    yield fprop, (x, values.double(), index, geometry, 21, False), "w is f64, needs f32"
    yield (
        fprop,
        (x[:, :, ::2], values, index, geometry, 21, False),
        "needs to be dense and channels-last, or contiguous",
    )
    yield fprop, (x, values, index, geometry, 21, True), "as the other activations are"
    yield fprop, (x, values, index, geometry, 21, False, False, None, None, None, order), "channel_order is torch.int64"
    yield dgrad, (dy, values, index, geometry, 30, (5,), False), "x has 1 sizes, the geometry 2"
    yield dgrad, (dy, values, index, geometry, -3, (5, 4), False), "-3 channels, needs 0 or more"
    yield dgrad, (dy, values, index, geometry, 30, (5, -4), False), r"an image of \[5, -4\]"
    yield dgrad, (dy[0, 0, 0, 0], values, index, geometry, 30, (5, 4), False), r"images are \[\], needs \[n, channels"
    yield dgrad, (dy, values, index, geometry, 30, (6, 4), False), r"dy is \[2, 21, 3, 2\], dx of \[2, 30, 6, 4\]"
    yield wgrad, (x, dy, index, geometry, blocks + 1, 8), f"dw has {blocks + 1} blocks of 8, needs {blocks} of 8"
    yield wgrad, (x, dy, index, geometry, blocks, 1 << 40), "dw has"
    yield wgrad, (x, dy, index, geometry, -1, -8), "dw has -1 blocks of -8"
    yield wgrad, (x, dy[0, 0], index, geometry, blocks, 8), r"dy is \[3, 2\], needs"
    yield wgrad, (x, dy[0, 0, 0], index, geometry, blocks, 8), r"y \[2\], needs \[n, channels, size...\]"
    yield wgrad, (x, dy, index, geometry, blocks, 8, False, False, None, None, None, True), "needs w"


def test_raw_ops_check_as_well(channels):
    assert refusals(_wrong_calls(channels))
    x, values, index = torch.randn(2, 30, 5, 4), torch.randn(channels.blocks, 9, 8, 8), bst.index_of(channels)
    with pytest.raises(ValueError, match="a tensor is on cpu, needs meta"):
        conv_ops.fprop(x.to("meta"), values, index, make_geometry(2, 3), 21, False)
    with pytest.raises(TypeError, match="x is a ndarray"):
        bst.conv2d(x.numpy(), values, channels, kernel_size=3)
    with pytest.raises(TypeError, match="layout is a str"):
        bst.conv2d(x, values, "dense(1)", kernel_size=3)


def test_checks_orders_from_the_cpu_for_other_devices(channels):
    x, values = torch.randn(2, 30, 5, 4, device="meta"), torch.randn(channels.blocks, 9, 8, 8, device="meta")
    for kind in (list, torch.tensor, lambda order: torch.tensor(order).int()):
        bst.conv2d(x, values, channels, kernel_size=3, channel_order=kind([*range(30)]))
        with pytest.raises(ValueError, match=r"channel_order\[29\] is 30, needs 0 to 29"):
            bst.conv2d(x, values, channels, kernel_size=3, channel_order=kind([*range(29), 30]))
        with pytest.raises(ValueError, match="channel_order holds channel 7 twice"):
            bst.conv2d(x, values, channels, kernel_size=3, channel_order=kind([*range(29), 7]))


def test_takes_orders_of_lists_inside_of_transforms(channels):
    x, values = torch.randn(3, 2, 30, 5, 4), torch.randn(channels.blocks, 9, 8, 8)
    order = torch.randperm(30).tolist()

    def conv(x):
        return bst.conv2d(x, values, channels, kernel_size=3, channel_order=order)

    expected = torch.stack([conv(image) for image in x])
    assert torch.equal(torch.func.vmap(conv)(x), expected)
    y, gradient = torch.func.vjp(conv, x[0])
    assert torch.equal(y, expected[0])
    assert gradient(torch.ones_like(y))[0].shape == x[0].shape
    assert torch.equal(torch.compile(conv, backend="eager", fullgraph=True)(x[0]), expected[0])


def test_takes_numbers_of_numpy_and_orders_of_any_kind(channels):
    x, values = torch.randn(2, 30, 5, 4), torch.randn(channels.blocks, 9, 8, 8)
    order = torch.randperm(30)
    y = bst.conv2d(x, values, channels, kernel_size=3, padding=1, channel_order=order.int())
    sizes = {"kernel_size": np.int64(3), "padding": (np.int64(1), (1, np.int64(1)))}
    for given in (order, order.to(torch.uint8), order.tolist(), order.numpy()):
        assert torch.equal(bst.conv2d(x, values, channels, channel_order=given, **sizes), y)
