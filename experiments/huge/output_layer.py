"""Does a block-sparse output layer pay? A language model of words, whose output layer is most of it.

    python experiments/huge/output_layer.py --data imdb.txt --output out/output_layer.jsonl              # in miniature
    python experiments/huge/output_layer.py --data imdb.txt --output out/output_layer.jsonl --device cuda --minutes 5

Words are those of the text, with upper and lower case, by frequency. An LSTM reads them; its state h goes into

    dense      W h, a row for each word: softmax over all words
    adaptive   torch.nn.AdaptiveLogSoftmaxWithLoss: rare words are clusters with narrower projections of h
    sparse     W h for the `--frequent` most frequent words; rare ones have a block-sparse W of 10 % (or 5, 20 %), with
               as many blocks in each row: 32 neighbours in frequency read the same features of h
    low-rank   likewise, but rare words have W = U V with as many weights as the block-sparse W of 10 %

`dense`, `sparse` and `low-rank` are one softmax over all words. The most telling arms come first.
`experiments/imdb_text.py` makes the text.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import Arm, Line, Options, autocast, curve_of, on_card, options_of, run_all
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import blocksparse.torch as bst
from blocksparse import graphs
from blocksparse.program import finish

SIZES = {
    "updates": (400, 700, "updates of an arm"),
    "streams": (8, 64, "parts of the text that are read side by side"),
    "length": (16, 64, "words of a stream in an update"),
    "width": (160, 1024, "features of h"),
    "embedding": (32, 256, "features of a word that is read"),
    "words": (4096, 131072, "most words; others are one, the unknown word"),
    "frequent": (512, 8192, "words whose weights are dense"),
    "block": (8, 32, "edge of a block"),
    "held_words": (4096, 1 << 17, "words at the end of the text that are tested"),
}
RATE, WARM_UP, CLIP = 2e-3, 50, 1.0
WORD = re.compile(rb"[A-Za-z0-9]+(?:'[a-z]+)?|[^\sA-Za-z0-9]")


def arms(options: Options) -> list[Arm]:
    """The most telling ones first."""
    first, *more = options.seeds

    def arm(kind: str, seed: int, density: float = 0.1, rate: float = 1) -> Arm:
        name = f"sparse-{density:.0%}" if kind == "sparse" else kind
        settings = {"arm": name, "kind": kind, "density": density, "seed": seed, "rate": RATE * rate}
        return Arm(settings, {"dense": 2, "adaptive": 1}.get(kind, 1.5))

    kinds = ("dense", "sparse", "adaptive", "low-rank")
    made = [arm(kind, first) for kind in kinds] + [arm("sparse", first, 0.2)]
    made += [arm(kind, seed) for seed in more for kind in kinds] + [arm("sparse", first, 0.05)]
    return made + [arm(kind, first, rate=2) for kind in kinds]


class Text:
    """Words of a file as numbers, the most frequent first; 0 is the unknown word. Words of the test do not count."""

    def __init__(self, path: Path, options: Options) -> None:
        words = WORD.findall(path.read_bytes())
        if len(words) < 3 * options.held_words:
            raise ValueError(f"{path} holds {len(words)} words, needs {3 * options.held_words} or more")
        counts = Counter(words[: -options.held_words])
        known = [word for word, _ in counts.most_common(options.words - 1)]
        self.size = -(-(len(known) + 1) // options.block) * options.block  # the last rows may stand for no word
        if self.size <= options.frequent:
            raise ValueError(
                f"{path} has {len(counts)} different words, needs more than the {options.frequent} frequent"
            )
        numbers = {word: i for i, word in enumerate(known, 1)}
        ids = torch.from_numpy(np.fromiter((numbers.get(word, 0) for word in words), np.int32, len(words)))
        self.counts = torch.bincount(ids[: -options.held_words].long(), minlength=self.size)
        self.train, self.test = (part.to(options.device) for part in torch.split(ids, len(ids) - options.held_words))


class Whole(nn.Module):
    """One softmax over frequent words, whose weights are dense, and rare ones."""

    def __init__(self, frequent: nn.Module, rare: nn.Module | None, first_rare: int) -> None:
        super().__init__()
        self.frequent, self.rare, self.first_rare = frequent, rare, first_rare

    def forward(self, h: Tensor, words: Tensor) -> Tensor:
        """Nats of each word [n], from h [n, width]."""
        logits = self.frequent(h).float()
        if self.rare is None:
            return functional.cross_entropy(logits, words, reduction="none")
        # Logits of both are not put side by side, which would copy a gigabyte.
        others, is_rare = self.rare(h).float(), words >= self.first_rare
        whole = torch.logaddexp(logits.logsumexp(1), others.logsumexp(1))
        mine = logits.gather(1, words.clamp(max=self.first_rare - 1).unsqueeze(1)).squeeze(1)
        rare = others.gather(1, (words - self.first_rare).clamp(min=0).unsqueeze(1)).squeeze(1)
        return whole - torch.where(is_rare, rare, mine)


class Adaptive(nn.Module):
    """PyTorch's adaptive softmax."""

    def __init__(self, width: int, words: int, first_rare: int) -> None:
        super().__init__()
        cutoffs = [first_rare // 4, first_rare, min(4 * first_rare, (first_rare + words) // 2)]
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(width, words, cutoffs, div_value=4.0)

    def forward(self, h: Tensor, words: Tensor) -> Tensor:
        """Nats of each word [n], from h [n, width]."""
        nats: Tensor = -self.softmax(h.float(), words).output  # which mixes types under autocast
        return nats


def head(kind: str, density: float, text: Text, options: Options, seed: int) -> nn.Module:
    """The output layer of an arm; biases begin with how frequent words are, where there are any."""
    words, width, b, frequent = text.size, options.width, options.block, options.frequent
    if kind == "adaptive":
        return Adaptive(width, words, frequent)
    bias, rare = (text.counts + 1).float().log() - (text.counts + 1).sum().log(), words - frequent
    if kind == "dense":
        return Whole(with_bias(nn.Linear(width, words), bias), None, words)
    degree = degree_of(density, options)
    layer: nn.Module
    if kind == "low-rank":
        rank = round(degree * b * rare / (rare + width))
        layer = nn.Sequential(nn.Linear(width, rank, bias=False), with_bias(nn.Linear(rank, rare), bias[frequent:]))
    else:
        layout = graphs.balanced_random(rare // b, width // b, degree=degree, block_size=b, seed=seed)
        layer = with_bias(bst.BlockSparseLinear(width, rare, layout), bias[frequent:])
    return Whole(with_bias(nn.Linear(width, frequent), bias[:frequent]), layer, frequent)


def degree_of(density: float, options: Options) -> int:
    """Blocks in a row of rare words."""
    degree: int = max(1, round(density * options.width / options.block))
    return degree


def with_bias(layer: Any, bias: Tensor) -> nn.Module:
    """The layer, whose bias begins so."""
    with torch.no_grad():
        layer.bias.copy_(bias)
    made: nn.Module = layer
    return made


class WordLM(nn.Module):
    """Words [steps, n] -> nats of what follows each, [steps * n]."""

    def __init__(self, words: int, head: nn.Module, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, options.embedding)
        self.lstm = nn.LSTM(options.embedding, options.width)
        self.head = head
        nn.init.normal_(self.embedding.weight, std=options.embedding**-0.5)

    def forward(self, x: Tensor, y: Tensor, state: Any) -> tuple[Tensor, Any]:
        """See above; with the state."""
        h, state = self.lstm(self.embedding(x), state)
        return self.head(h.flatten(0, 1), y.flatten()), state


def chunks(ids: Tensor, options: Options) -> Any:
    """(words, what follows them) [length, streams], of streams side by side."""
    each = (len(ids) - 1) // options.streams
    xs, ys = (
        part.view(options.streams, each).t()
        for part in (ids[: each * options.streams], ids[1:][: each * options.streams])
    )
    for begin in range(0, each - options.length + 1, options.length):
        yield xs[begin : begin + options.length].long(), ys[begin : begin + options.length].long()


def train(model: WordLM, text: Text, rate: float, options: Options) -> tuple[list[Tensor], float]:
    """The loss of each update, and seconds of an update behind the first ten."""
    optimizer = torch.optim.Adam(model.parameters(), fused=on_card(options))
    available = len(text.train) // (options.streams * options.length)
    if available < options.updates:
        raise ValueError(f"{options.data} is enough for {available} updates, {options.updates} are asked for")
    losses: list[Tensor] = []
    state, began = None, time.perf_counter()
    for update, (x, y) in enumerate(
        tqdm(chunks(text.train, options), total=options.updates, disable=None, leave=False)
    ):
        if update == min(10, options.updates - 1):
            wait(options)
            began = time.perf_counter()
        if update == options.updates:
            break
        share = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * update / options.updates))
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (update + 1) / WARM_UP) * share
        optimizer.zero_grad()
        with autocast(options):
            nats, state = model(x, y, state)
        loss = nats.mean()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        state = tuple(part.detach() for part in state)
        losses.append(loss.detach())
    wait(options)
    return losses, (time.perf_counter() - began) / max(1, options.updates - 10)


def wait(options: Options) -> None:
    """For the card."""
    if on_card(options):
        torch.cuda.synchronize()


@torch.no_grad()
def test(model: WordLM, ids: Tensor, frequent: int, options: Options) -> dict[str, float]:
    """Mean nats of all words, of frequent and of rare ones."""
    sums, counts, state = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), None
    for x, y in chunks(ids, options):
        with autocast(options):
            nats, state = model(x, y, state)
        for i, which in enumerate((y.flatten() < frequent, y.flatten() >= frequent)):
            sums[i] += nats[which].double().sum().cpu()
            counts[i] += which.sum().cpu()
    common, rare = (sums / counts.clamp(min=1)).tolist()
    loss = float(sums.sum() / counts.sum())
    return {"loss": round(loss, 4), "loss_frequent": round(common, 4), "loss_rare": round(rare, 4)}


def do(arm: Arm, text: Text, options: Options) -> Line:
    """Trains an arm and tests it."""
    what = arm.settings
    torch.manual_seed(what["seed"])
    begin = time.perf_counter()
    made = head(what["kind"], what["density"], text, options, what["seed"])
    model = WordLM(text.size, made, options).to(options.device)
    setup = time.perf_counter() - begin
    losses, seconds = train(model, text, what["rate"], options)
    weights = sum(p.numel() for p in model.head.parameters())
    share = degree_of(what["density"], options) * options.block / options.width  # whole blocks
    return {
        **test(model, text.test, options.frequent, options), "unit": "nats per word", "vocabulary": text.size,
        "ms": round(1e3 * seconds, 2), "words_per_s": round(options.streams * options.length / seconds),
        "head_weights": weights, "head_bytes": 16 * weights, "setup_s": round(setup, 2),
        "share": round(share, 4) if what["kind"] == "sparse" else None, "curve": curve_of(losses),
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def main() -> None:
    """See above."""
    options = options_of(__doc__, SIZES, data="any text; its end is tested")
    for name in ("width", "frequent"):
        if getattr(options, name) % options.block:
            raise ValueError(f"{name} is {getattr(options, name)}, needs a multiple of the block, {options.block}")
    text = Text(options.data, options)
    print(f"{len(text.train)} words to train, {text.size} different ones", flush=True)
    run_all(arms(options), lambda arm: do(arm, text, options), options, SIZES)


if __name__ == "__main__":
    finish(main, goes_on=True)
