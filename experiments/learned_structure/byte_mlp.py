"""Which sparse structure is best for a small byte-level language model, at equal live weights: minutes on a CPU.

    python experiments/learned_structure/byte_mlp.py --data imdb.txt --out out/byte_mlp

The model reads 16 bytes, 32 numbers each, through three hidden layers of 512 x 512 and guesses the next byte. All arms
see the same batches. Each arm's line of results is written once it is complete; the same command goes on after a stop.
`experiments/imdb_text.py` makes the text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from byte_text import read_text
from torch import Tensor, nn

import blocksparse
import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse.models.lines import add_line, missing
from blocksparse.program import finish, positive

CONTEXT, EMBEDDING, WIDTH, LAYERS, BLOCK = 16, 32, 512, 3, 16
BATCH, RATE, HELD_OUT, PLACES = 256, 1e-3, 1 << 20, 1 << 16
DENSITY = 0.1


class ByteMlp(nn.Module):
    """x + gelu(W LN(x)) in each hidden layer; the first one may change the width."""

    def __init__(self, make: Callable[[int, int], nn.Module], width: int | None = None) -> None:
        super().__init__()
        width = width or WIDTH
        self.embedding = nn.Embedding(256, EMBEDDING)
        sizes = [CONTEXT * EMBEDDING, *[width] * LAYERS]
        self.norms = nn.ModuleList(nn.LayerNorm(n) for n in sizes)
        self.hidden = nn.ModuleList(make(n, m) for n, m in itertools.pairwise(sizes))
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes [n, 16] -> logits [n, 256]."""
        y = self.embedding(x).flatten(1)
        for norm, layer in zip(self.norms, self.hidden, strict=False):
            new = nn.functional.gelu(layer(norm(y)))
            y = y + new if new.shape == y.shape else new
        logits: Tensor = self.head(self.norms[-1](y))
        return logits


@dataclass
class Arm:
    """A model, and what acts on it while it is trained."""

    model: ByteMlp
    sparsifier: Any = None
    groups: tuple[dict[str, Any], ...] = ()


def dense(n: int, m: int) -> nn.Module:
    """A dense hidden layer."""
    return nn.Linear(n, m)


def sparse(n: int, m: int) -> nn.Module:
    """One with random blocks, an exact number of them, initialised by its true fan-in."""
    grid = (m // BLOCK, n // BLOCK)
    blocks = grid[0] * grid[1]
    mask = torch.zeros(blocks, dtype=torch.bool)
    mask[torch.randperm(blocks)[: blocks - math.floor(blocks * (1 - DENSITY) + 0.5)]] = True
    return bst.BlockSparseLinear(n, m, blocksparse.Layout.from_mask(mask.view(grid).numpy(), BLOCK))


def gradual(steps: int, **options: Any) -> bss.PolynomialDecay:
    """From 10 to 60 % of the training, every 50 steps."""
    return bss.PolynomialDecay(1 - DENSITY, steps // 10, steps * 6 // 10, frequency=50, **options)


def pruned(kind: Callable[..., bss.Pruner], schedule: Any, **options: Any) -> Arm:
    """A dense model that a pruner makes sparse."""
    model = ByteMlp(dense)
    pruner = kind(schedule, block_size=BLOCK, targets=r"^hidden", **options)
    pruner.prepare(model)
    gates = {"params": pruner.parameters(), "lr": 2e-2, "weight_decay": 0.0} if isinstance(pruner, bss.L0) else None
    return Arm(model, pruner, (gates,) if gates else ())


def rewired(kind: Callable[..., Any], steps: int, **options: Any) -> Arm:
    """A sparse model whose blocks change their places, up to 75 % of the training."""
    model = ByteMlp(sparse)
    rewiring = kind(bss.CosineDrop(max(1, steps * 3 // 4), frequency=100), **options)
    rewiring.prepare(model)
    return Arm(model, rewiring)


ARMS: dict[str, Callable[[int], Arm]] = {
    "dense": lambda steps: Arm(ByteMlp(dense)),
    "narrow": lambda steps: Arm(ByteMlp(dense, 108)),
    "static": lambda steps: Arm(ByteMlp(sparse)),
    "set": lambda steps: rewired(bss.SET, steps),
    "rigl": lambda steps: rewired(bss.RigL, steps, grow="exact"),
    "rigl-bound": lambda steps: rewired(bss.RigL, steps, grow="bound"),
    "gmp": lambda steps: pruned(bss.MagnitudePruner, gradual(steps), regrow=False),
    "gmp-regrow": lambda steps: pruned(bss.MagnitudePruner, gradual(steps)),
    "gmp-global": lambda steps: pruned(bss.MagnitudePruner, gradual(steps), scope="global"),
    "gmp-lasso": lambda steps: pruned(bss.GroupLasso, gradual(steps)),
    "blast": lambda steps: pruned(bss.Blast, gradual(steps)),
    "l0": lambda steps: pruned(bss.L0, gradual(steps, power=1)),
}


@torch.no_grad()
def wide_init_(model: ByteMlp) -> None:
    """Hidden weights from N(0, 1 / live fan-in): sqrt(3) times as wide as PyTorch's."""
    for layer in model.hidden:
        module: Any = layer
        weight = module.weight
        if isinstance(layer, bst.BlockSparseLinear):
            fan_in = torch.from_numpy(layer.layout.mask().sum(1)).float() * BLOCK
            out = torch.from_numpy(layer.layout.coordinates()[0]).long()
            weight.normal_().mul_(fan_in.clamp(min=1).rsqrt()[out].view(-1, 1, 1))
        else:
            weight.normal_(std=weight.size(1) ** -0.5)
        module.bias.zero_()


def rate_at(step: int, steps: int) -> float:
    """Warm-up over 100 steps, then a cosine to 5 %."""
    if step < 100:
        return (step + 1) / 100
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - 100) / max(1, steps - 100)))


def contexts(text: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The 16 bytes before each end, and the byte there."""
    return text[ends.unsqueeze(1) + torch.arange(-CONTEXT, 0)].long(), text[ends].long()


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor) -> float:
    """On as many places of a held-out text as there are, at most 65536, the same each time."""
    model.eval()
    ends = torch.linspace(CONTEXT, len(text) - 1, min(PLACES, len(text) - CONTEXT)).long()
    total = 0.0
    for part in torch.split(ends, 4096):
        x, y = contexts(text, part)
        total += float(nn.functional.cross_entropy(model(x), y, reduction="sum"))
    model.train()
    return total / len(ends) / math.log(2)


def train(arm: Arm, text: Tensor, steps: int, seed: int) -> float:
    """Trains, and returns the seconds that it took."""
    model = arm.model
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters())}, *arm.groups], lr=RATE, betas=(0.9, 0.99), weight_decay=0.01
    )
    if arm.sparsifier is not None:
        arm.sparsifier.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda t: rate_at(t, steps), *[lambda t: 1.0] * len(arm.groups)]
    )
    generator, begin = torch.Generator().manual_seed(seed), time.perf_counter()
    for _ in range(steps):
        x, y = contexts(text, torch.randint(CONTEXT, len(text), (BATCH,), generator=generator))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return time.perf_counter() - begin


def hidden_weights(model: ByteMlp) -> int:
    """Those that are not zero."""
    return sum(int(torch.count_nonzero(layer.get_parameter("weight"))) for layer in model.hidden)


def run(name: str, text: Tensor, held_out: Tensor, steps: int, seed: int, init: str = "pytorch") -> dict[str, Any]:
    """One arm: its line of results."""
    torch.manual_seed(seed)
    arm = ARMS[name](steps)
    if init == "wide":
        wide_init_(arm.model)
    line: dict[str, Any] = {"arm": name, "steps": steps, "seed": seed, "init": init}
    seconds = train(arm, text, steps, seed)
    bits = bits_per_byte(arm.model, held_out)
    line |= {"bits_per_byte": round(bits, 4), "hidden_weights": hidden_weights(arm.model), "seconds": round(seconds, 1)}
    if isinstance(arm.sparsifier, bss.Pruner):
        line["live_blocks"] = [row.live for row in arm.sparsifier.report().rows]
        first = arm.sparsifier.masks()["hidden.0"]
        line["live_blocks_of_each_byte"] = first.sum(0).view(CONTEXT, -1).sum(1).tolist()
    return line


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Trains a byte-level MLP with every sparse structure.")
    parser.add_argument("--data", type=Path, required=True, help="any text; the last MB is held out")
    parser.add_argument("--out", type=Path, default=Path("out/byte_mlp"))
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=positive, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", choices=("pytorch", "wide"), default="pytorch")
    parser.add_argument("--threads", type=positive, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = read_text(options.data, HELD_OUT)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "byte_mlp.jsonl"
    settings = {name: getattr(options, name) for name in ("steps", "seed", "init")}
    for each in missing(file, ({"arm": name, **settings} for name in options.arms)):
        line = run(each["arm"], text.train, text.held_out, options.steps, options.seed, options.init)
        line |= {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
        print(json.dumps(line), flush=True)
        add_line(file, line)


if __name__ == "__main__":
    finish(main, goes_on=True)
