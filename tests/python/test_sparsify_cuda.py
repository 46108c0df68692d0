"""Sparsifiers of dense training on a card."""

import copy

import pytest
import torch
from test_sparsify_l0 import Reads
from torch import nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from pruners import CUBIC, KINDS, assert_equal, counts, live, network, optimizer_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")


def train(model, optimizer, steps, start=0, scaler=None, dtype=None):
    for t in range(start, start + steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(t)).cuda()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = nn.functional.mse_loss(model(x), x[:, :5].sin())
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def prepared(kind, **options):
    torch.manual_seed(1)
    model, pruner = network().cuda(), KINDS[kind]()
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner, **options)
    pruner.attach(optimizer)
    return model, pruner, optimizer


@pytest.mark.parametrize("kind", [k for k in KINDS if "ramp" not in k and "global" not in k])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_density_is_exact_and_a_run_is_resumed(kind, dtype):
    model, pruner, optimizer = prepared(kind)
    train(model, optimizer, 7, dtype=dtype)
    states = copy.deepcopy([part.state_dict() for part in (model, optimizer, pruner)])
    train(model, optimizer, 8, 7, dtype=dtype)
    assert counts(pruner) == {"0": live(32, 0.75), "2": live(40, 0.75)}
    again = prepared(kind)
    for part, state in zip((again[0], again[2], again[1]), states, strict=True):
        part.load_state_dict(state)
    train(again[0], again[2], 8, 7, dtype=dtype)
    assert_equal(model.state_dict(), again[0].state_dict())
    assert all(not target.norms()[~pruner.masks()[target.name]].any() for target in pruner.targets)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["magnitude", "l0", "blast"])
def test_skipped_steps_of_a_scaler(kind, fused):
    model, pruner, optimizer = prepared(kind, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60)  # overflows at first
    train(model, optimizer, 60, scaler=scaler, dtype=torch.float16)
    done = int(next(iter(optimizer.state.values()))["step"])
    assert 0 < done < 60
    assert pruner.steps == done


def test_masks_are_those_of_a_cpu():
    """From the same weights; and models may move between choices."""
    model = network()
    pruner = KINDS["magnitude"]()
    pruner.prepare(model)
    other, same = copy.deepcopy(network()), KINDS["magnitude"]()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if "gates" not in k})
    same.prepare(other)
    other.cuda()
    for _ in range(12):
        pruner.step()
        same.step()
    assert all(torch.equal(mask, same.masks()[name].cpu()) for name, mask in pruner.masks().items())
    x = torch.randn(4, 32)
    torch.testing.assert_close(other(x.cuda()).cpu(), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [bss.MagnitudePruner, bss.Blast, bss.GroupLasso, bss.L0])
def test_every_kind_of_layer(kind):
    """cuDNN's LSTM reads a list of weights, our own layers take gates to their kernels."""
    model = Reads().cuda()
    pruner = kind(CUBIC, block_size=8)
    pruner.prepare(model)
    optimizer = optimizer_of(model, pruner)
    pruner.attach(optimizer)
    gates = list(pruner.parameters()) if kind is bss.L0 else []
    slopes = [0.0] * len(gates)  # of some steps together: in one, all gates of a small layer may be at 0 or 1
    for t in range(13):
        x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(t)).cuda()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if t < 11:
            slopes = [slope + float(p.grad.abs().sum()) for slope, p in zip(slopes, gates, strict=True)]
        optimizer.step()
    assert all(slope > 0 for slope in slopes)
    for target in pruner.targets:
        present = int(target.present().sum())
        assert int(pruner.masks()[target.name].sum()) == min(present, live(target.grid[0] * target.grid[1], 0.75))


def test_conversion_and_report():
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).cuda()
    pruner = bss.MagnitudePruner(bss.Constant(0.95), block_size=64)
    pruner.prepare(model)
    row = pruner.report(tokens=256).rows[0]
    assert row.now_s > 0
    assert row.expected_s > 0
    x = torch.randn(256, 1024, device="cuda")
    y = model(x)
    model = pruner.convert(model, min_speedup=0)
    assert isinstance(model[0], bst.BlockSparseLinear)
    torch.testing.assert_close(model(x), y, rtol=2e-3, atol=2e-3)
