"""A residual network whose convolutions are dense or block-sparse, and the three arms of about equal cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import blocksparse.torch as bst
from blocksparse import graphs


@dataclass(frozen=True)
class Arm:
    """One network: `blocks` residual blocks of two 3x3 convolutions over `width` channels."""

    name: str
    width: int
    blocks: int
    degree: int = 0  # blocks of inputs that each block of outputs sees; 0: all, by a dense convolution
    block_size: int = 16

    @property
    def density(self) -> float:
        return self.degree * self.block_size / self.width if self.degree else 1.0

    def smaller(self) -> Arm:
        """The same in little, for tests."""
        return replace(self, width=self.width // 2, block_size=8)


# A convolution of `width` channels costs density * width^2: twice the width at a quarter, or half of it twice.
ARMS = {
    arm.name: arm
    for arm in (
        Arm("dense", width=64, blocks=2),
        Arm("wide", width=128, blocks=2, degree=2),
        Arm("deep", width=64, blocks=4, degree=2),
    )
}


def _conv(arm: Arm, seed: int) -> nn.Module:
    if not arm.degree:
        return nn.Conv2d(arm.width, arm.width, 3, padding=1, bias=False)
    side = arm.width // arm.block_size
    layout = graphs.balanced_random(side, degree=arm.degree, block_size=arm.block_size, seed=seed)
    return bst.BlockSparseConv2d(arm.width, arm.width, 3, layout, padding=1, bias=False)


class Residual(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))): He et al., arXiv:1603.05027."""

    def __init__(self, arm: Arm, seed: int) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(arm.width), nn.BatchNorm2d(arm.width)
        self.conv1, self.conv2 = _conv(arm, 2 * seed), _conv(arm, 2 * seed + 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.first(x).relu())
        y = self.conv2(self.second(y).relu())
        return x + y


class Network(nn.Module):
    """Images to a quarter of their size, residual blocks, the mean over pixels, classes."""

    def __init__(self, arm: Arm, channels: int, classes: int = 10) -> None:
        super().__init__()
        self.arm = arm
        self.stem = nn.Conv2d(channels, arm.width, 5, stride=2, padding=2, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.body = nn.Sequential(*(Residual(arm, seed) for seed in range(arm.blocks)))
        self.norm = nn.BatchNorm2d(arm.width)
        self.head = nn.Linear(arm.width, classes)
        with torch.no_grad():  # variance 2 / fan in, for what relu takes away
            for layer in self.modules():
                if isinstance(layer, (nn.Conv2d, bst.BlockSparseConv2d)):
                    layer.weight.mul_(math.sqrt(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.pool(self.stem(x)))
        return self.head(self.norm(x).relu().mean((2, 3)))


def multiply_adds(network: Network, image: Tensor) -> int:
    """Of one image, in convolutions and the last layer."""
    total = network.head.weight.numel()

    def count(layer: nn.Module, _: object, y: Tensor) -> None:
        nonlocal total
        total += layer.weight.numel() * y.shape[2] * y.shape[3]

    hooks = [
        layer.register_forward_hook(count)
        for layer in network.modules()
        if isinstance(layer, (nn.Conv2d, bst.BlockSparseConv2d))
    ]
    training = network.training
    with torch.no_grad():
        network.eval()(image[None])
    network.train(training)
    for hook in hooks:
        hook.remove()
    return total
