"""What the tests of convolutions share: problems, PyTorch's dense ones, how close is close."""

import torch
import torch.nn.functional as F

import blocksparse.torch as bst
from blocksparse.torch.conv import make_geometry
from blocksparse.torch.ops import conv as conv_ops

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CONV = (bst.conv1d, bst.conv2d, bst.conv3d)
TRANSPOSED = (bst.conv_transpose1d, bst.conv_transpose2d, bst.conv_transpose3d)
DENSE = (F.conv1d, F.conv2d, F.conv3d)
DENSE_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)).item()


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def to_format(x, last):
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


SIZE = (5, 6, 7)
GEOMETRIES = [  # of three sizes, of which the first `rank` are used
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": (2, 3, 1), "stride": (1, 2, 3), "padding": (1, 0, 0)},
    {"kernel_size": (3, 2, 2), "dilation": (1, 2, 3), "padding": ((2, 1), (0, 3), (1, 0))},
]


def of_rank(options, rank):
    return {name: value if isinstance(value, int) else value[:rank] for name, value in options.items()}


def dense_conv(x, w, rank, options, transposed):
    """The same by PyTorch alone: what it cannot say by padding is added or taken off here."""
    stride, dilation = options.get("stride", 1), options.get("dilation", 1)
    padding = options.get("padding", 0)
    pairs = [(p, p) if isinstance(p, int) else p for p in ((padding,) * rank if isinstance(padding, int) else padding)]
    flat = [p for pair in reversed(pairs) for p in pair]
    if not transposed:
        return DENSE[rank - 1](F.pad(x, flat), w, stride=stride, dilation=dilation)
    y = DENSE_TRANSPOSED[rank - 1](x, w.transpose(0, 1), stride=stride, dilation=dilation)
    return F.pad(y, [-p for p in flat])


def op_calls(layout, dtype=torch.float32):
    """(op, arguments, options) of calls of all three."""
    index = bst.index_of(layout)
    x, dy = torch.randn(2, 30, 5, 4, dtype=dtype), torch.randn(2, 21, 3, 4, dtype=dtype)
    up = torch.randn(2, 21, 11, 4, dtype=dtype)
    values, gates = torch.randn(layout.blocks, 6, 8, 8, dtype=dtype), torch.rand(layout.blocks)
    bias, order = torch.randn(21, dtype=dtype), torch.randperm(30).int()
    plain = make_geometry(2, (3, 2), (2, 1), (1, (0, 1)))
    transposed = make_geometry(2, (3, 2), (2, 1), (0, (0, 1)), transposed=True)
    last, gate = to_format(x, True), {"gates": gates, "order": order}
    yield conv_ops.fprop, (x, values, index, plain, 21, False), {}
    yield conv_ops.fprop, (last, values, index, plain, 21, True), {**gate, "bias": bias, "activation": 2}
    yield conv_ops.fprop, (x, values, index, plain, 21, False), {"residual": dy}
    yield conv_ops.fprop, (x, values, index, transposed, 21, False), gate
    yield conv_ops.fprop, (dy, values, index, make_geometry(2, (3, 2)), 30, False, True), {}
    yield conv_ops.dgrad, (dy, values, index, plain, 30, (5, 4), False), {}
    yield conv_ops.dgrad, (to_format(dy, True), values, index, plain, 30, (5, 4), True), gate
    yield conv_ops.dgrad, (up, values, index, transposed, 30, (5, 4), False), {}
    yield conv_ops.wgrad, (x, dy, index, plain, layout.blocks, 8), {}
    yield conv_ops.wgrad, (x, up, index, transposed, layout.blocks, 8), {"wide": True}
    yield (
        conv_ops.wgrad,
        (x, dy, index, plain, layout.blocks, 8),
        {**gate, "values": values, "gate_gradient": True},
    )
