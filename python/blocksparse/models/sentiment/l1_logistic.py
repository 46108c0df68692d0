"""L1 logistic regression of many strengths and folds at once, on a card or a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS, TOLERANCE = 3000, 1e-5  # of the largest weight's movement in an iteration, relative to the largest weight
LOOKS = 50  # iterations between looks at the movement
POWERS = 30  # products that find the largest singular value


@torch.no_grad()
def fit(x: Tensor, y: Tensor, chosen: Tensor, strengths: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Weights [problems, features + 1], the last of a constant 1: each minimises |w|_1 + C sum log(1 + exp(-s w.x)).

    s is 1 or -1 by the label. As in liblinear the weight of the constant is penalised, too. Accelerated proximal
    gradients (FISTA) whose momentum begins anew where it leads uphill.

    Args:
        x: float32 or float64 [texts, features].
        y: labels [texts], 0 and 1.
        chosen: bool [problems, texts]: which texts are read.
        strengths: C [problems].
        iterations: at most.
    """
    read = chosen.any(0)  # half of the texts, where there is one split
    x, y, chosen = x[read], y[read], chosen[:, read]
    x = torch.cat([x, x.new_ones(x.size(0), 1)], 1)
    sign = (2 * y.to(x.dtype) - 1).unsqueeze(1)
    counted = chosen.t().to(x.dtype) * strengths.to(x.dtype)  # [texts, problems]
    step = 1 / (strengths.to(x.dtype) * largest_square(x) / 4)
    w = x.new_zeros(x.size(1), strengths.numel())
    ahead, age = w.clone(), x.new_ones(strengths.numel())
    for i in range(iterations):
        slope = -counted * sign * torch.sigmoid(-sign * (x @ ahead))
        down = ahead - step * (x.t() @ slope)
        after = torch.sign(down) * (down.abs() - step).clamp(min=0)
        moved = after - w
        uphill = ((ahead - after) * moved).sum(0) > 0
        age = torch.where(uphill, torch.ones_like(age), age)
        older = (1 + (1 + 4 * age * age).sqrt()) / 2
        ahead = after + torch.where(uphill, torch.zeros_like(age), (age - 1) / older) * moved
        w, age = after, older
        if i % LOOKS == 0 and float((moved.abs().amax(0) / w.abs().amax(0).clamp(min=1e-12)).max()) < TOLERANCE:
            break
    return w.t()


def largest_square(x: Tensor) -> Tensor:
    """A little more than the largest eigenvalue of x^T x."""
    v = torch.ones(x.size(1), 1, dtype=x.dtype, device=x.device)
    for _ in range(POWERS):
        v = x.t() @ (x @ (v / v.norm()))
    return 1.05 * v.norm()
