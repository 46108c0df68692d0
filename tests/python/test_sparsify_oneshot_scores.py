"""Scores and refit of one-shot methods, against their formulas."""

import pytest
import torch

from blocksparse.torch.sparsify.one_shot.scores import damped, obs_scores, refit, wanda_scores

pytestmark = pytest.mark.usefixtures("one_thread")


def some_gram(n, tokens=300, seed=0):
    """Of correlated inputs, undamped."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, n, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(n, n, generator=generator, dtype=torch.float64)
    return x, x.t() @ x


def loss(w, other, h):
    d = w.double() - other.double()
    return float((d @ h * d).sum())


# ---- Scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [8, (8, 24), (4, 5)])
@pytest.mark.parametrize("shape", [(16, 48), (19, 53), (8, 8)])
def test_scores_equal_their_formulas(shape, edges):
    w = torch.randn(shape, dtype=torch.float64)
    x, gram = some_gram(shape[1])
    h = damped(gram)
    wanda = wanda_scores(w, x.norm(dim=0), edges)
    obs = obs_scores(w, h, edges)
    rows, columns = edges if isinstance(edges, tuple) else (edges, edges)
    inverse = torch.linalg.inv(h)
    assert wanda.shape == obs.shape == (-(-shape[0] // rows), -(-shape[1] // columns))
    for i in range(wanda.size(0)):
        for j in range(wanda.size(1)):
            q = slice(j * columns, (j + 1) * columns)
            block = w[i * rows : (i + 1) * rows, q]
            expected = (block.abs() * x.norm(dim=0)[q]).square().sum()
            torch.testing.assert_close(wanda[i, j], expected, rtol=1e-10, atol=0)
            expected = (block @ torch.linalg.inv(inverse[q, q]) @ block.t()).trace()
            torch.testing.assert_close(obs[i, j], expected, rtol=1e-8, atol=0)


def test_an_obs_score_is_the_loss_of_dropping_that_block_alone_and_refitting():
    w = torch.randn(16, 40, dtype=torch.float64)
    h = damped(some_gram(40)[1])
    scores = obs_scores(w, h, 8)
    for place in ((0, 0), (1, 3)):
        mask = torch.ones(2, 5, dtype=torch.bool)
        mask[place] = False
        made = refit(w, h, mask, 8)
        torch.testing.assert_close(loss(w, made, h), float(scores[place]), rtol=1e-7, atol=0)


# ---- Refit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(4))
def test_a_refit_never_raises_the_loss(dtype, seed):
    torch.manual_seed(seed)
    out, in_, b = 37, 61, 8
    w = torch.randn(out, in_).to(dtype)
    h = damped(some_gram(in_, tokens=[10, 100, 1000, 50][seed], seed=seed)[1])
    for density in (0.0, 0.1, 0.5, 0.9, 1.0):
        mask = torch.rand(5, 8) < density
        kept = mask.repeat_interleave(b, 0)[:out].repeat_interleave(b, 1)[:, :in_]
        plain, made = w * kept, refit(w, h, mask, b)
        assert made.dtype == dtype
        assert not made[~kept].any()
        for i in range(0, out, b):  # for each row of blocks
            rows = slice(i, i + b)
            assert loss(w[rows], made[rows], h) <= loss(w[rows], plain[rows], h)
        if density == 1.0:
            torch.testing.assert_close(made, w)
    assert loss(w, made, h) <= loss(w, plain, h)


def test_a_refit_is_the_least_squares_solution():
    x, gram = some_gram(32)
    w, h = torch.randn(8, 32, dtype=torch.float64), gram + 1e-9 * torch.eye(32, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, False]])
    kept = mask.repeat_interleave(8, 1)[0]
    made = refit(w, h, mask, 8)
    expected = torch.linalg.lstsq(x[:, kept], x @ w.t()).solution.t()
    torch.testing.assert_close(made[:, kept], expected, rtol=1e-5, atol=1e-6)


def test_wrong_calls_of_the_functions():
    w, h = torch.randn(16, 32), torch.eye(32)
    mask = torch.ones(2, 4, dtype=torch.bool)
    for call, text in (
        (lambda: wanda_scores(w, torch.ones(31), 8), r"input_norms are \[31\], needs \[32\]"),
        (lambda: obs_scores(w, torch.eye(31), 8), r"is \[31, 31\], needs \[32, 32\]"),
        (lambda: obs_scores(w, -h, 8), "not positive definite"),
        (lambda: refit(w, torch.full((32, 32), float("nan")), mask, 8), "not positive definite"),
        (lambda: refit(w, h, mask.t(), 8), r"mask is torch.bool \[4, 2\], needs torch.bool \[2, 4\]"),
        (lambda: refit(w, h, mask.float(), 8), "mask is torch.float32"),
        (lambda: refit(w, h, mask, 0), "block_size is 0"),
        (lambda: refit(w.long(), h, mask, 8), "needs real numbers"),
        (lambda: damped(torch.ones(2, 3)), r"\[2, 3\], needs \[in, in\]"),
        (lambda: damped(h, 0.0), "share is 0.0"),
        (lambda: damped(h * float("inf")), "NaN or Inf"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert torch.equal(damped(torch.zeros(3, 3)), torch.eye(3, dtype=torch.float64))
