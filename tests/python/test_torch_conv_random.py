"""Random convolutions against dense ones in f64, and random mistakes. BLOCKSPARSE_FUZZ=3000 tries as many of each."""

import functools
import os
import random

import pytest
import torch
from conftest import make_channels
from convolutions import CONV, TOLERANCE, TRANSPOSED, dense_conv, error, op_calls, to_format

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.torch.ops.calls import sum_dtype

COUNT = int(os.environ.get("BLOCKSPARSE_FUZZ", "60"))
ACTIVATIONS = {"none": lambda t: t, **{name: getattr(torch.nn.functional, name) for name in ("relu", "gelu", "silu")}}


def random_layout(r):
    b = r.choice((8, 8, 16, 32))
    out, in_ = r.randint(1, 48 // b + 1), r.randint(1, 48 // b + 1)
    mask = [[r.random() < 0.5 for _ in range(in_)] for _ in range(out)]
    ragged = (r.choice((0, 0, r.randint(0, b - 1))) for _ in range(2))
    out_features, in_features = (blocks * b - less for blocks, less in zip((out, in_), ragged, strict=True))
    layout = Layout.from_mask(mask, b, out_features=out_features, in_features=in_features)
    return layout.t() if r.random() < 0.25 else layout


def random_geometry(r, rank, transposed):
    options = {
        "kernel_size": tuple(r.choice((1, 1, 2, 3, 4)) for _ in range(rank)),
        "stride": tuple(r.choice((1, 1, 2, 3)) for _ in range(rank)),
        "dilation": tuple(r.choice((1, 1, 2, 3)) for _ in range(rank)),
        "padding": tuple((r.randint(0, 3), r.randint(0, 3)) for _ in range(rank)),
    }
    if transposed:
        most = map(max, options["stride"], options["dilation"])
        options["output_padding"] = tuple(r.randint(0, more - 1) for more in most)
    return options


def with_output_padding(options):
    """As dense_conv takes it: that many fewer pixels are taken off behind."""
    more = options.get("output_padding", (0,) * len(options["padding"]))
    pads = tuple((before, after - m) for (before, after), m in zip(options["padding"], more, strict=True))
    return {**options, "padding": pads}


def strewn(x, r):
    """The same numbers in other places of memory."""
    way = r.choice(("contiguous", "channels-last", "every second", "transposed", "between others"))
    if way in ("contiguous", "channels-last"):
        return to_format(x, way == "channels-last")
    if way == "every second":
        return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    if way == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.cat((torch.full_like(x, torch.nan), x, x), 1)[:, x.size(1) : 2 * x.size(1)]


def refusal(call):
    """What a call raises, or None."""
    try:
        call()
    except (ValueError, RuntimeError) as raised:
        return raised
    return None


def check(layout, rank, transposed, dtype, options, r):
    """One problem: the result and all gradients that are wanted. False if it is none, for the image is too small."""
    n, size = r.choice((0, 1, 2, 3)), [r.randint(1, (20, 9, 5)[rank - 1]) for _ in range(rank)]
    op, taps = (TRANSPOSED if transposed else CONV)[rank - 1], torch.Size(options["kernel_size"]).numel()
    order = torch.randperm(layout.in_features)
    x = strewn(torch.randn(n, layout.in_features, *size).to(dtype), r)
    values = torch.randn(layout.blocks, taps, layout.block_size, layout.block_size).to(dtype)
    if refused := refusal(lambda: op(x, values, layout, **options)):
        assert "covers" in str(refused) or "would give one of size" in str(refused)
        return False
    shape = op(x, values, layout, **options).shape
    residual = strewn(torch.randn(shape).to(dtype), r)
    bias = torch.randn(layout.out_features).to(dtype)
    gates = torch.rand(layout.blocks, dtype=sum_dtype(dtype)) * (torch.rand(layout.blocks) > 0.2)
    inputs = [t.requires_grad_(r.random() < 0.7) for t in (x, values, bias, gates, residual)]
    activation = r.choice([name for name in ACTIVATIONS if name != "relu" or dtype.itemsize > 2])  # no kinks in 16 bits
    more = {"gates": gates, "residual": residual, "channel_order": order, "activation": activation}
    y = op(x, values, layout, bias, **more, **options)
    with torch.no_grad():
        assert error(op(x, values, layout, bias, **more, **options), y) < TOLERANCE[dtype] or n == 0

    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    x64, v64, b64, g64, r64 = doubles
    if n == 0:
        expected = torch.zeros(shape, dtype=torch.float64)
    else:
        w64 = bst.to_dense(v64 * g64.view(-1, 1, 1, 1), layout, options["kernel_size"])
        product = dense_conv(x64[:, order], w64, rank, with_output_padding(options), transposed)
        expected = ACTIVATIONS[activation](product + b64.view(-1, *(1,) * rank) + r64)
    assert y.shape == expected.shape
    assert error(y, expected) < 2 * TOLERANCE[dtype]
    wanted = [(t, d) for t, d in zip(inputs, doubles, strict=True) if t.requires_grad]
    if wanted and n > 0:
        dy = strewn(torch.randn(shape).to(dtype), r)
        grads = torch.autograd.grad(y, [t for t, _ in wanted], dy)
        for got, want in zip(grads, torch.autograd.grad(expected, [d for _, d in wanted], dy.double()), strict=True):
            assert error(got, want) < 6 * TOLERANCE[dtype] or want.norm() < 1e-6
    return True


def test_agrees_with_dense():
    done = 0
    for seed in range(COUNT):
        r = random.Random(seed)
        torch.manual_seed(seed)
        rank, transposed, dtype = r.choice((1, 2, 2, 3)), r.random() < 0.4, r.choice(list(TOLERANCE))
        layout, options = random_layout(r), random_geometry(r, rank, transposed)
        try:
            done += check(layout, rank, transposed, dtype, options, r)
        except AssertionError as failure:
            raise AssertionError(f"seed {seed}: {layout!r} {dtype} {options} {transposed=}") from failure
    assert done > COUNT / 2


def spoiled(value, r):
    """An argument that is wrong in some way, or right again."""
    if isinstance(value, torch.Tensor):
        ways = (
            lambda: value.to(r.choice((torch.float64, torch.int64, torch.bool, torch.complex64))),
            lambda: value[:-1],
            lambda: value.unsqueeze(r.randrange(value.dim() + 1)),
            lambda: value.flatten(),
            lambda: value.to("meta"),
            lambda: value[..., ::2],
            lambda: value.transpose(0, -1),
            lambda: value.new_zeros((0,) * r.randint(0, 7)),
            lambda: value.expand(3, *value.shape),
            lambda: value[:0],
        )
        return r.choice(ways)()
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return r.choice((value + 1, value - 1, -value, 0, 1 << 31, 1 << 40, 1 << 62, -(1 << 62)))
    numbers = list(value)
    i = r.randrange(len(numbers))
    numbers[i : i + 1] = r.choice(([], [numbers[i], 1], [0], [-1], [9], [1 << 31], [1 << 62]))
    return tuple(numbers)


def test_mistakes_are_refused_or_answered():
    """No crash, and what is wrong is a ValueError; RuntimeErrors are memory that there is not."""
    layout, refused = make_channels(), 0
    for seed in range(COUNT):
        r = random.Random(seed)
        op, arguments, options = r.choice(list(op_calls(layout)))
        arguments = list(arguments)
        i = r.randrange(len(arguments))
        arguments[i] = spoiled(arguments[i], r)
        raised = refusal(functools.partial(op, *arguments, **options))
        if isinstance(raised, ValueError):
            assert str(raised).startswith("["), seed
            refused += 1
        elif raised is not None:
            assert any(word in str(raised) for word in ("alloc", "2^63", "overflow", "PyTorch refused")), seed
    assert refused > COUNT / 2


@pytest.mark.parametrize("last", [False, True])
def test_images_too_large_for_any_memory(last):
    layout, values = Layout.from_graph("dense(2)", 8), torch.randn(4, 1, 8, 8)
    x = to_format(torch.randn(2, 16, 2, 2, 2), last)
    with pytest.raises((RuntimeError, TypeError), match=r"2\^63 elements|[Oo]verflow"):
        bst.conv_transpose3d(x, values, layout, kernel_size=1, stride=1 << 30)
