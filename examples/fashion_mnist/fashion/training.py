"""Training of one arm, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from .data import Images
from .network import Arm, Network, multiply_adds

BATCH = 128
TESTS = 5  # of a run


@dataclass
class Curve:
    """What was measured of one arm."""

    arm: Arm
    parameters: int
    multiply_adds: int
    seconds: float = 0.0  # of training alone
    losses: list[tuple[float, float]] = field(default_factory=list)  # (epoch, mean loss since the one before)
    accuracies: list[tuple[float, float]] = field(default_factory=list)  # (epoch, of all test images)
    finished: bool = False


def train(
    curve: Curve,
    network: Network,
    images: tuple[Images, Images],
    epochs: float,
    advance: Callable[[str], None],
    seed: int = 0,
) -> None:
    """Fills the curve; `advance` is told of every step."""
    training, test = images
    device = training.pixels.device
    n = training.classes.numel()
    steps = max(1, round(epochs * n / BATCH))
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    total, since = torch.zeros((), device=device), 0
    for step in range(1, steps + 1):
        started = time.perf_counter()
        if order.numel() < min(BATCH, n):
            order = torch.cat([order, torch.randperm(n, generator=generator)])
        chosen, order = order[:BATCH], order[BATCH:]
        flip = torch.rand(chosen.numel(), generator=generator) < 0.5
        x, classes = _batch(training, chosen.to(device), flip.to(device))
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            loss = functional.cross_entropy(network(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total, since = total + loss.detach(), since + 1
        if step % max(1, steps // 50) == 0 or step == steps:
            epoch = step * BATCH / n
            curve.losses.append((epoch, total.item() / since))
            total, since = torch.zeros((), device=device), 0
        curve.seconds += time.perf_counter() - started
        if step * TESTS // steps != (step - 1) * TESTS // steps:
            curve.accuracies.append((step * BATCH / n, accuracy(network, test)))
        advance(f"loss {curve.losses[-1][1]:.3f}" if curve.losses else "")
    curve.finished = True


def _batch(images: Images, chosen: Tensor, flip: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the images mirrored."""
    x = images.pixels[chosen]
    return torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x).contiguous(memory_format=torch.channels_last), (
        images.classes[chosen]
    )


@torch.no_grad()
def accuracy(network: Network, images: Images) -> float:
    """Share of images whose class is told."""
    network.eval()
    right = 0
    for pixels, classes in zip(images.pixels.split(500), images.classes.split(500), strict=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=pixels.is_cuda):
            right += int((network(pixels).argmax(1) == classes).sum())
    network.train()
    return right / images.classes.numel()


def start(arm: Arm, image: Tensor, seed: int = 0) -> tuple[Curve, Network]:
    """A network with new weights, where the image is."""
    torch.manual_seed(seed)
    network = Network(arm, image.shape[0]).to(image.device, memory_format=torch.channels_last)
    cost = multiply_adds(network, image)
    return Curve(arm, sum(p.numel() for p in network.parameters()), cost), network
