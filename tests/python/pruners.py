"""A small network, every sparsifier of dense training, and a loop, for tests."""

import math

import torch
from torch import nn

import blocksparse.torch.sparsify as bss

CUBIC = bss.PolynomialDecay(0.75, begin_step=2, end_step=12, frequency=2)


def network():
    return nn.Sequential(nn.Linear(32, 60), nn.GELU(), nn.Linear(60, 40), nn.GELU(), nn.Linear(40, 5))


def pruner_of(kind, schedule=CUBIC, ignored=r"^4", **options):
    return kind(schedule, block_size=8, ignore=ignored, **options)


KINDS = {
    "magnitude": lambda: pruner_of(bss.MagnitudePruner),
    "magnitude, no regrowth": lambda: pruner_of(bss.MagnitudePruner, regrow=False),
    "magnitude, global": lambda: pruner_of(bss.MagnitudePruner, scope="global"),
    "lasso": lambda: pruner_of(bss.GroupLasso, strength=3.0),
    "lasso, ramp": lambda: pruner_of(bss.GroupLasso, bss.ThresholdRamp(0.18, 0, 4, 12, frequency=2)),
    "l0": lambda: pruner_of(bss.L0),
    "l0, global": lambda: pruner_of(bss.L0, scope="global"),
    "blast": lambda: pruner_of(bss.Blast, grow=0.3),
}


def optimizer_of(model, pruner, kind=torch.optim.AdamW, **options):
    more = [{"params": pruner.parameters(), "lr": 0.02, "weight_decay": 0.0}] if isinstance(pruner, bss.L0) else []
    return kind([{"params": list(model.parameters())}, *more], **{"lr": 1e-2, **options})


def train(model, optimizer, steps, start=0):
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(16, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :5].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepared(kind="magnitude", optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(1)
    model, pruner = network(), KINDS[kind]()
    pruner.prepare(model)
    made = optimizer_of(model, pruner, optimizer, **options)
    pruner.attach(made)
    return model, pruner, made


def counts(pruner):
    return {name: int(mask.sum()) for name, mask in pruner.masks().items()}


def live(blocks, sparsity):
    return blocks - math.floor(blocks * sparsity + 0.5)


def assert_equal(one, another):
    if isinstance(one, dict):
        assert one.keys() == another.keys()
        for key in one:
            assert_equal(one[key], another[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, another)
    else:
        assert one == another
