import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import blocksparse.torch as bst
from blocksparse import Layout
from blocksparse.matmul import BlocksparseMatMul


def test_module_size_must_fit(layout):
    with pytest.raises(ValueError, match=r"layout is 60 x 90 \(out x in\), needs 90 x 60"):
        bst.BlockSparseLinear(60, 90, layout)


def test_init_follows_the_real_fan_in():
    layout = Layout.from_graph("ba(64,4)", 8, in_features=509)
    layer = bst.BlockSparseLinear(509, 512, layout)
    fan_in = bst.to_dense(torch.ones(layout.values_shape), layout).sum(1)
    for o in (0, 100, 511):
        row = bst.to_dense(layer.weight, layout)[o]
        bound = fan_in[o].rsqrt()
        assert row.abs().max() <= bound
        assert row.abs().max() > 0.8 * bound
        assert layer.bias[o].abs() <= bound


def test_identity_init_passes_input_on():
    layout = Layout.from_graph("ws(16,4,0.3)", 8)
    layer = bst.BlockSparseLinear(128, 128, layout).identity_init_()
    x = torch.randn(5, 128)
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("grid", [(2, 4), (4, 2), (2, 3)])
def test_identity_init_of_other_shapes_is_that_of_2017(grid):
    layout = Layout.from_graph(f"dense({grid[0]},{grid[1]})", 8)
    layer = bst.BlockSparseLinear(layout.in_features, layout.out_features, layout).identity_init_()
    old = BlocksparseMatMul(layout.mask(), 8, z_order=False)  # there W is [C, K], whose roles are alike in the rule
    assert torch.equal(layer.weight, torch.from_numpy(old.identity_init()()))


def test_from_and_to_dense():
    dense = torch.nn.Linear(90, 60)
    layer = bst.BlockSparseLinear.from_dense(dense, density=0.5, block_size=16)
    assert layer.layout.blocks == 12
    kept = bst.to_dense(torch.ones(layer.weight.shape), layer.layout).bool()
    weight = F.pad(dense.weight.detach(), (0, 6, 0, 4)).view(4, 16, 6, 16).square().sum((1, 3))
    assert set(weight.flatten().topk(12).indices.tolist()) == set(
        (torch.from_numpy(layer.layout.mask()).flatten().nonzero()).flatten().tolist()
    )
    x = torch.randn(7, 90)
    torch.testing.assert_close(layer(x), F.linear(x, dense.weight * kept, dense.bias))
    torch.testing.assert_close(layer.to_dense()(x), layer(x))
    full = bst.BlockSparseLinear.from_dense(dense, density=1, block_size=16)
    torch.testing.assert_close(full(x), dense(x))
    given = bst.BlockSparseLinear.from_dense(dense, layout=layer.layout)
    assert torch.equal(given.weight, layer.weight)
    with pytest.raises(ValueError, match="one of them"):
        bst.BlockSparseLinear.from_dense(dense)
    with pytest.raises(ValueError, match="density is 2"):
        bst.BlockSparseLinear.from_dense(dense, density=2)


def test_bsr_shares_memory():
    dense = torch.randn(64, 96)
    layout = Layout.from_graph("random(4,6,0.5)", 16, seed=1)
    bsr = bst.to_dense(bst.from_dense(dense, layout), layout).to_sparse_bsr((16, 16))
    bias = torch.randn(64)
    layer = bst.BlockSparseLinear.from_bsr(bsr, bias)
    assert layer.weight.data_ptr() == bsr.values().data_ptr()
    assert layer.bias.data_ptr() == bias.data_ptr()
    x = torch.randn(5, 96)
    torch.testing.assert_close(layer(x), F.linear(x, bsr.to_dense(), bias))
    back = layer.to_bsr()
    assert back.values().data_ptr() == bsr.values().data_ptr()
    torch.testing.assert_close(back.to_dense(), bsr.to_dense())
    with pytest.raises(ValueError, match="multiples of 16"):
        bst.to_bsr(torch.zeros(1, 16, 16), Layout.from_graph("dense(1)", 16, in_features=15))


def test_half_precision_spares_gates_and_their_gradient(layout):
    layer = bst.BlockSparseLinear(90, 60, layout, gates=True)
    layer(torch.randn(3, 90)).sum().backward()
    layer.gates.data += 2**-20
    kept = layer.gates.detach().clone()
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.gates, kept)
    assert layer.gates.grad.dtype == torch.float32
    torch.optim.AdamW(layer.parameters()).step()


def test_state_dict_keeps_the_pattern(layout, tmp_path):
    layer = bst.BlockSparseLinear(90, 60, layout, gates=True)
    path = tmp_path / "state.pt"
    torch.save(layer.state_dict(), path)
    state = torch.load(path)
    assert set(state) == {"weight", "bias", "gates", "pattern"}
    assert state["pattern"].dtype == torch.float32, "which averages of state dicts leave alone"
    assert Layout.from_pattern(state["pattern"].numpy()) == layout
    other = bst.BlockSparseLinear(90, 60, layout, gates=True)
    other.load_state_dict(state)
    x = torch.randn(5, 90)
    assert torch.equal(other(x), layer(x))

    wrong = Layout.from_graph("random(4,6,0.4)", 16, seed=4, out_features=60, in_features=90)
    assert wrong.blocks == layout.blocks
    with pytest.raises(RuntimeError, match=r"was saved with Layout.*hash.*this layer has Layout.*hash"):
        bst.BlockSparseLinear(90, 60, wrong, gates=True).load_state_dict(state)
    state["pattern"][-1] += 1
    with pytest.raises(RuntimeError, match=r"pattern: .*damaged"):
        other.load_state_dict(state)


def test_deepcopy_pickle_and_moves(layout):
    layer = bst.BlockSparseLinear(90, 60, layout, gates=True)
    x = torch.randn(5, 90)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        assert other.weight.data_ptr() != layer.weight.data_ptr()
    assert layer.double()(x.double()).dtype == torch.float64
    assert layer.gates.dtype == torch.float64
    half = copy.deepcopy(layer).bfloat16()
    assert half.weight.dtype == torch.bfloat16
    assert half.gates.dtype == torch.float32
    assert half.pattern.dtype == torch.float32
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_meta_device(layout):
    layer = bst.BlockSparseLinear(90, 60, layout, gates=True, device="meta")
    assert layer(torch.empty(5, 90, device="meta")).shape == (5, 60)
    real = layer.to_empty(device="cpu")
    real.reset_parameters()
    assert Layout.from_pattern(real.pattern.numpy()) == layout
    assert real(torch.randn(5, 90)).isfinite().all()
    assigned = bst.BlockSparseLinear(90, 60, layout, device="meta")
    source = bst.BlockSparseLinear(90, 60, layout)
    assigned.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(5, 90)
    assert torch.equal(assigned(x), source(x))
    mixed = bst.BlockSparseLinear(90, 60, layout, device="meta")
    with pytest.raises(ValueError, match="a tensor is on meta, needs cpu"):
        mixed(x)


def test_extra_repr(layout):
    text = repr(bst.BlockSparseLinear(90, 60, layout, bias=False, gates=True, activation="relu"))
    assert "in_features=90, out_features=60, block_size=16, blocks=10 (41.67%), bias=False" in text
    assert "gates=True, activation=relu" in text


def test_training_follows_masked_dense():
    """Ten steps of Adam on blocks equal ten steps on a dense weight whose other entries are held at zero."""
    layout = Layout.from_graph("ba(12,2)", 8, in_features=93)
    sparse = bst.BlockSparseLinear(93, 96, layout).double()
    dense = sparse.to_dense()
    mask = bst.to_dense(torch.ones(layout.values_shape, dtype=torch.float64), layout)
    x, target = torch.randn(32, 93, dtype=torch.float64), torch.randn(32, 96, dtype=torch.float64)
    steps = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (sparse, dense)]
    for _ in range(10):
        for model, step in zip((sparse, dense), steps, strict=True):
            step.zero_grad()
            (model(x) - target).square().mean().backward()
            if model is dense:
                dense.weight.grad *= mask
            step.step()
    torch.testing.assert_close(bst.to_dense(sparse.weight, layout), dense.weight, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sparse.bias, dense.bias, rtol=1e-9, atol=1e-12)


def test_ragged_padding_stays_inert():
    layout = Layout.from_graph("dense(2)", 16, out_features=20, in_features=27)
    layer = bst.BlockSparseLinear(27, 20, layout)
    layer(torch.randn(8, 27)).square().sum().backward()
    beyond = torch.ones(20, 27)
    inside = bst.from_dense(beyond, layout).bool()
    assert not layer.weight.grad[~inside].any()
    assert layer.weight.grad[inside].any()


def test_a_huge_layer_trains_in_little_memory():
    """131072 x 131072 with 4M live weights: forward, backward, Adam. A dense weight alone would be 64 GiB."""
    script = """
import resource, torch
import blocksparse.torch as bst
from blocksparse import graphs
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
side, b = 131072, 32
layout = graphs.balanced_random(side // b, degree=1, block_size=b)
layer = bst.BlockSparseLinear(side, side, layout, bias=False)
assert layer.weight.numel() == 4096 * 1024
step = torch.optim.Adam(layer.parameters())
x = torch.randn(16, side)
for _ in range(2):
    step.zero_grad()
    layer(x).square().mean().backward()
    step.step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)
"""
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert float(result.stdout) < 600, "MiB more than PyTorch itself"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_layers_of_another_default_dtype(dtype):
    layout = Layout.from_graph("ws(4,2,0.3)", 8)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        layers = [
            bst.BlockSparseLinear(32, 32, layout),
            bst.BlockSparseConv2d(32, 32, 3, layout),
            bst.BlockSparseLSTM(4, 32, layout),
            bst.MultiplicativeLSTM(4, 32, layout),
            bst.DeepUpdateLSTM(4, 32, [layout] * 3),
        ]
        of_float = bst.BlockSparseLinear(32, 32, layout, dtype=torch.float32)
    finally:
        torch.set_default_dtype(before)
    assert {p.dtype for layer in layers for p in layer.parameters()} == {dtype}
    assert of_float.weight.dtype == torch.float32
    assert all(p.isfinite().all() for layer in [*layers, of_float] for p in layer.parameters())
