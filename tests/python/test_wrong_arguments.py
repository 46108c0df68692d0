"""Each argument of public functions in turn is something else: the message says where, and what is needed."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import blocksparse
import blocksparse.torch as bst
from blocksparse import Layout, graphs
from blocksparse import numpy as bsn
from blocksparse.conv import BlocksparseConv
from blocksparse.matmul import BlocksparseMatMul

LAYOUT = Layout.from_graph("random(4,3,0.5)", 8, seed=1)  # 32 x 24
SQUARE = Layout.from_graph("ba(4,2)", 8)
GEOMETRY = bsn.conv_geometry((3, 3), padding=1)
X, DY, W, GATES = (np.ones(shape, np.float32) for shape in ((5, 24), (5, 32), LAYOUT.values_shape, LAYOUT.blocks))
IMAGES, FILTER = np.ones((2, 24, 5, 5), np.float32), np.ones((LAYOUT.blocks, 9, 8, 8), np.float32)
RESULTS = np.ones((2, 32, 5, 5), np.float32)
SEQUENCE, STATE = torch.zeros(3, 2, 24), (torch.zeros(2, 32), torch.zeros(2, 32))
STATES = (torch.zeros(1, 2, 32), torch.zeros(1, 2, 32))
SIDE = {"block_size": 8}
with warnings.catch_warnings():  # BSR is in beta state
    warnings.simplefilter("ignore")
    BSR = bst.to_bsr(torch.from_numpy(W), LAYOUT)

BAD = {
    "text": "x",
    "nothing": None,
    "a list": [1, 2],
    "an object": object(),
    "a fraction": 1.5,
    "NumPy's": np.float32(2.5),
    "negative": -1,
    "large": 2**70,
    "complex": np.zeros((2, 2), complex),
    "tensor": torch.zeros(4, 4, dtype=torch.int64),
    "tensor of a number": torch.tensor(1.5),
}

CALLS = {
    "Layout.from_mask": (Layout.from_mask, {"mask": np.eye(3), "out_features": 24, "in_features": 24, **SIDE}),
    "Layout.from_coordinates": (Layout.from_coordinates, {"out": [0, 1], "in_": [0, 1], "grid": (2, 2), **SIDE}),
    "Layout.from_csr": (Layout.from_csr, {"crow": [0, 1, 2], "col": [0, 1], "in_blocks": 2, **SIDE}),
    "Layout.from_graph": (Layout.from_graph, {"name": "dense(2)", "seed": 0, **SIDE}),
    "Layout.from_pattern": (Layout.from_pattern, {"pattern": LAYOUT.pattern()}),
    "Layout.from_torch": (Layout.from_torch, {"tensor": BSR}),
    "Layout.stack": (LAYOUT.stack, {"times": 2}),
    "Layout.to_dense": (LAYOUT.to_dense, {"values": W}),
    "graphs.random": (graphs.random, {"out_blocks": 2, "in_blocks": 2, "density": 0.5, "seed": 0, **SIDE}),
    "graphs.barabasi_albert": (graphs.barabasi_albert, {"nodes": 8, "links": 2, "extra": 0, "seed": 0, **SIDE}),
    "graphs.butterfly": (graphs.butterfly, {"nodes": 8, **SIDE}),
    "graphs.report": (graphs.report, {"layout": LAYOUT}),
    "graphs.mix": (graphs.mix, {"layouts": [SQUARE]}),
    "set_cpu_isa": (blocksparse.set_cpu_isa, {"name": ""}),
    "numpy.linear_fprop": (
        bsn.linear_fprop,
        {"x": X, "values": W, "layout": LAYOUT, "bias": DY[0], "activation": "relu", "gates": GATES, "threads": 1},
    ),
    "numpy.linear_dgrad": (bsn.linear_dgrad, {"dy": DY, "values": W, "layout": LAYOUT, "threads": 1}),
    "numpy.linear_wgrad": (bsn.linear_wgrad, {"x": X, "dy": DY, "layout": LAYOUT, "accumulate": False, "threads": 1}),
    "numpy.linear_wgrad of lists": (bsn.linear_wgrad, {"x": [X, X], "dy": [DY, DY], "layout": LAYOUT}),
    "numpy.conv_geometry": (bsn.conv_geometry, {"kernel": (3, 3), "stride": 1, "padding": 1, "transposed": False}),
    "numpy.conv_fprop": (
        bsn.conv_fprop,
        {"x": IMAGES, "values": FILTER, "layout": LAYOUT, "geometry": GEOMETRY, "activation": "relu", "threads": 1},
    ),
    "numpy.conv_dgrad": (
        bsn.conv_dgrad,
        {"dy": RESULTS, "values": FILTER, "layout": LAYOUT, "geometry": GEOMETRY, "size": (5, 5), "threads": 1},
    ),
    "numpy.conv_wgrad": (
        bsn.conv_wgrad,
        {"x": IMAGES, "dy": RESULTS, "layout": LAYOUT, "geometry": GEOMETRY, "accumulate": False, "threads": 1},
    ),
    "matmul.BlocksparseMatMul": (BlocksparseMatMul, {"layout": np.eye(3), **SIDE}),
    "matmul.BlocksparseMatMul()": (
        BlocksparseMatMul(np.eye(3), 32, 1),
        {"x": np.ones((2, 96)), "w": np.ones((3, 32, 32))},
    ),
    "conv.BlocksparseConv": (
        BlocksparseConv,
        {"BCK": [(range(8), range(8)), (range(8, 16), range(8, 16))], "TRS": (3, 3), "DHW": (5, 5)},
    ),
    "torch.linear": (
        bst.linear,
        {
            **{"x": torch.from_numpy(X), "values": torch.from_numpy(W), "layout": LAYOUT, "bias": torch.zeros(32)},
            **{"gates": torch.from_numpy(GATES), "residual": torch.from_numpy(DY), "activation": "relu"},
        },
    ),
    "torch.linear_wgrad": (
        bst.linear_wgrad,
        {"xs": [torch.from_numpy(X)], "dys": [torch.from_numpy(DY)], "layout": LAYOUT, "dtype": torch.float32},
    ),
    "torch.conv2d": (
        bst.conv2d,
        {
            **{"x": torch.from_numpy(IMAGES), "values": torch.from_numpy(FILTER), "layout": LAYOUT},
            **{"bias": torch.zeros(32), "kernel_size": 3, "padding": 1, "stride": 1, "activation": "relu"},
        },
    ),
    "torch.lstm": (
        bst.lstm,
        {
            **{"pre": torch.zeros(3, 2, 128), "values": torch.zeros(SQUARE.stack(4).values_shape)},
            **{"layout": SQUARE.stack(4), "state": STATE, "lengths": torch.tensor([3, 2])},
        },
    ),
    "torch.from_dense": (bst.from_dense, {"weight": torch.zeros(32, 24), "layout": LAYOUT}),
    "torch.to_dense": (bst.to_dense, {"values": torch.from_numpy(W), "layout": LAYOUT}),
    "torch.to_bsr": (bst.to_bsr, {"values": torch.from_numpy(W), "layout": LAYOUT}),
    "torch.from_bsr": (bst.from_bsr, {"tensor": BSR}),
    "torch.select_blocks": (bst.select_blocks, {"weight": torch.ones(32, 24), "density": 0.5, **SIDE}),
    "torch.BlockSparseLinear": (
        bst.BlockSparseLinear,
        {"in_features": 24, "out_features": 32, "layout": LAYOUT, "activation": "relu"},
    ),
    "torch.BlockSparseLinear.forward": (bst.BlockSparseLinear(24, 32, LAYOUT).forward, {"x": torch.from_numpy(X)}),
    "torch.BlockSparseLinear.from_dense": (
        bst.BlockSparseLinear.from_dense,
        {"linear": nn.Linear(24, 32), "density": 0.5, **SIDE},
    ),
    "torch.BlockSparseConv2d": (
        bst.BlockSparseConv2d,
        {"in_channels": 24, "out_channels": 32, "kernel_size": 3, "layout": LAYOUT, "padding": 1},
    ),
    "torch.BlockSparseConv2d.forward": (
        bst.BlockSparseConv2d(24, 32, 3, LAYOUT).forward,
        {"x": torch.from_numpy(IMAGES)},
    ),
    "torch.BlockSparseLSTM": (bst.BlockSparseLSTM, {"hidden_size": 32, "layout": SQUARE, "dropout": 0.0}),
    "torch.BlockSparseLSTM.forward": (
        bst.BlockSparseLSTM(24, 32, SQUARE).forward,
        {"x": SEQUENCE, "state": STATES, "lengths": torch.tensor([3, 2])},
    ),
    "torch.MultiplicativeLSTM.forward": (
        bst.MultiplicativeLSTM(24, 32, SQUARE).forward,
        {"x": SEQUENCE, "state": STATES, "lengths": torch.tensor([3, 2])},
    ),
    "torch.DeepUpdateLSTM": (bst.DeepUpdateLSTM, {"hidden_size": 32, "layouts": SQUARE, "inner": 2}),
    "torch.DeepUpdateLSTM.forward": (
        bst.DeepUpdateLSTM(24, 32, SQUARE, 2).forward,
        {"x": SEQUENCE, "state": STATES, "lengths": torch.tensor([3, 2])},
    ),
}
FIXED = {"torch.BlockSparseLSTM": {"input_size": 24}, "torch.DeepUpdateLSTM": {"input_size": 24}}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_kinds_are_named(name):
    call, right = CALLS[name]
    fixed = FIXED.get(name, {})
    call(**right, **fixed)
    wrong = []
    for argument in right:
        for kind, value in BAD.items():
            try:
                call(**{**right, **fixed, argument: value})
            except (TypeError, ValueError) as error:
                if not re.match(r"\[[\w.]+\] \S", str(error)):
                    wrong.append(f"{argument}, {kind}: {error!r}")
            except Exception as error:
                wrong.append(f"{argument}, {kind}: {error!r}")
    assert not wrong, "\n".join(wrong)


SPARSE = {
    "x of COO": lambda x, w: bst.linear(x.to_sparse(), w, LAYOUT),
    "x of CSR": lambda x, w: bst.linear(x.to_sparse_csr(), w, LAYOUT),
    "values": lambda x, w: bst.linear(x, w.to_sparse(), LAYOUT),
    "values with a gradient": lambda x, w: bst.linear(x.clone().requires_grad_(), w.to_sparse(), LAYOUT),
    "bias": lambda x, w: bst.linear(x, w, LAYOUT, torch.zeros(32).to_sparse()),
    "gates": lambda x, w: bst.linear(x, w, LAYOUT, gates=torch.ones(LAYOUT.blocks).to_sparse()),
    "residual": lambda x, w: bst.linear(x, w, LAYOUT, residual=torch.from_numpy(DY).to_sparse()),
    "x of linear_wgrad": lambda x, w: bst.linear_wgrad([x.to_sparse()], [torch.from_numpy(DY)], LAYOUT),
    "dy of linear_wgrad": lambda x, w: bst.linear_wgrad([x], [torch.from_numpy(DY).to_sparse()], LAYOUT),
}
SPARSE_CONV = {
    "x": lambda x, w: bst.conv2d(x.to_sparse(), w, LAYOUT, kernel_size=3),
    "values": lambda x, w: bst.conv2d(x, w.to_sparse(), LAYOUT, kernel_size=3),
    "bias": lambda x, w: bst.conv2d(x, w, LAYOUT, torch.zeros(32).to_sparse(), kernel_size=3),
    "gates": lambda x, w: bst.conv2d(x, w, LAYOUT, kernel_size=3, gates=torch.ones(LAYOUT.blocks).to_sparse()),
    "residual": lambda x, w: bst.conv2d(x, w, LAYOUT, kernel_size=3, residual=torch.ones(2, 32, 3, 3).to_sparse()),
    "channel_order": lambda x, w: bst.conv2d(
        x, w, LAYOUT, kernel_size=3, channel_order=torch.arange(24, dtype=torch.int32).to_sparse()
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_of_pytorch_are_refused(name):
    with pytest.raises(ValueError, match=r"^\[linear(_wgrad)?\] .* is torch.sparse_cs?[ro]+, needs torch.strided"):
        SPARSE[name](torch.from_numpy(X), torch.from_numpy(W))


@pytest.mark.parametrize("name", SPARSE_CONV)
def test_sparse_tensors_are_refused_by_convolutions(name):
    with pytest.raises(ValueError, match=r"^\[conv\] .* is torch.sparse_coo, needs torch.strided"):
        SPARSE_CONV[name](torch.from_numpy(IMAGES), torch.from_numpy(FILTER))


@pytest.mark.parametrize("which", [0, 1])
def test_sparse_tensors_are_refused_by_the_lstm(which):
    layout = Layout.from_graph("ba(3,2)", 8).stack(4)
    given = [torch.ones(2, 3, 96), torch.ones(layout.values_shape)]
    given[which] = given[which].to_sparse()
    with pytest.raises(ValueError, match=r"^\[lstm\] (pre|values) is torch.sparse_coo, needs torch.strided"):
        bst.lstm(*given, layout)


def test_integers_are_refused():
    x, dy, w, images, filters = (torch.from_numpy(a) for a in (X, DY, W, IMAGES, FILTER))
    dtypes = r"needs one of torch.float32, torch.float64, torch.bfloat16, torch.float16"
    for call, op in (
        (lambda: bst.linear(x.int(), w, LAYOUT), r"linear\] x"),
        (lambda: bst.linear(x.int(), w.int(), LAYOUT), r"linear\] a tensor"),
        (lambda: bst.linear(x, w, LAYOUT, torch.zeros(32).int()), r"linear\] a tensor"),
        (lambda: bst.linear_wgrad([x.int()], [dy.int()], LAYOUT), r"linear\] a tensor"),
        (lambda: bst.conv2d(images.int(), filters, LAYOUT, kernel_size=3), r"conv\] x"),
        (lambda: bst.conv2d(images.int(), filters.int(), LAYOUT, kernel_size=3), r"conv\] a tensor"),
    ):
        with pytest.raises(ValueError, match=rf"^\[{op} (is|of) torch.int32, {dtypes}"):
            call()
    with pytest.raises(ValueError, match=r"^\[linear\] values are torch.int32, needs torch.float32, the dtype of x"):
        bst.linear(x, w.int(), LAYOUT)


def test_numbers_of_numpy_are_numbers():
    b, two = np.int32(8), np.int64(2)
    assert Layout.from_graph("dense(2)", b) == graphs.dense(two, block_size=b)
    layer = bst.BlockSparseLinear(np.int64(24), np.int64(32), LAYOUT)
    assert layer(torch.from_numpy(X)).shape == (5, 32)
    assert bst.select_blocks(torch.ones(32, 32), np.float32(0.5), b).blocks == 8
    assert bsn.linear_wgrad(X, DY, LAYOUT, out=W.copy(), accumulate=np.True_, threads=two).shape == W.shape


@pytest.mark.parametrize("network", [bst.BlockSparseLSTM, bst.MultiplicativeLSTM, bst.DeepUpdateLSTM])
def test_wrong_lengths_name_the_network(network):
    made = network(24, 32, SQUARE, 2) if network is bst.DeepUpdateLSTM else network(24, 32, SQUARE)
    for lengths in (torch.tensor([3, 2, 1]), torch.tensor([3.0, 2.0]), torch.tensor([True, False])):
        with pytest.raises(ValueError, match=rf"^\[{network.__name__}\] lengths are .*, needs int64 \[2\]"):
            made(SEQUENCE, None, lengths)
    op = {"BlockSparseLSTM": "lstm", "MultiplicativeLSTM": "multiplicative", "DeepUpdateLSTM": "deep_update"}
    for training in (False, True):
        with (
            torch.set_grad_enabled(training),
            pytest.raises(ValueError, match=rf"^\[{op[network.__name__]}_forward\] lengths\[1\] is 4, needs 0 to 3"),
        ):
            made(SEQUENCE, None, torch.tensor([3, 4]))
