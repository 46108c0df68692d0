"""Does a wider feed-forward part pay at equal weights? The byte-level Llama of experiments/learned_structure.

    python experiments/huge/feedforward.py --data imdb.txt --output out/feedforward.jsonl                 # in miniature
    python experiments/huge/feedforward.py --data imdb.txt --output out/feedforward.jsonl --device cuda --minutes 6

The dense arm has `--hidden` features between. Others have a multiple of them, and as many weights: 4, 8 and 32 times as
many (on a CPU 4, 8 and 16) at 25 %, 12.5 % and 3 % of the blocks.

    balanced   as many blocks in each row and, up to one, in each column
    random     shuffled: any set of blocks is equally likely, so some features have no input or are not read
    rigl       begins as random; blocks grow where a dense gradient is largest
    wide       dense with the features of the narrowest sparse arm: what the weights that are left out would bring

All arms see the same batches. The most telling ones come first. `experiments/imdb_text.py` makes the text.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import Arm, Line, Options, curve_of, on_card, options_of, run_all
from torch import Tensor, nn

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout, graphs
from blocksparse.program import finish

sys.path.append(str(Path(__file__).parents[1] / "learned_structure"))
import byte_layers
import byte_lm
from byte_llama import ByteLM

SIZES = {
    "steps": (300, 500, "steps of an arm"),
    "rows": (4, 16, "rows of a step"),
    "tokens": (64, 512, "bytes of a row"),
    "width": (128, 1024, "features of the model"),
    "hidden": (256, 2048, "features of the dense feed-forward part"),
    "layers": (2, 4, "layers"),
    "block": (8, 32, "edge of a block"),
    "held_bytes": (1 << 15, 1 << 19, "bytes at the end of the text that are tested"),
}
RATE = 1e-3
FREQUENCY = 20  # steps from one choice of blocks to the next


def arms(options: Options) -> list[Arm]:
    """The most telling ones first."""
    near, far, widest = (4, 8, 32) if on_card(options) else (4, 8, 16)
    first, *more = options.seeds

    def arm(method: str, factor: int, seed: int, rate: float = 1) -> Arm:
        settings = {"arm": f"{method}-x{factor}" if factor > 1 else method, "factor": factor, "seed": seed}
        return Arm({**settings, "method": method, "rate": RATE * rate}, 4 + factor)

    made = [arm("dense", 1, first), *(arm("balanced", factor, first) for factor in (near, far, widest))]
    made += [arm(method, factor, first) for method in ("rigl", "random") for factor in (near, far)]
    made += [arm("dense", 1, first, 2), *(arm("balanced", factor, first, 2) for factor in (near, far))]
    for seed in more:
        made += [arm("dense", 1, seed), *(arm("balanced", factor, seed) for factor in (near, far))]
    made += [arm("wide", near, first), arm("rigl", widest, first), arm("random", widest, first)]
    for seed in more:
        made += [arm(method, factor, seed) for factor in (near, far, widest) for method in ("rigl", "random")]
        made += [arm("balanced", widest, seed)]
    return made


def layer_maker(method: str, factor: int, options: Options, seed: int) -> Any:
    """What makes the layers of a feed-forward part; each has a layout of its own."""
    if method in ("dense", "wide"):
        return byte_layers.dense
    seeds = itertools.count(1000 * seed)

    def make(n: int, m: int) -> nn.Module:
        b = options.block
        if n % (b * factor) and method == "balanced":
            raise ValueError(f"{n} features in blocks of {b} cannot have a share of 1/{factor} in each row")
        if method == "balanced":
            layout = graphs.balanced_random(m // b, n // b, degree=n // b // factor, block_size=b, seed=next(seeds))
        else:
            layout = graphs.random(m // b, n // b, density=1 / factor, block_size=b, seed=next(seeds))
        return byte_layers.with_blocks(n, m, layout)

    return make


def used(model: ByteLM) -> float:
    """Share of the blocks of features that have an input to gate and up, and are read."""
    shares = []
    for layer in model.layers:
        layouts: list[Layout] = [getattr(layer, name).layout for name in ("gate", "up", "down")]
        places = [layouts[0].coordinates()[0], layouts[1].coordinates()[0], layouts[2].coordinates()[1]]
        there = [np.bincount(place, minlength=layouts[0].grid[0]) > 0 for place in places]
        shares.append(float(np.mean(there[0] & there[1] & there[2])))
    return sum(shares) / len(shares)


def do(arm: Arm, text: Tensor, options: Options) -> Line:
    """Trains an arm and tests it."""
    what = arm.settings
    torch.manual_seed(what["seed"])
    steps, hidden = options.steps, options.hidden * what["factor"]
    make = layer_maker(what["method"], what["factor"], options, what["seed"])
    model = ByteLM(options.width, hidden, options.layers, make).to(options.device)
    run = byte_lm.Run(model, steps, what["rate"])
    if what["method"] == "rigl":
        run.sparsifier = bss.RigL(bss.CosineDrop(max(1, steps * 3 // 4), frequency=FREQUENCY))
        run.sparsifier.prepare(model)
    losses: list[Tensor] = []
    options.seed = what["seed"]  # of the batches
    options.no_graphs = True  # as when the results were made: their seconds are compared
    seconds = byte_lm.train(run, text[: -options.held_bytes], options, losses.append)
    bits = byte_lm.bits_per_byte(model, text[-options.held_bytes :], options)
    layers = [getattr(layer, name) for layer in model.layers for name in ("gate", "up", "down")]
    result = {
        "features": hidden, "loss": round(bits, 4), "unit": "bits per byte", "ms": round(1e3 * seconds / steps, 2),
        "ffn_weights": sum(layer.weight.numel() for layer in layers),
        "parameters": sum(p.numel() for p in model.parameters()), "curve": curve_of(losses, 1 / math.log(2)),
    }  # fmt: skip
    if isinstance(layers[0], bst.BlockSparseLinear):
        result["used"] = round(used(model), 4)
    return result


def main() -> None:
    """See above."""
    options = options_of(__doc__, SIZES, data="any text; its end is tested")
    text = torch.frombuffer(bytearray(options.data.read_bytes()), dtype=torch.uint8).to(options.device)
    if len(text) < 3 * options.held_bytes:
        raise ValueError(f"{options.data} holds {len(text)} bytes, needs {3 * options.held_bytes} or more")
    run_all(arms(options), lambda arm: do(arm, text, options), options, SIZES)


if __name__ == "__main__":
    finish(main, goes_on=True)
