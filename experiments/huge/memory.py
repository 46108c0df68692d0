"""Does a wider recurrent state remember more, at equal weights? Copying and associative recall, ever longer.

    python experiments/huge/memory.py --output out/memory.jsonl                 # in miniature
    python experiments/huge/memory.py --output out/memory.jsonl --device cuda --minutes 6

    copy      n symbols of 8, then n blanks, at which the network is to say them again, in their order
    recall    n pairs of a key (of 64, all different) and a value (of 8), a pair a step; then the n keys in another
              order, at each of which it is to say the value

n begins with 1. It grows by an eighth, or by 1, whenever three updates in a row had 95 % of the answers right. What
counts is how long n has become, and how much of longer ones is right in the end, after as many updates of as many rows.

The network is the small-world LSTM, `blocksparse.torch.DeepUpdateLSTM`: two matrices and four gates of Barabasi-Albert
graphs, each of `--weights`. It has 4k, 16k or 64k units (on a CPU 256, 512 or 1024); a dense one has as many weights.
Input and output touch as many units of each, evenly spaced. The most telling arms come first.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from arms import Arm, Line, Options, autocast, curve_of, on_card, options_of, run_all
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import blocksparse.torch as bst
from blocksparse import graphs
from blocksparse.program import finish

SIZES = {
    "updates": (600, 600, "updates of an arm"),
    "rows": (32, 64, "sequences of an update"),
    "units": (256, 4096, "units of the narrowest sparse network; others have 4 and 16 times as many, on a CPU 2 and 4"),
    "weights": (1 << 15, 1 << 23, "weights of a matrix"),
    "block": (8, 32, "edge of a block"),
    "ports": (64, 2048, "units that input and output touch"),
    "longest": (12, 64, "n, at most"),
}
SYMBOLS, KEYS = 8, 64
BLANK, WORDS = SYMBOLS + KEYS, SYMBOLS + KEYS + 1
INNER, WARM_UP, CLIP = 2, 50, 1.0
RATES = {"dense": 2e-3, "sparse": 8e-3}
RIGHT, IN_A_ROW = 0.95, 3
TASKS = ("copy", "recall")


def arms(options: Options) -> list[Arm]:
    """The most telling ones first."""
    first, *more = options.seeds
    times = (1, 4, 16) if on_card(options) else (1, 2, 4)

    def arm(task: str, factor: int, seed: int, rate: float = 1) -> Arm:
        name = f"sparse-x{factor}" if factor else "dense"
        step = RATES["sparse" if factor else "dense"] * rate
        return Arm({"arm": name, "factor": factor, "task": task, "rate": step, "seed": seed}, 4 + factor)

    made = [arm(task, factor, first) for task in TASKS for factor in (0, *times)]
    made += [arm(task, factor, first, rate) for rate in (0.5, 2) for task in TASKS for factor in (0, *times[:2])]
    made += [arm(task, factor, first, 0.25) for task in TASKS for factor in (0, times[0])]  # halves had helped these
    made += [arm("copy", times[2], first, 0.5)]
    return made + [arm(task, factor, seed) for seed in more for task in TASKS for factor in (0, *times)]


class Network(nn.Module):
    """Pairs of words [steps, n, 2] -> logits [steps, n, symbols]."""

    def __init__(self, factor: int, options: Options, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, min(64, options.ports))
        if factor == 0:
            self.units = round(options.weights**0.5 / 8) * 8
            self.stride = max(1, self.units // options.ports)
            layouts = None
        else:
            self.units, b = factor * options.units, options.block
            self.stride, nodes = max(1, self.units // options.ports), self.units // b
            degree = options.weights // (nodes * b * b)
            if degree < 3:
                raise ValueError(
                    f"{self.units} units have {degree} blocks in a row, needs 3: more weights or fewer units"
                )
            blocks = nodes * degree
            layouts = [
                graphs.barabasi_albert(nodes, (degree - 1) // 2, blocks=blocks, block_size=b, seed=10 * seed + i)
                for i in range(INNER + 1)
            ]
        self.lstm = bst.DeepUpdateLSTM(self.embedding.embedding_dim, self.units, layouts, INNER, self.stride)
        self.output = nn.Linear(-(-self.units // self.stride), SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        y = self.lstm(self.embedding(x).sum(-2))[0]
        logits: Tensor = self.output(y[..., :: self.stride])
        return logits


def batch(task: str, n: int, rows: int, seed: int, device: Any) -> tuple[Tensor, Tensor]:
    """(pairs of words [2 n, rows, 2], answers [n, rows]): the answers are to the last n pairs."""
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(SYMBOLS, (n, rows), generator=generator)
    words = torch.full((2 * n, rows, 2), BLANK)
    words[:n, :, 0] = answers = symbols
    if task == "recall":
        if n > KEYS:
            raise ValueError(f"recall of {n} pairs needs as many keys, there are {KEYS}")
        keys = SYMBOLS + torch.rand(KEYS, rows, generator=generator).argsort(0)[:n]
        order = torch.rand(n, rows, generator=generator).argsort(0)
        words[:n, :, 1], words[n:, :, 1], answers = keys, keys.gather(0, order), symbols.gather(0, order)
    return words.to(device), answers.to(device)


def train(model: Network, what: Any, options: Options) -> tuple[list[Tensor], list[list[float]]]:
    """The loss of each update, and [update, n, seconds] where n has grown."""
    optimizer = torch.optim.Adam(model.parameters(), fused=on_card(options))
    n, well, losses, began = 1, 0, [], time.perf_counter()
    grown: list[list[float]] = [[0, 1, 0.0]]
    for update in (bar := tqdm(range(options.updates), unit="update", disable=None, leave=False)):
        optimizer.param_groups[0]["lr"] = what["rate"] * min(1.0, (update + 1) / WARM_UP)
        words, answers = batch(what["task"], n, options.rows, 1_000_003 * what["seed"] + update, options.device)
        optimizer.zero_grad()
        with autocast(options):
            logits = model(words)[-n:].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.detach())
        well = well + 1 if float((logits.argmax(-1) == answers).float().mean()) >= RIGHT else 0
        if well == IN_A_ROW and n < options.longest:
            n, well = min(options.longest, max(n + 1, n * 9 // 8)), 0
            grown.append([update + 1, n, round(time.perf_counter() - began, 2)])
            bar.set_postfix(n=n)
    return losses, grown


@torch.no_grad()
def right(model: Network, task: str, n: int, options: Options) -> float:
    """The share of answers that are right, of sequences that are in no training."""
    words, answers = batch(task, n, 4 * options.rows, -1 - n, options.device)
    with autocast(options):
        logits = torch.cat([model(part)[-n:].float() for part in torch.split(words, options.rows, 1)], 1)
    return round(float((logits.argmax(-1) == answers).float().mean()), 4)


def do(arm: Arm, options: Options) -> Line:
    """Trains an arm and tests it."""
    what = arm.settings
    torch.manual_seed(what["seed"])
    model = Network(what["factor"], options, what["seed"]).to(options.device)
    begin = time.perf_counter()
    losses, grown = train(model, what, options)
    seconds = time.perf_counter() - begin
    lengths = sorted({*(n for n in (1, 2, 4, 8, 16, 32, 64) if n <= options.longest), int(grown[-1][1])})
    lstm = model.lstm
    return {
        "reached": int(grown[-1][1]), "units_of_all": model.units, "grown": grown,
        "right": {n: right(model, what["task"], n, options) for n in lengths},
        "recurrent_weights": sum(layer.weight.numel() for layer in (*lstm.matrices, lstm.gates)),
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": round(seconds, 1),
        "ms": round(1e3 * seconds / options.updates, 2), "curve": curve_of(losses),
    }  # fmt: skip


def main() -> None:
    """See above."""
    options = options_of(__doc__, SIZES)
    run_all(arms(options), lambda arm: do(arm, options), options, SIZES)


if __name__ == "__main__":
    finish(main, goes_on=True)
