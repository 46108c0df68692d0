"""How good embeddings are, and how long they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .model import TOKENS, Batch, embed

ROWS = 32  # sentences of a timed batch, of TOKENS tokens each
WORDS = 12  # a paragraph of fewer is not cut in halves

Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Quality:
    """What a model's embeddings are worth.

    Attributes:
        cosine: to the dense model's embeddings of the same paragraphs, a mean.
        found: share of the halves of paragraphs whose nearest other half is their own.
    """

    cosine: float
    found: float

    def as_dict(self) -> dict[str, float]:
        """For a file."""
        return asdict(self)


@dataclass
class Test:
    """What embeddings are judged by: paragraphs, and halves of paragraphs.

    Attributes:
        texts: the paragraphs.
        ids: their tokens.
        first: tokens of the first halves.
        second: tokens of the second halves.
        dense: the dense model's embeddings of the paragraphs; None before they are there.
    """

    texts: list[str]
    ids: Ids
    first: Ids
    second: Ids
    dense: Tensor | None = None

    @classmethod
    def of(cls, texts: list[str], tokenize: Any) -> Test:
        """The test on these paragraphs."""
        long = [text.split() for text in texts if len(text.split()) >= WORDS]
        halves = [(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in long]
        return cls(texts, tokenize(texts), tokenize([one for one, _ in halves]), tokenize([two for _, two in halves]))

    def quality(self, model: nn.Module) -> Quality:
        """Of a model; its embeddings are the dense ones if it is the first."""
        made = embed(model, self.ids)
        if self.dense is None:
            self.dense = made
        nearest = (embed(model, self.first) @ embed(model, self.second).t()).argmax(1)
        found = (nearest == torch.arange(len(nearest))).float().mean()
        return Quality(float((made * self.dense).sum(1).mean()), float(found))

    def neighbours(self, model: nn.Module, queries: Sequence[int]) -> list[str]:
        """The nearest other paragraph of each of these."""
        made = embed(model, self.ids)
        near = made[list(queries)] @ made.t()
        near[torch.arange(len(queries)), torch.tensor(queries)] = -1
        return [self.texts[i] for i in near.argmax(1).tolist()]


def example(ids: Ids) -> Batch:
    """A batch of ROWS sentences of exactly TOKENS tokens, put together from real ones."""
    flat = [token for sentence in ids for token in sentence[1:-1]]
    width = TOKENS - 2
    starts = [i * width % max(1, len(flat) - width) for i in range(ROWS)]
    begin, end = ids[0][0], ids[0][-1]
    rows = [[begin, *flat[start : start + width], end] for start in starts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.long)}


@torch.inference_mode()
def sentences_per_second(models: Mapping[str, nn.Module], batch: Batch, samples: int) -> dict[str, float]:
    """Of each model: the median of samples that are taken in turn, so that a noisy moment hits all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model(**batch)
    for _ in range(samples):
        for name, model in models.items():
            start = time.perf_counter()
            model(**batch)
            taken[name].append(time.perf_counter() - start)
    return {name: len(batch["input_ids"]) / statistics.median(seconds) for name, seconds in taken.items()}
