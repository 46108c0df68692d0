"""The discretised mixture of logistics: its masses, its gradients, and bytes drawn from it."""

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from blocksparse.models.pixelcnn import likelihood  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES = torch.arange(256, dtype=torch.uint8)


def outputs_of(channels, mixture, size=(1, 1), seed=0, wide=1.0):
    """What a model might say, [1, outputs, *size]."""
    numbers = mixture * (10 if channels == 3 else 3)
    return wide * torch.randn(1, numbers, *size, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.floats(-3, 3), st.floats(-12, 6))
def test_masses_of_a_component_sum_to_1(mean, log_scale):
    x = likelihood.to_range(BYTES)
    log_scales = torch.tensor(log_scale).clamp(min=likelihood.LEAST_LOG_SCALE)
    total = likelihood.log_mass(x, torch.tensor(mean), log_scales).exp().sum()
    assert float(total) == pytest.approx(1, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 10), st.sampled_from([0.3, 1.0, 4.0]))
def test_grey_pixels_sum_to_1(seed, mixture, wide):
    outputs = outputs_of(1, mixture, seed=seed, wide=wide).expand(256, -1, 1, 1)
    nats = likelihood.log_likelihood(outputs, likelihood.to_range(BYTES).view(256, 1, 1, 1))
    assert float(nats.exp().sum()) == pytest.approx(1, abs=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.5, 2.0]))
def test_colours_sum_to_1_one_after_the_other(seed, wide):
    """P(blue | red, green) by Bayes: the sum over blue of P(r, g, b) does not depend on how blue is distributed."""
    mixture = 3
    outputs = outputs_of(3, mixture, seed=seed, wide=wide).double()
    r, g = 0.3, -0.7
    x = torch.empty(256, 3, 1, 1, dtype=torch.float64)
    x[:, 0], x[:, 1], x[:, 2, 0, 0] = r, g, likelihood.to_range(BYTES).double()
    both = likelihood.log_likelihood(outputs.expand(256, -1, 1, 1), x).exp().sum()
    m = likelihood.mixture_of(outputs, 3)
    masses = likelihood.log_mass(x[:1].unsqueeze(2), likelihood.means_given(m, x[:1]), m.log_scales)
    expected = (masses[:, :2].sum(1) + m.weights.log_softmax(1)).logsumexp(1).exp().squeeze()
    assert float(both) == pytest.approx(float(expected), abs=1e-6)


def test_the_formulas_by_hand():
    """Of one pixel, in plain loops."""
    outputs = outputs_of(3, 2, seed=3).double()
    pixel = (20, 255, 0)
    x = likelihood.to_range(torch.tensor(pixel)).double()
    numbers = outputs.flatten().tolist()
    weights, rest = numbers[:2], numbers[2:]
    total = 0.0
    for k in range(2):
        means = [rest[6 * c + k] for c in range(3)]
        scales = [math.exp(max(rest[6 * c + 2 + k], -7)) for c in range(3)]
        c0, c1, c2 = (math.tanh(rest[6 * c + 4 + k]) for c in range(3))
        means[1] += c0 * float(x[0])
        means[2] += c1 * float(x[0]) + c2 * float(x[1])
        p = math.exp(weights[k]) / sum(map(math.exp, weights))
        for c in range(3):
            upper, lower = ((float(x[c]) - means[c] + s / 255) / scales[c] for s in (1, -1))
            above = 1.0 if pixel[c] == 255 else 1 / (1 + math.exp(-upper))
            p *= above - (0.0 if pixel[c] == 0 else 1 / (1 + math.exp(-lower)))
        total += p
    found = likelihood.log_likelihood(outputs, x.view(1, 3, 1, 1)).exp()
    assert float(found) == pytest.approx(total, rel=1e-6)


def test_bits_per_dim_of_a_uniform_pixel_is_8():
    outputs = torch.zeros(1, 3, 4, 4)
    outputs[:, 2] = 12.0  # so wide that all bytes but the first and last have next to no mass
    x = torch.zeros(1, 1, 4, 4)
    nats = -float(likelihood.log_likelihood(outputs, x).sum())
    assert likelihood.bits_per_dim(nats, 16) == pytest.approx(12 / math.log(2) + math.log2(4 * 255 / 2), abs=1e-3)


@pytest.mark.parametrize("log_scale", [-30.0, -7.0, 0.0, 50.0, 500.0])
def test_gradients_are_numbers_everywhere(log_scale):
    outputs = outputs_of(3, 2, (16, 16), wide=3.0)
    outputs[:, [4, 5, 10, 11, 16, 17]] = log_scale
    outputs.requires_grad_()
    x = likelihood.to_range(BYTES.view(1, 1, 16, 16).expand(1, 3, 16, 16))
    (gradient,) = torch.autograd.grad(likelihood.log_likelihood(outputs, x).sum(), outputs)
    assert bool(gradient.isfinite().all())


def test_bytes_go_there_and_back():
    assert torch.equal(likelihood.to_bytes(likelihood.to_range(BYTES)), BYTES)


def test_drawn_pixels_have_the_masses_that_the_likelihood_gives_them():
    outputs, n = outputs_of(1, 3, seed=5), 200_000
    generator = torch.Generator().manual_seed(0)
    numbers = likelihood.random_numbers(n, 1, 3, (1, 1), generator)
    drawn = likelihood.draw(outputs.expand(n, -1, 1, 1), numbers, 1)
    found = torch.bincount(likelihood.to_bytes(drawn).flatten().long(), minlength=256) / n
    x = likelihood.to_range(BYTES).view(256, 1, 1, 1)
    expected = likelihood.log_likelihood(outputs.expand(256, -1, 1, 1), x).exp().flatten()
    deviations = (found - expected).abs() / (expected / n).clamp(min=1 / n**2).sqrt()
    assert float(deviations.max()) < 5
    assert float((found - expected).abs().sum()) < 0.03


def test_drawn_colours_depend_on_one_another():
    """Scales so small that a pixel is its means: green = 0.5 + tanh(c0) red, blue = tanh(c1) red + tanh(c2) green."""
    outputs = torch.full((1, 10, 1, 1), -7.0)
    red, green, c0, c1, c2 = 0.2, 0.5, -0.4, 0.3, 0.9
    outputs[0, [1, 4, 7], 0, 0] = torch.tensor([red, green, 0.0])
    outputs[0, [3, 6, 9], 0, 0] = torch.tensor([c0, c1, c2])
    drawn = likelihood.draw(outputs, torch.full((1, 4, 1, 1), 0.5), 3).flatten().tolist()
    assert drawn[0] == pytest.approx(red, abs=1 / 255)
    assert drawn[1] == pytest.approx(green + math.tanh(c0) * drawn[0], abs=1 / 255)
    assert drawn[2] == pytest.approx(math.tanh(c1) * drawn[0] + math.tanh(c2) * drawn[1], abs=1 / 255)


def test_pure_colours_have_the_masses_that_the_likelihood_gives_them():
    """The corners of the cube of colours, where values are cut off and green and blue depend on what was cut off."""
    outputs, n = outputs_of(3, 3, wide=1.5), 100_000
    numbers = likelihood.random_numbers(n, 3, 3, (1, 1), torch.Generator().manual_seed(0))
    drawn = likelihood.to_bytes(likelihood.draw(outputs.expand(n, -1, 1, 1), numbers, 3)).view(n, 3)
    corners = 255 * torch.cartesian_prod(*[torch.arange(2)] * 3)
    x = likelihood.to_range(corners).view(8, 3, 1, 1)
    expected = likelihood.log_likelihood(outputs.expand(8, -1, 1, 1), x).exp().flatten()
    found = (drawn.unsqueeze(1) == corners).all(2).float().mean(0)
    assert float(expected.sum()) > 0.2
    assert float(((found - expected).abs() / (expected / n).sqrt()).max()) < 4
