"""Gated linear units and MLPs on a card."""

import pytest
import torch
from test_torch import error
from test_torch_glu import ACTIVATIONS, layout_of
from test_torch_mlp import make

import blocksparse.torch as bst

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("b", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("n", [1, 16, 65, 300, 2100])
def test_a_gated_unit_is_the_dense_one(n, b, dtype):
    in_, hidden = 3 * b, 5 * b - 3
    layer = bst.BlockSparseGLU(in_, hidden, layout_of(hidden, in_, b), bias=True, device="cuda", dtype=dtype)
    x = torch.randn(n, in_, device="cuda").to(dtype).requires_grad_()
    weights = {name: w.detach().double() for name, w in layer.weights().items()}
    gate = torch.nn.functional.linear(x.double(), weights["gate"], weights["gate_bias"])
    up = torch.nn.functional.linear(x.double(), weights["up"], weights["up_bias"])
    want = torch.nn.functional.silu(gate) * up
    with torch.no_grad():
        assert error(layer(x), want) < BOUNDS[dtype]
    y = layer(x)
    assert error(y, want) < 2 * BOUNDS[dtype]
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(want, x, dy.double())
    y.backward(dy)
    assert error(x.grad, dx) < 3 * BOUNDS[dtype]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_on_a_card_as_on_the_cpu(activation, gated):
    mlp = make(96, 160, 32, gated=gated, activation=activation, bias=True, gates=True)
    x, dy = torch.randn(2, 45, 96), torch.randn(2, 45, 96)
    y = mlp(x)
    y.backward(dy)
    wanted = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    mlp.cuda()
    with torch.no_grad():
        assert error(mlp(x.cuda()).cpu(), y) < 1e-5
    mlp(x.cuda()).backward(dy.cuda())
    for p, want in zip(mlp.parameters(), wanted, strict=True):
        assert error(p.grad.cpu(), want) < 1e-5


@pytest.mark.parametrize("n", [1, 16, 300, 4096])
def test_graphs_replay(n):
    mlp = make(256, 512, 64, density=0.3, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(n, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        mlp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mlp(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, mlp(x))


def test_two_launches_without_gradients():
    mlp = make(256, 512, 64, density=0.3, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        mlp(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            mlp(x)
            torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "Memset" not in event.name and "Memcpy" not in event.name]
    assert not any("glu_forward" in name for name in kernels), kernels
    products = [name for name in kernels if "product" in name]
    assert len(products) == 2, kernels


def test_compiled():
    mlp = make(256, 512, 64, density=0.3, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(33, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(mlp, fullgraph=True)
    with torch.no_grad():
        assert error(compiled(x), mlp(x)) < 1e-2
    compiled(x).float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mlp.parameters())
