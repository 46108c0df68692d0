"""The sentence-embedding model, the texts that it is trained and judged by, and the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judge import accuracy
from packing import read_arrays
from torch import Tensor, nn

LENGTHS = (8, 16, 32, 64)  # tokens of a sentence in training, all of a batch alike: no padding
HELD_OUT = 2048  # texts for the cosine, and for halves that find each other


class Embedder(nn.Module):
    """BERT, the mean of its states over tokens, of length 1: token ids [n, tokens] -> embeddings [n, 384]."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert, self.pool = bert, Pool()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` is 0 where a sentence has ended; None: they are all as long."""
        states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        embeddings: Tensor = self.pool(states, mask)
        return embeddings


class Pool(nn.Module):
    """That mean."""

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """States [n, tokens, 384] -> [n, 384]."""
        mean = states.mean(1) if mask is None else (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=-1)


def apart(starts: Any, count: int, distance: int) -> Any:
    """The last ones that are so far from each other, in rising order."""
    chosen: list[int] = []
    for start in reversed(starts.tolist()):
        if len(chosen) < count and (not chosen or start <= chosen[-1] - distance):
            chosen.append(start)
    return np.array(chosen[::-1])


class Words(nn.Module):
    """The mean of the table's rows, without any layer: what is to be had without an encoder."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.table, self.pool = bert.embeddings.word_embeddings, Pool()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """As `Embedder`."""
        embeddings: Tensor = self.pool(self.table(ids), mask)
        return embeddings


class Packed:
    """What pack.py has written."""

    def __init__(self, folder: Path, device: str) -> None:
        self.about = json.loads((folder / "about.json").read_text())
        self.arrays = read_arrays(folder / "arrays.npz.xz")
        self.device = device
        self.stream = torch.from_numpy(self.arrays["stream"].astype(np.int64)).to(device)
        starts = self.arrays["starts"].astype(np.int64)
        held_out = apart(starts, HELD_OUT, 2 * max(LENGTHS))
        self.held_out = torch.from_numpy(held_out).to(device)
        self.starts = torch.from_numpy(starts[starts + max(LENGTHS) < held_out[0]]).to(device)

    def model(self) -> Embedder:
        """The pretrained one, in eval mode, for it has dropout."""
        from transformers import BertConfig, BertModel

        bert = BertModel(BertConfig(**self.about["config"]), add_pooling_layer=False)
        prefix = "bert."
        weights = {n.removeprefix(prefix): torch.from_numpy(a) for n, a in self.arrays.items() if n.startswith(prefix)}
        missing, unexpected = bert.load_state_dict(weights, strict=False)
        if missing or unexpected:
            raise ValueError(f"the packed weights do not fit: {', '.join([*missing, *unexpected])}")
        return Embedder(bert).eval().to(self.device)

    def sentences(self, starts: Tensor, length: int) -> Tensor:
        """Token ids [n, length]."""
        words = self.stream[starts.unsqueeze(1) + torch.arange(length - 2, device=self.device)]
        begin, end = (torch.full_like(words[:, :1], self.about[name]) for name in ("begin", "end"))
        return torch.cat([begin, words, end], 1)

    def batch(self, step: int, tokens: int, seed: int, swapped: float = 0.0) -> Tensor:
        """The batch of a step; which one depends on step and seed alone.

        In every other sentence the share `swapped` of the tokens is replaced by ones of the whole vocabulary.
        """
        random = np.random.default_rng((seed, step))
        length = LENGTHS[int(random.integers(len(LENGTHS)))]
        rows = torch.from_numpy(random.integers(len(self.starts), size=tokens // length)).to(self.device)
        ids = self.sentences(self.starts[rows], length)
        if swapped:
            others = random.integers(self.about["vocabulary"], size=(len(ids), length))
            chosen = random.random((len(ids), length)) < swapped
            chosen[::2] = chosen[:, 0] = chosen[:, -1] = False
            ids = torch.where(torch.from_numpy(chosen).to(ids.device), torch.from_numpy(others).to(ids.device), ids)
        return ids

    def labelled(self) -> Iterator[tuple[str, list[Tensor], Tensor, list[int]]]:
        """(name, token ids of each text, labels, sizes of the parts) of each set."""
        for name, sizes in self.about["sets"].items():
            ids = torch.from_numpy(self.arrays[f"{name}.ids"].astype(np.int64)).to(self.device)
            labels = torch.from_numpy(self.arrays[f"{name}.labels"].astype(np.int64)).to(self.device)
            yield name, list(torch.split(ids, self.arrays[f"{name}.lengths"].tolist())), labels, sizes


@torch.inference_mode()
def embed(model: nn.Module, texts: list[Tensor], rows: int = 512) -> Tensor:
    """Embeddings [texts, 384] in float32."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    result = torch.empty(len(texts), 384, device=texts[0].device)
    for begin in range(0, len(order), rows):
        places = order[begin : begin + rows]
        ids = nn.utils.rnn.pad_sequence([texts[i] for i in places], batch_first=True)
        lengths = torch.tensor([len(texts[i]) for i in places], device=ids.device)
        mask = (torch.arange(ids.size(1), device=ids.device) < lengths.unsqueeze(1)).long()
        result[torch.tensor(places, device=ids.device)] = model(ids, mask)
    return result


def similarities(embeddings: Tensor) -> Tensor:
    """Logits [n, n] of which other sentence of a batch is nearest: cosines, and -1e3 for a sentence itself."""
    cosines = embeddings.float() @ embeddings.float().t()
    return cosines - 1e3 * torch.eye(len(cosines), device=cosines.device)


class Judge:
    """Six sets and held-out sentences, and what the dense model makes of them."""

    def __init__(self, packed: Packed, dense: nn.Module, limit: int | None) -> None:
        self.sets = {}
        for name, texts, labels, sizes in packed.labelled():
            rows = torch.arange(len(texts), device=labels.device)
            if limit is not None and sizes[2] == 0:  # a first look: some rows of the sets without fixed parts
                rows = torch.from_numpy(np.sort(np.random.default_rng(0).permutation(len(texts))[:limit]))
            self.sets[name] = ([texts[i] for i in rows.tolist()], labels[rows.to(labels.device)], sizes)
        self.held_out, self.next = (list(packed.sentences(packed.held_out + shift, 32)) for shift in (0, 30))
        self.dense = embed(dense, self.held_out)

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Accuracies in percent, their mean, the mean cosine to the dense embeddings, and what share of texts is found.

        A text of 60 tokens is found if of all second halves its own is the nearest to its first half.
        """
        sets = {name: round(accuracy(embed(model, t), y, sizes), 3) for name, (t, y, sizes) in self.sets.items()}
        made, following = embed(model, self.held_out), embed(model, self.next)
        cosine = float((made * self.dense).sum(1).mean())
        nearest = (made @ following.t()).argmax(1)
        found = float((nearest == torch.arange(len(made), device=made.device)).float().mean())
        numbers = {
            "mean": round(sum(sets.values()) / len(sets), 3),
            "cosine": round(cosine, 5),
            "found": round(found, 5),
        }
        return {**numbers, "sets": sets}
