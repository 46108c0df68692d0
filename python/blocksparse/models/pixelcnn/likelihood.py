"""The discretised mixture of logistics: how likely a byte is, and bytes drawn from it.

A model says for each pixel, of K components, in this order (C: channels of the image):

    C = 3   K weights, then for red, green, blue: K means, K log scales, K coefficients     10 K numbers
    C = 1   K weights, K means, K log scales                                                 3 K numbers

Bytes are v = byte / 127.5 - 1. With s = exp(max(log scale, -7)) a component gives a byte the mass between its edges,

    P(v) = sigmoid((v + 1/255 - m) / s) - sigmoid((v - 1/255 - m) / s),

byte 0 all below its upper edge, byte 255 all above its lower one, so that the 256 masses sum to 1. Green's mean
depends on red and blue's on both: m_g + c0 r, m_b + c1 r + c2 g, with c = tanh(.) of the coefficients.

sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)) is computed by logarithms, which is exact for any
mass; the original takes the density in the middle where P is below 1e-5.

Source: Salimans et al., PixelCNN++, arXiv:1701.05517, section 2.1 and 2.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

LEAST_LOG_SCALE = -7.0
HALF = 1 / 255  # half the width of a byte
CLIP = 1e-5  # random numbers lie in [CLIP, 1 - CLIP]


class Mixture(NamedTuple):
    """weights [n, K, h, w] before the softmax; means, log_scales, coefficients [n, C, K, h, w] (C = 1: none)."""

    weights: Tensor
    means: Tensor
    log_scales: Tensor
    coefficients: Tensor | None


def to_range(images: Tensor) -> Tensor:
    """Bytes 0 to 255 as float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def to_bytes(values: Tensor) -> Tensor:
    """The other way, to the nearest byte."""
    return ((values + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def mixture_of(outputs: Tensor, channels: int) -> Mixture:
    """A model's outputs [n, 10 K or 3 K, h, w] by names, in float32 or float64."""
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    parts = 3 if channels == 3 else 2
    k = wide.size(1) // (1 + channels * parts)
    rest = wide[:, k:].unflatten(1, (channels, parts, k))
    log_scales = rest[:, :, 1].clamp(min=LEAST_LOG_SCALE)
    return Mixture(wide[:, :k], rest[:, :, 0], log_scales, rest[:, :, 2].tanh() if channels == 3 else None)


def means_given(mixture: Mixture, x: Tensor) -> Tensor:
    """Means [n, C, K, h, w] where the image x [n, C, h, w] is known."""
    means, c = mixture.means, mixture.coefficients
    if c is None:
        return means
    r, g = x[:, 0:1], x[:, 1:2]
    return torch.stack((means[:, 0], means[:, 1] + c[:, 0] * r, means[:, 2] + c[:, 1] * r + c[:, 2] * g), 1)


def log_mass(x: Tensor, means: Tensor, log_scales: Tensor) -> Tensor:
    """log P(x) of each component; all broadcast."""
    inverse = (-log_scales).exp().clamp(min=1e-30)  # so that no scale, however large, has a mass of 0
    upper, lower = (x - means + HALF) * inverse, (x - means - HALF) * inverse
    below, above = functional.logsigmoid(upper), functional.logsigmoid(-lower)
    between = below + above + torch.log(-torch.expm1(-2 * HALF * inverse))
    return torch.where(x < -0.999, below, torch.where(x > 0.999, above, between))


def log_likelihood(outputs: Tensor, x: Tensor) -> Tensor:
    """log P of each pixel, in nats.

    Args:
        outputs: of the model, [n, 10 K or 3 K, h, w].
        x: images [n, C, h, w] in [-1, 1].

    Returns:
        [n, h, w].
    """
    mixture = mixture_of(outputs, x.size(1))
    x = x.to(mixture.means.dtype)
    masses = log_mass(x.unsqueeze(2), means_given(mixture, x), mixture.log_scales)
    return torch.logsumexp(masses.sum(1) + mixture.weights.log_softmax(1), 1)


def bits_per_dim(nats: float, dims: int) -> float:
    """A sum of -log P over so many bytes, in bits each."""
    return nats / dims / math.log(2)


def random_numbers(n: int, channels: int, mixture: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """What `draw` takes for images [n, channels, *size]: [n, mixture + channels, *size], uniform."""
    numbers = torch.rand(n, mixture + channels, *size, generator=generator)
    return numbers.clamp_(CLIP, 1 - CLIP)


def draw(outputs: Tensor, numbers: Tensor, channels: int) -> Tensor:
    """Pixels from a model's outputs.

    The component is that with the largest weight + Gumbel noise, its logistic is drawn by the inverse of its
    distribution, and what it gives is rounded to a byte: exactly the masses of `log_mass`.

    Args:
        outputs: [n, 10 K or 3 K, h, w].
        numbers: [n, K + channels, h, w], uniform in (0, 1).
        channels: of the images.

    Returns:
        [n, channels, h, w] in [-1, 1], values of bytes.
    """
    m = mixture_of(outputs, channels)
    k = m.weights.size(1)
    numbers = numbers.to(m.weights.dtype)
    chosen = (m.weights - (-numbers[:, :k].log()).log()).argmax(1, keepdim=True)  # [n, 1, h, w]

    def of_chosen(values: Tensor) -> Tensor:
        index = chosen.unsqueeze(1).expand(-1, channels, -1, -1, -1)
        return values.gather(2, index).squeeze(2)  # [n, C, h, w]

    u = numbers[:, k:]
    noise = of_chosen(m.log_scales).exp() * (u.log() - (-u).log1p())
    means = of_chosen(m.means)
    first = _rounded(means[:, 0] + noise[:, 0])
    if m.coefficients is None:
        return first.unsqueeze(1)
    c = of_chosen(m.coefficients)
    second = _rounded(means[:, 1] + c[:, 0] * first + noise[:, 1])
    third = _rounded(means[:, 2] + c[:, 1] * first + c[:, 2] * second + noise[:, 2])
    return torch.stack((first, second, third), 1)


def _rounded(x: Tensor) -> Tensor:
    return ((x.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
