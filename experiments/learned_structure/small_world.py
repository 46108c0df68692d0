"""Which layout does a recurrent network choose, and is it better than a small world? Minutes on a card.

    python experiments/learned_structure/small_world.py --data imdb.txt --out out/small_world --device cuda --minutes 8

The byte-level language model around the deep-update LSTM (`blocksparse.torch.DeepUpdateLSTM` has its formula), here one
layer at a time, so that every method can look at each. All sparse arms have as many live blocks in each matrix. A line
of results for each arm; the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byte_text import Text, read_text
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import blocksparse.torch as bst
import blocksparse.torch.sparsify as bss
from blocksparse import Layout, graphs
from blocksparse.models.lines import add_line, missing, need_known
from blocksparse.program import finish, positive

INNER, EMBEDDING, STRIDE = 3, 64, 2
WARM_UP, CLIP, EPSILON = 100, 1.0, 1e-6
TARGETS = r"matrices\.\d+|gates"
FREQUENCY = 20  # steps from one choice of blocks to the next
SETTINGS = ("updates", "streams", "steps", "hidden", "block", "degree", "strength", "seed", "held_out")


class Network(nn.Module):
    """The cell, and what is around it: a table of bytes in front, an output that reads every second unit behind.

    Args:
        hidden: units.
        layouts: of each matrix and last of one gate; None: all are dense.
        ports: input and output touch every so-many-th unit.
    """

    def __init__(self, hidden: int, layouts: list[Layout] | None, ports: int) -> None:
        super().__init__()
        self.hidden, self.ports = hidden, ports
        self.embedding = nn.Parameter(torch.randn(256, EMBEDDING) * EMBEDDING**-0.5)
        width = -(-hidden // ports)
        self.input = nn.Linear(EMBEDDING, 2 * width, bias=False)
        nn.init.normal_(self.input.weight, std=EMBEDDING**-0.5)
        self.input_norms = nn.ModuleList(nn.LayerNorm(width, EPSILON) for _ in range(2))
        self.matrices = nn.ModuleList(_square(hidden, layouts[i] if layouts else None, 1) for i in range(INNER))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, EPSILON) for _ in range(INNER))
        self.gates = _square(hidden, layouts[-1] if layouts else None, 4)
        self.gain = nn.Parameter(torch.ones(4, hidden))
        self.shift = nn.Parameter(torch.tensor([0.0, 1.0, 0.0, 0.0]).unsqueeze(1).repeat(1, hidden))
        self.output = nn.Linear(width, 256)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, text: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Text [steps, n], state (h, c) [n, hidden] -> (logits [steps, n, 256], state)."""
        x = self.input(functional.embedding(text, self.embedding)).chunk(2, -1)
        m, a = (norm(part) for norm, part in zip(self.input_norms, x, strict=True))
        multiplier, addend = self._spread(m, 1.0), self._spread(a, 0.0)
        h, c = state
        states = []
        for t in range(len(text)):
            h = self.norms[0](self.matrices[0](h)) * multiplier[t]
            for j in range(1, INNER):
                h = self.norms[j](self.matrices[j](h))
                h = functional.relu(h + addend[t] if j == 1 else h)
            z = functional.layer_norm(self.gates(h).unflatten(-1, (4, -1)), (self.hidden,), eps=EPSILON)
            i, f, g, o = (z * self.gain + self.shift).unbind(-2)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return self.output(torch.stack(states)[..., :: self.ports]), (h, c)

    def _spread(self, x: Tensor, neutral: float) -> Tensor:
        if self.ports == 1:
            return x
        whole = x.new_full((*x.shape[:-1], self.hidden), neutral)
        whole[..., :: self.ports] = x
        return whole

    def start(self, n: int) -> tuple[Tensor, Tensor]:
        """Zeros."""
        zeros = self.embedding.new_zeros(n, self.hidden)
        return zeros, zeros

    def layers(self) -> dict[str, Any]:
        """The matrices whose layouts are looked at."""
        return {**{f"matrices.{i}": layer for i, layer in enumerate(self.matrices)}, "gates": self.gates}


@torch.no_grad()
def _square(hidden: int, layout: Layout | None, times: int) -> nn.Module:
    """Identities [hidden, hidden], one below the other."""
    if layout is None:
        layer = nn.Linear(hidden, times * hidden, bias=False)
        layer.weight.copy_(torch.eye(hidden).repeat(times, 1))
        return layer
    stacked = Layout.from_mask(np.tile(layout.mask(), (times, 1)), layout.block_size)
    return bst.BlockSparseLinear(hidden, times * hidden, stacked, bias=False).identity_init_()


# ---- Arms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A method, and its learning rate."""

    method: str
    rate: float

    @property
    def name(self) -> str:
        """Of its line."""
        return f"{self.method}-lr{self.rate:g}"


SPARSE_RATE, DENSE_RATE = 8e-3, 2e-3
FROM_SPARSE = ("ba", "random", "rigl", "set")
ARMS = [Arm("ba", SPARSE_RATE), Arm("gmp", DENSE_RATE), Arm("dense", DENSE_RATE), Arm("rigl", SPARSE_RATE)]
ARMS += [Arm("set", SPARSE_RATE), Arm("lasso", DENSE_RATE), Arm("l0", DENSE_RATE), Arm("narrow", DENSE_RATE)]
ARMS += [Arm("random", SPARSE_RATE), Arm("gmp", 4e-3), Arm("ba", 4e-3), Arm("dense", 1e-3), Arm("gmp", 1e-3)]


def layouts_of(options: argparse.Namespace, random: bool) -> list[Layout]:
    """Small worlds of exactly as many blocks in each matrix; or random graphs of the same number."""
    nodes = options.hidden // options.block
    blocks = nodes * options.degree
    name = f"ws({nodes},{options.degree - 1},1)" if random else f"ba({nodes},{options.degree // 2},blocks={blocks})"
    return [Layout.from_graph(name, options.block, seed=options.seed * 100 + j) for j in range(INNER + 1)]


def prepared(arm: Arm, options: argparse.Namespace) -> tuple[Network, Any]:
    """A network, and what acts on it."""
    torch.manual_seed(options.seed)
    nodes = options.hidden // options.block
    sparsity = 1 - options.degree / nodes
    if arm.method == "narrow":
        width = round(options.hidden * (1 - sparsity) ** 0.5 / 8) * 8
        return Network(width, None, 1).to(options.device), None
    if arm.method in FROM_SPARSE:
        model = Network(options.hidden, layouts_of(options, arm.method == "random"), STRIDE).to(options.device)
        rewiring: Any = None
        drop = bss.CosineDrop(max(1, options.updates * 3 // 4), frequency=FREQUENCY)
        if arm.method in ("set", "rigl"):
            rewiring = bss.SET(drop) if arm.method == "set" else bss.RigL(drop, grow="exact")
            rewiring.prepare(model)
        return model, rewiring
    model = Network(options.hidden, None, STRIDE).to(options.device)
    if arm.method == "dense":
        return model, None
    kind: Any = {"gmp": bss.MagnitudePruner, "lasso": bss.GroupLasso, "l0": bss.L0}[arm.method]
    power = 1 if arm.method == "l0" else 3
    steps = options.updates // 10, options.updates * 6 // 10
    schedule = bss.PolynomialDecay(sparsity, *steps, frequency=FREQUENCY, power=power)
    extra = {"strength": options.strength} if arm.method == "lasso" else {}
    pruner = kind(schedule, block_size=options.block, targets=TARGETS, **extra)
    found = bss.find_targets(model, options.block, TARGETS)
    everywhere = {t.name: torch.ones(t.grid, dtype=torch.bool, device=options.device) for t in found}
    pruner.prepare(model, everywhere)  # identities are zeros elsewhere, which would stay so
    return model, pruner


# ---- Training --------------------------------------------------------------------------------------------------------


def autocast(options: argparse.Namespace) -> Any:
    """bf16 on a card."""
    return torch.autocast("cuda", torch.bfloat16, enabled=options.device.startswith("cuda"))


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy."""
    return functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def train(model: Network, sparsifier: Any, arm: Arm, text: Tensor, options: argparse.Namespace) -> float:
    """Trains on streams of text side by side; returns the seconds that it took."""
    model.train()
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": arm.rate}]
    if isinstance(sparsifier, bss.L0):
        groups.append({"params": sparsifier.parameters(), "lr": 2e-2})
    optimizer = torch.optim.Adam(groups, fused=options.device.startswith("cuda"))
    if sparsifier is not None:
        sparsifier.attach(optimizer)
    length = (len(text) - 1) // options.streams
    if length < options.updates * options.steps:
        raise ValueError(f"{options.data} is too short for {options.updates} updates: their streams end after {length}")
    begins = torch.arange(options.streams, device=text.device) * length
    state, began = model.start(options.streams), time.perf_counter()
    for update in tqdm(range(options.updates), unit="update", disable=None, leave=False):
        share = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * update / options.updates))
        optimizer.param_groups[0]["lr"] = arm.rate * min(1.0, (update + 1) / WARM_UP) * share
        places = begins + update * options.steps + torch.arange(options.steps + 1, device=text.device).unsqueeze(1)
        rows = text[places].long()
        optimizer.zero_grad()
        with autocast(options):
            logits, state = model(rows[:-1], state)
            loss = loss_of(logits, rows[1:])
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        state = state[0].detach(), state[1].detach()
    if not math.isfinite(loss.item()):
        raise FloatingPointError(f"{arm.name}: the loss is {loss.item()}")
    return time.perf_counter() - began


@torch.no_grad()
def bits_per_byte(model: Network, text: Tensor, options: argparse.Namespace) -> float:
    """Of a held-out text, read in as many streams as in training."""
    model.eval()
    length = (len(text) - 1) // options.streams // options.steps * options.steps
    begins = torch.arange(options.streams, device=text.device) * length
    state, total = model.start(options.streams), 0.0
    for at in range(0, length, options.steps):
        rows = text[begins + at + torch.arange(options.steps + 1, device=text.device).unsqueeze(1)].long()
        with autocast(options):
            logits, state = model(rows[:-1], state)
        total += float(loss_of(logits, rows[1:])) * rows[1:].numel()
    return float(total / (length * options.streams) / math.log(2))


# ---- What came of it -------------------------------------------------------------------------------------------------


def masks_of(model: Network, sparsifier: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Which blocks are live, [nodes, nodes] of each matrix and of each gate."""
    whole: dict[str, Any] = {}
    if isinstance(sparsifier, bss.Pruner):
        whole = {name: mask.cpu().numpy() for name, mask in sparsifier.masks().items()}
    else:
        for name, layer in model.layers().items():
            if isinstance(layer, bst.BlockSparseLinear):
                whole[name] = layer.layout.mask()
    masks: dict[str, np.ndarray[Any, Any]] = {}
    for name, mask in whole.items():
        parts = np.split(mask, len(mask) // mask.shape[1])
        names = [name] if len(parts) == 1 else [f"{name}.{gate}" for gate in "ifgo"]
        masks |= dict(zip(names, parts, strict=True))
    return masks


def structure(masks: dict[str, np.ndarray[Any, Any]], block: int) -> dict[str, Any]:
    """Degrees, paths, clustering and mixing of each, and how far one block reaches through all matrices in turn."""
    layouts = {name: Layout.from_mask(mask, block) for name, mask in masks.items()}
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        report = graphs.report(layout)
        found[name] = asdict(report) | {"diagonal": int(np.trace(masks[name]))}
    inner = [layouts[name] for name in layouts if name.startswith("matrices")]
    if inner:
        found["mix_of_a_step"] = {gate: graphs.mix([*inner, layouts[f"gates.{gate}"]]) for gate in "ifgo"}
    return found


def do(arm: Arm, text: Text, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: what its line says of it."""
    model, sparsifier = prepared(arm, options)
    seconds = train(model, sparsifier, arm, text.train, options)
    masks = masks_of(model, sparsifier)
    if isinstance(sparsifier, bss.Pruner):
        sparsifier.squash_mask()
    bits = bits_per_byte(model, text.held_out, options)
    if masks:
        np.savez_compressed(options.out / f"masks-{arm.name}-seed{options.seed}.npz", **masks)  # type: ignore[arg-type]
    live = sum(int(mask.sum()) for mask in masks.values()) * options.block**2
    live = live or sum(layer.weight.numel() for layer in model.layers().values())
    result = {"bits_per_byte": round(bits, 4), "recurrent_weights": live, "seconds": round(seconds, 1)}
    return result | {"units": model.hidden, "structure": structure(masks, options.block)}


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="any text; its end is held out")
    parser.add_argument("--out", type=Path, default=Path("out/small_world_learned"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no arm is begun that would end later")
    parser.add_argument("--arms", nargs="+", help="only these, such as gmp-lr0.002")
    parser.add_argument("--updates", type=positive, default=600)
    parser.add_argument("--streams", type=positive, default=256)
    parser.add_argument("--steps", type=positive, default=64, help="bytes of a stream in an update")
    parser.add_argument("--hidden", type=positive, default=2048)
    parser.add_argument("--block", type=positive, default=32)
    parser.add_argument("--degree", type=positive, default=7, help="blocks in a row of a matrix, a mean")
    parser.add_argument("--strength", type=float, default=0.3, help="of the group lasso")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=positive, default=1 << 20, help="bytes that are tested")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    options = parse()
    need = options.streams * options.steps + 1
    if options.held_out < need:
        raise ValueError(f"--held-out is {options.held_out}, needs {need} or more: --streams times --steps, and one")
    options.out.mkdir(parents=True, exist_ok=True)
    text = read_text(options.data, options.held_out, options.device)
    settings = {name: getattr(options, name) for name in SETTINGS} | {"text": text.digest}
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    file, arms = options.out / "small_world.jsonl", {arm.name: arm for arm in ARMS}
    wanted = ({"arm": name, **settings} for name in need_known(options.arms, arms))
    for each in missing(file, wanted, options.minutes):
        arm = arms[each["arm"]]
        line = {**each, "method": arm.method, "rate": arm.rate, **do(arm, text, options)}
        line |= {"torch": torch.__version__, "machine": machine, "date": time.strftime("%Y-%m-%d")}
        add_line(file, line)
        print(f"{arm.name}: {line['bits_per_byte']:.4f} bits per byte, {line['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
