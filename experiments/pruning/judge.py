"""What sentence embeddings are worth: accuracy of logistic regression on top of them, on labelled sets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blocksparse.models.sentiment import Split, cross_validation, fixed_split

STRENGTHS = (1.0, 4.0, 16.0, 64.0, 256.0)  # C, of which the development part chooses
ITERATIONS, TOLERANCE = 30, 1e-8


def accuracy(x: Tensor, y: Tensor, sizes: Sequence[int]) -> float:
    """Percent of the test texts that are classified well.

    With more than two classes each has a classifier against the rest, and the surest one decides.

    Args:
        x: embeddings [texts, features].
        y: labels [texts], from 0.
        sizes: texts for training, development and test, in this order; without a test part ten folds are tested.
    """
    train, dev, test = sizes
    splits = fixed_split(train, dev, test) if test else cross_validation(y.cpu().numpy())
    x = torch.cat([x.double(), x.new_ones(len(x), 1, dtype=torch.float64)], 1)
    classes = int(y.max()) + 1
    wanted = [(y == k).double() for k in ([1] if classes == 2 else range(classes))]
    right = sum(_right(x, y, wanted, split) for split in splits)
    return 100 * float(right) / sum(len(split.test) for split in splits)


def _right(x: Tensor, y: Tensor, wanted: list[Tensor], split: Split) -> Tensor:
    rows = {name: torch.from_numpy(getattr(split, name)).to(x.device) for name in ("train", "dev", "test")}
    best, chosen = -1.0, None
    for strength in STRENGTHS:
        w = torch.stack([logistic(x[rows["train"]], labels[rows["train"]], strength) for labels in wanted], 1)
        score = float((_classes(x[rows["dev"]] @ w) == y[rows["dev"]]).double().mean())
        if score > best:  # of equals the one with the smallest weights
            best, chosen = score, w
    assert chosen is not None
    return (_classes(x[rows["test"]] @ chosen) == y[rows["test"]]).sum()


def _classes(logits: Tensor) -> Tensor:
    return logits.argmax(1) if logits.size(1) > 1 else (logits[:, 0] > 0).long()


def logistic(x: Tensor, y: Tensor, strength: float) -> Tensor:
    """Weights of the least |w|^2 / 2 + C sum log(1 + exp(-(2 y - 1) x w)), by Newton's method; the last is a bias.

    Args:
        x: [texts, features + 1] in float64, the last column of ones. The bias is not penalised.
        y: [texts] of zeros and ones.
        strength: C.

    Raises:
        RuntimeError: it has not converged.
    """
    w = x.new_zeros(x.size(1))
    ridge = torch.full_like(w, 1 / strength)
    ridge[-1] = 1e-9
    value = _value(x, y, w, ridge)
    for _ in range(ITERATIONS):
        p = torch.sigmoid(x @ w)
        gradient = x.t() @ (p - y) + ridge * w
        hessian = (x * (p * (1 - p)).unsqueeze(1)).t() @ x + torch.diag(ridge)
        step = torch.cholesky_solve(gradient.unsqueeze(1), torch.linalg.cholesky(hessian)).squeeze(1)
        decrement = gradient @ step
        if float(decrement) < TOLERANCE * len(y):
            return w - step
        size = 1.0
        while size > 1e-4 and float(_value(x, y, w - size * step, ridge)) > float(value - 1e-4 * size * decrement):
            size /= 2
        w = w - size * step
        value = _value(x, y, w, ridge)
    raise RuntimeError(f"logistic regression has not converged in {ITERATIONS} steps (C = {strength:g})")


def _value(x: Tensor, y: Tensor, w: Tensor, ridge: Tensor) -> Tensor:
    logits = x @ w
    return (torch.nn.functional.softplus(logits) - y * logits).sum() + 0.5 * (ridge * w.square()).sum()
