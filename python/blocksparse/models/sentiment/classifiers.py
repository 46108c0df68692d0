"""Linear classifiers on what a language model knows of a text, and on bags of n-grams to compare with."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import AnyPath, write_whole

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
UNITS_AT_ONCE = 256  # by best_unit, whose memory grows with it
STRENGTHS = tuple(2.0**e for e in range(-8, 1))  # C: the smaller, the sparser


@dataclass(frozen=True)
class Split:
    """Rows of a training, of a development and of a test part; of a fold, if there are several."""

    train: Array
    dev: Array
    test: Array


def fixed_split(train: int, dev: int, test: int, *, seed: int = 0) -> list[Split]:
    """One split of rows that lie in this order. Without a development part a tenth of the training part is it."""
    rows = np.random.default_rng(seed).permutation(train)
    cut = 0 if dev > 0 else max(1, train // 10)
    of_dev = np.arange(train, train + dev) if dev > 0 else np.sort(rows[:cut])
    return [Split(np.sort(rows[cut:]), of_dev, np.arange(train + dev, train + dev + test))]


def cross_validation(labels: Array, folds: int = 10, *, seed: int = 0) -> list[Split]:
    """Folds with equal shares of both labels; a tenth of each fold's training rows is its development part."""
    rng = np.random.default_rng(seed)
    fold_of = np.empty(labels.size, np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        fold_of[rows] = np.arange(rows.size) % folds
    made = []
    for fold in range(folds):
        rest = rng.permutation(np.flatnonzero(fold_of != fold))
        cut = max(1, rest.size // 10)
        made.append(Split(np.sort(rest[cut:]), np.sort(rest[:cut]), np.flatnonzero(fold_of == fold)))
    return made


@dataclass(frozen=True)
class Score:
    """Accuracy in percent over all test rows, C and weights that are not zero as means over the folds.

    `right` says it of each test row, one fold behind the other.
    """

    accuracy: float
    strength: float
    weights: float
    folds: int
    right: Array


def _score(right: Sequence[Array], strengths: Sequence[float], weights: Sequence[int]) -> Score:
    """Of what each fold got right, and with what."""
    rows = np.concatenate(right)
    return Score(100 * float(rows.mean()), float(np.mean(strengths)), float(np.mean(weights)), len(right), rows)


def mcnemar(one: Array, other: Array) -> tuple[int, int, float]:
    """(rows that only the one gets right, those that only the other does, how likely so uneven a division is).

    The exact two-sided test: either is as likely where two classifiers are equally good.

    Source: McNemar, Psychometrika 12:153 (1947), doi:10.1007/BF02295996.
    """
    if one.shape != other.shape:
        raise ValueError(f"[lm] {one.size} rows beside {other.size}, needs the same rows")
    from scipy.stats import binomtest

    only, only_other = int((one & ~other).sum()), int((other & ~one).sum())
    if only + only_other == 0:
        return 0, 0, 1.0
    return only, only_other, float(binomtest(only, only + only_other).pvalue)


def classify(
    x: Any, y: Array, splits: Sequence[Split], *, l1: bool = True, note: Callable[[], None] = lambda: None
) -> Score:
    """Logistic regression on the training part, with the C that the development part prefers.

    Args:
        x: features [texts, features], dense or a SciPy matrix of rows.
        y: labels [texts], 0 and 1.
        splits: one, or a fold each.
        l1: penalty of the absolute weights, else of their squares.
        note: is called when a fold is done.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        ValueError: a training part has one label only.
    """
    right, strengths, weights = [], [], []
    for split in splits:
        if np.unique(y[split.train]).size < 2:
            raise ValueError(f"[lm] {split.train.size} training rows have one label, needs both")
        models = {c: _fit(x[split.train], y[split.train], c, l1) for c in STRENGTHS}
        scores = {c: model.score(x[split.dev], y[split.dev]) for c, model in models.items()}
        best = max(STRENGTHS, key=lambda c: (scores[c], -c))  # of equals the sparsest
        model = models[best]
        right.append(model.predict(x[split.test]) == y[split.test])
        strengths.append(best)
        weights.append(int(np.count_nonzero(model.coef_)))
        note()
    return _score(right, strengths, weights)


def classify_at_once(x: Array, y: Array, splits: Sequence[Split], device: str) -> Score:
    """`classify` with L1, all folds and strengths at once: seconds on a card, for dense features of any width."""
    import torch

    from .l1_logistic import fit

    features, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    chosen = torch.zeros(len(splits), len(STRENGTHS), y.size, dtype=torch.bool, device=device)
    for k, split in enumerate(splits):
        if np.unique(y[split.train]).size < 2:
            raise ValueError(f"[lm] {split.train.size} training rows have one label, needs both")
        chosen[k][:, torch.from_numpy(split.train).to(device)] = True
    strengths = torch.tensor(STRENGTHS, device=device).repeat(len(splits))
    weights = fit(features, labels, chosen.flatten(0, 1), strengths)
    ones = features.new_ones(features.size(0), 1)
    answers = (torch.cat([features, ones], 1) @ weights.t() > 0).cpu().numpy().reshape(y.size, len(splits), -1)
    used = weights[:, :-1].ne(0).sum(1).cpu().numpy().reshape(len(splits), -1)
    right, strength_of, weight_counts = [], [], []
    for k, split in enumerate(splits):
        best = int((answers[split.dev, k] == y[split.dev, None]).mean(0).argmax())  # of equals the sparsest
        right.append(answers[split.test, k, best] == y[split.test])
        strength_of.append(STRENGTHS[best])
        weight_counts.append(int(used[k, best]))
    return _score(right, strength_of, weight_counts)


def _fit(x: Any, y: Array, c: float, l1: bool) -> Any:
    try:
        import sklearn
        from sklearn.linear_model import LogisticRegression
    except ModuleNotFoundError:
        raise ModuleNotFoundError("classifiers need scikit-learn: pip install blocksparse[text]") from None
    new = tuple(int(part) for part in sklearn.__version__.split(".")[:2]) >= (1, 8)
    penalty: dict[str, Any] = {"l1_ratio": 1.0 if l1 else 0.0} if new else {"penalty": "l1" if l1 else "l2"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large C may not converge; the development part judges
        return LogisticRegression(C=c, solver="liblinear", random_state=0, **penalty).fit(x, y)


def bag_of_ngrams(texts: Sequence[bytes], most: int = 2) -> Any:
    """Which words and sequences of up to `most` words are in each text: a SciPy matrix of 0 and 1.

    The vocabulary is that of all texts; what the training part does not have gets no weight.
    """
    try:
        from sklearn.feature_extraction.text import CountVectorizer
    except ModuleNotFoundError:
        raise ModuleNotFoundError("classifiers need scikit-learn: pip install blocksparse[text]") from None
    words = r"(?u)\b\w[\w']*\b|[!?]"
    counter = CountVectorizer(ngram_range=(1, most), binary=True, token_pattern=words, dtype=np.float64)
    return counter.fit_transform([text.decode("utf-8", "replace") for text in texts]).tocsr()


# ---- One unit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A unit that tells the labels apart by itself: 1 where its value is above the threshold, if `sign` is 1."""

    index: int
    threshold: float
    sign: int

    def accuracy(self, x: Array, y: Array) -> float:
        """In percent, of texts with these features [texts, features]."""
        return self.accuracy_of(x[:, self.index], y)

    def accuracy_of(self, values: Array, y: Array) -> float:
        """In percent, of texts with these values of the unit [texts]."""
        above = (values > self.threshold) == (self.sign > 0)
        return 100 * float((above == (y == 1)).mean())


def best_unit(x: Any, y: Array, device: str = "cpu") -> Unit:
    """The unit and the threshold with the most right answers on these rows; a device of PyTorch sorts them.

    Args:
        x: features [texts, features], an array or a tensor.
        y: labels [texts], 0 and 1.
        device: of PyTorch.
    """
    import torch

    features = torch.as_tensor(x).to(device)
    labels = torch.from_numpy(np.ascontiguousarray(y, np.int32)).to(device)
    best, most = Unit(0, 0.0, 1), -1
    for first in range(0, features.size(1), UNITS_AT_ONCE):
        unit, right = _best_of(features[:, first : first + UNITS_AT_ONCE], labels)
        if right > most:
            best, most = Unit(first + unit.index, unit.threshold, unit.sign), right
    return best


def _best_of(x: Tensor, labels: Tensor) -> tuple[Unit, int]:
    """(the best unit, how many rows it gets right)."""
    import torch

    count = labels.numel()
    values, order = x.t().contiguous().sort(dim=1, stable=True)  # [units, texts]
    below = labels[order].cumsum(1, dtype=torch.int32)  # ones among the k + 1 lowest
    ranks = torch.arange(1, count + 1, dtype=torch.int32, device=x.device)
    right = ranks - below + (labels.sum(dtype=torch.int32) - below)  # zeros below the cut and ones above it
    either = torch.maximum(right, count - right)
    either[:, :-1].masked_fill_(values[:, 1:] == values[:, :-1], -1)  # equal values cannot be told apart
    of_units, cuts = either.max(1)
    unit = int(of_units.argmax())
    cut = int(cuts[unit])
    upper = values[unit, min(cut + 1, count - 1)]
    threshold = float(values[unit, cut] / 2 + upper / 2)
    return Unit(unit, threshold, 1 if int(right[unit, cut]) * 2 >= count else -1), int(of_units[unit])


def unit_score(x: Array, y: Array, splits: Sequence[Split], device: str = "cpu") -> float:
    """Percent of all test rows that the best unit of each fold's other rows gets right."""
    import torch

    features, right = torch.as_tensor(x).to(device), 0.0  # once: 18,432 features of 50,000 texts are 3.7 GB
    for split in splits:
        rows = np.concatenate([split.train, split.dev])
        unit = best_unit(features[torch.from_numpy(rows).to(device)], y[rows], device)
        right += unit.accuracy_of(x[split.test, unit.index], y[split.test]) * split.test.size
    return right / sum(split.test.size for split in splits)


def plot_unit(values: Array, y: Array, unit: Unit, title: str, path: AnyPath) -> None:
    """Histogram of a unit's values, by label, as PNG."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install blocksparse[text]") from None
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    low, high = (float(v) for v in np.quantile(values, [0.002, 0.998]))
    bins = np.linspace(low, max(high, low + 1e-6), 60)
    for label, color, name in ((0, "tab:red", "negative (0)"), (1, "tab:blue", "positive (1)")):
        axes.hist(np.clip(values[y == label], bins[0], bins[-1]), bins.tolist(), alpha=0.55, color=color, label=name)
    axes.axvline(unit.threshold, color="black", linewidth=1, linestyle="--", label="threshold")
    axes.set(xlabel=f"cell of unit {unit.index} behind the last byte", ylabel="texts")
    axes.set_title(title, wrap=True)  # names of models are long
    axes.legend(frameon=False)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=140))


def colour_text(texts: Sequence[bytes], values: Sequence[Array], unit: Unit, title: str, path: AnyPath) -> None:
    """Some texts, each byte in the colour of a unit's value: blue is what it says of label 1.

    Args:
        texts: as `prepare` makes them.
        values: of the unit behind each byte, as `unit_at_each_byte` gives them.
        unit: whose threshold is without colour.
        title: of the page.
        path: an HTML page, or, if it ends with .png, a picture, which needs matplotlib.
    """
    scale = max((float(np.abs(v - unit.threshold).max()) for v in values), default=1.0) or 1.0
    coloured = [
        _characters(text, unit.sign * (value - unit.threshold) / scale)
        for text, value in zip(texts, values, strict=True)
    ]
    if Path(path).suffix.lower() == ".png":
        _draw_characters(coloured, title, path)
        return
    paragraphs = []
    for characters in coloured:
        spans = []
        for character, strength in characters:
            color = "37,99,235" if strength > 0 else "220,38,38"
            spans.append(f'<span style="background:rgba({color},{abs(strength):.2f})">{html.escape(character)}</span>')
        paragraphs.append(f"<p>{''.join(spans)}</p>")
    page = (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font:16px/1.6 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}</style>"
        f"<h1>{html.escape(title)}</h1><p>Cell of unit {unit.index} behind each byte: blue is positive, red negative."
        f"</p>{''.join(paragraphs)}\n"
    )
    write_whole(path, page.encode())


def _draw_characters(texts: list[list[tuple[str, float]]], title: str, path: AnyPath, columns: int = 92) -> None:
    """As PNG, in lines of so many characters at most."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install blocksparse[text]") from None
    lines: list[list[tuple[str, float]]] = []
    for text in texts:
        rest = [(c, v) for c, v in text if c != "\n"]
        while rest:
            spaces = [i + 1 for i, (c, _) in enumerate(rest[:columns]) if c == " "]
            end = len(rest) if len(rest) <= columns else spaces[-1] if spaces else columns
            lines.append(rest[:end])
            rest = rest[end:]
        lines.append([])
    figure = Figure(figsize=(0.095 * columns, 0.19 * len(lines) + 0.5), layout="constrained")
    axes = figure.add_subplot(xlim=(0, columns), ylim=(len(lines), 0))
    axes.set_axis_off()
    axes.set_title(f"{title}: blue is positive, red negative", fontsize=10, parse_math=False)
    for row, line in enumerate(lines):
        for column, (character, strength) in enumerate(line):
            color = "#2563eb" if strength > 0 else "#dc2626"
            axes.add_patch(Rectangle((column, row), 1, 1, color=color, alpha=abs(strength), linewidth=0))
            where: dict[str, Any] = {"family": "monospace", "ha": "center", "va": "center", "fontsize": 9}
            axes.text(column + 0.5, row + 0.5, character, parse_math=False, **where)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=140))


def _characters(text: bytes, values: Array) -> list[tuple[str, float]]:
    """Whole characters, with the value behind the last of their bytes."""
    made = []
    begin = 0
    for end in range(1, len(text) + 1):
        if end == len(text) or text[end] & 0xC0 != 0x80:
            made.append((text[begin:end].decode("utf-8", "replace"), float(values[end - 1])))
            begin = end
    return made
