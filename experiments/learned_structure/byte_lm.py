"""A byte-level Llama-style language model whose feed-forward parts become sparse in every way: minutes on a card.

    python experiments/learned_structure/byte_lm.py --data imdb.txt --out out/byte_lm --device cuda --minutes 8

All arms see the same batches. A line of results for each, written once it is complete; the same command goes on after a
stop. The most telling arms come first, so `--minutes` leaves out the others. `experiments/imdb_text.py` makes the text.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from byte_layers import balanced, dense, sparse
from byte_llama import ByteLM, Make
from byte_text import read_text
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import blocksparse.torch.sparsify as bss
from blocksparse.models.lines import add_line, missing, need_known
from blocksparse.program import finish, positive

HELD_OUT, WARM_UP, CLIP = 1 << 20, 100, 1.0
TARGETS = r"layers\.\d+\.(gate|up|down)"
FREQUENCY = 20  # steps from one choice of blocks to the next
SETTINGS = ["steps", "rows", "tokens", "width", "hidden", "layers", "rate", "strength", "seed", "held_bytes"]
SETTINGS += ["more", "more_rate", "text"]


# ---- Arms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A way to a model. `sparsity` and `block` are those of the feed-forward parts."""

    method: str
    sparsity: float = 0.0
    block: int = 0

    @property
    def name(self) -> str:
        """Of its line."""
        return f"{self.method}-{self.sparsity:g}-b{self.block}" if self.block else self.method


CHOSEN = (0.9, 64)
OTHERS = ((0.8, 64), (0.95, 64), (0.9, 32), (0.9, 128), (0.8, 32), (0.95, 32), (0.8, 128), (0.95, 128))
LEARNED = ("gmp", "rigl", "static", "narrow", "balanced", "lasso", "blast", "l0", "set")
ONE_SHOT = ("obs", "magnitude", "wanda")
ARMS = [Arm("dense"), Arm("gmp-distil", *CHOSEN), *(Arm(m, *CHOSEN) for m in LEARNED[:4]), Arm("dense-more")]
ARMS += [Arm("gmp-distil", *where) for where in OTHERS[:4]] + [Arm(m, *CHOSEN) for m in LEARNED[4:]]
ARMS += [Arm(m, *CHOSEN) for m in (*ONE_SHOT, "rigl-balanced")]
ARMS += [Arm(m, *where) for where in OTHERS for m in ("gmp", "rigl", "static", "balanced")]
ARMS += [Arm("gmp-distil", *where) for where in OTHERS[4:]]
ARMS += [Arm(m, *where) for where in OTHERS for m in ("lasso", "blast", "l0", "set", *ONE_SHOT, "narrow")]

PRUNERS: dict[str, Any] = {"gmp": bss.MagnitudePruner, "lasso": bss.GroupLasso, "blast": bss.Blast, "l0": bss.L0}
FROM_DENSE = ("gmp-distil", "dense-more", *ONE_SHOT)  # go on from the dense arm's weights


@dataclass
class Run:
    """What trains an arm."""

    model: ByteLM
    steps: int
    rate: float
    sparsifier: Any = None
    teacher: ByteLM | None = None
    gates: Any = None  # of L0


def prepared(arm: Arm, text: Tensor, options: argparse.Namespace, result: dict[str, Any]) -> Run:
    """The model of an arm, and what acts on it."""
    torch.manual_seed(options.seed)
    steps, device = options.steps, options.device
    sizes = (options.width, options.hidden, options.layers)
    if arm.method in FROM_DENSE:
        model = ByteLM(*sizes, dense).to(device)
        model.load_state_dict(torch.load(checkpoint(options), map_location=device, weights_only=True))
        return _continued(arm, model, text, options, result)
    if arm.method == "narrow":
        hidden = round(options.hidden * (1 - arm.sparsity))
        return Run(ByteLM(options.width, hidden, options.layers, dense).to(device), steps, options.rate)
    if arm.method in PRUNERS:
        power = 1 if arm.method == "l0" else 3
        schedule = bss.PolynomialDecay(arm.sparsity, steps // 10, steps * 6 // 10, frequency=FREQUENCY, power=power)
        model = ByteLM(*sizes, dense).to(device)
        extra = {"strength": options.strength} if arm.method == "lasso" else {}
        pruner = PRUNERS[arm.method](schedule, block_size=arm.block, targets=TARGETS, **extra)
        pruner.prepare(model)
        return Run(model, steps, options.rate, pruner, gates=pruner.parameters() if arm.method == "l0" else None)
    make: Make = dense
    if arm.method != "dense":
        drawn = balanced if arm.method.endswith("balanced") else sparse
        make = drawn(1 - arm.sparsity, arm.block, 1000 * options.seed)
    run = Run(ByteLM(*sizes, make).to(device), steps, options.rate)
    if arm.method in ("set", "rigl", "rigl-balanced"):
        drop = bss.CosineDrop(max(1, steps * 3 // 4), frequency=FREQUENCY)
        run.sparsifier = bss.SET(drop) if arm.method == "set" else bss.RigL(drop, grow="exact")
        run.sparsifier.prepare(run.model)
    return run


def _continued(arm: Arm, model: ByteLM, text: Tensor, options: argparse.Namespace, result: dict[str, Any]) -> Run:
    """More steps from the dense model on: as it is, pruned gradually, or pruned at once."""
    steps = max(1, round(options.steps * options.more))
    if arm.method == "dense-more":
        return Run(model, steps, options.rate * options.more_rate)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    masks: Any = None
    schedule: Any = bss.PolynomialDecay(arm.sparsity, 0, steps * 6 // 10, frequency=max(1, FREQUENCY // 2))
    if arm.method in ONE_SHOT:
        batches = [batch(text, -1 - i, options)[0] for i in range(4)]
        where: Any = {"block_size": arm.block, "targets": TARGETS, "calibration": batches}
        masks = bss.sparsify_(model, arm.method, sparsity=arm.sparsity, **where)
        result["before"] = round(bits_per_byte(model, options.held_out, options), 4)
        schedule = bss.Constant(arm.sparsity)
    pruner = bss.MagnitudePruner(schedule, regrow=masks is None, block_size=arm.block, targets=TARGETS)
    pruner.prepare(model, masks)
    return Run(model, steps, options.rate * options.more_rate, pruner, teacher)


# ---- Training --------------------------------------------------------------------------------------------------------


def batch(text: Tensor, step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(bytes, what follows them) [rows, tokens]; which ones depends on seed and step alone."""
    generator = torch.Generator().manual_seed(1_000_003 * options.seed + step + 1000)
    starts = torch.randint(len(text) - options.tokens - 1, (options.rows,), generator=generator)
    places = starts.unsqueeze(1) + torch.arange(options.tokens + 1)
    rows = text[places.to(text.device)].long()
    return rows[:, :-1], rows[:, 1:]


def autocast(options: argparse.Namespace) -> Any:
    """bf16 on a card."""
    return torch.autocast("cuda", torch.bfloat16, enabled=options.device.startswith("cuda"), cache_enabled=False)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy."""
    return functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, options: argparse.Namespace) -> float:
    """Of a held-out text, in rows as long as those of the training."""
    rows = len(text) // (options.tokens + 1)
    parts = text[: rows * (options.tokens + 1)].view(rows, -1).long()
    total, modes = 0.0, model.training
    model.eval()
    for part in torch.split(parts, 2 * options.rows):
        with autocast(options):
            logits = model(part[:, :-1])
        total += float(loss_of(logits, part[:, 1:])) * part[:, 1:].numel()
    model.train(modes)
    return float(total / (rows * options.tokens) / math.log(2))


class Updates:
    """Updates of a model. On a card each is the replay of a CUDA graph, if no method acts within it."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.run, self.options, cuda = run, options, options.device.startswith("cuda")
        self.graphs = cuda and not options.no_graphs and isinstance(run.sparsifier, bss.MagnitudePruner | None)
        self.rate: Any = torch.tensor(run.rate, device=options.device) if self.graphs else run.rate
        self.parameters = list(run.model.parameters())
        groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": self.rate}]
        if run.gates is not None:
            groups.append({"params": run.gates, "lr": 2e-2, "weight_decay": 0.0})
        settings: dict[str, Any] = {"fused": cuda, "capturable": self.graphs}
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, **settings)
        if run.sparsifier is not None and not self.graphs:
            run.sparsifier.attach(self.optimizer)
        self.distiller = None
        if run.teacher is not None:
            layers = r"layers\.\d+"
            self.distiller = bss.Distiller(run.teacher, run.model, layers=layers, alpha=0.5, temperature=1.0)
        self.graph: tuple[Any, Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        """Updates the model by a batch at this learning rate; returns the loss before."""
        if not self.graphs:
            self.optimizer.param_groups[0]["lr"] = rate
            return self._update(x, y)
        self.rate.fill_(rate)
        if len(self.optimizer.state) == 0:  # the first one makes moments, outside of a graph
            loss = self._update(x, y)
        else:
            self.graph = self.graph or self._captured(x, y)
            graph, place_x, place_y, loss = self.graph
            place_x.copy_(x)
            place_y.copy_(y)
            graph.replay()
            loss = loss.clone()
        if self.run.sparsifier is not None:
            self.run.sparsifier.step()
        return loss

    def _update(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=not self.graphs)
        with autocast(self.options):
            if self.distiller is None:
                loss = loss_of(self.run.model(x), y)
            else:
                loss = self.distiller(x, task=lambda logits: loss_of(logits, y)).loss
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        return loss.detach()

    def _captured(self, x: Tensor, y: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        x, y = x.clone(), y.clone()
        state = [*self.parameters, *(t for p in self.parameters for t in self.optimizer.state[p].values())]
        cuda: Any = torch.cuda
        kept, side = [t.detach().clone() for t in state], cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries make their workspaces
            self._update(x, y)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(state, kept, strict=True):
            tensor.data.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._update(x, y)
        return graph, x, y, loss


def train(
    run: Run, text: Tensor, options: argparse.Namespace, tell: Callable[[Tensor], None] = lambda loss: None
) -> float:
    """Trains, tells the loss of each step, and returns the seconds that it took."""
    run.model.train()
    update = Updates(run, options)
    began = time.perf_counter()
    for step in tqdm(range(run.steps), unit="step", disable=None, leave=False):
        share = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        rate = run.rate * min(1.0, (step + 1) / WARM_UP) * share
        tell(update(*batch(text, step, options), rate))
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began


def checkpoint(options: argparse.Namespace) -> Path:
    """Of the dense arm, that others go on from."""
    sizes = (options.width, options.hidden, options.layers, options.rows, options.tokens)
    training = f"{options.steps}-{options.rate:g}-{options.seed}-{options.text}"
    name: Path = options.out / f"dense-{'x'.join(map(str, sizes))}-{training}.pt"
    return name


def do(arm: Arm, text: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: what its line of results says of it."""
    result: dict[str, Any] = {}
    run = prepared(arm, text, options, result)
    seconds = train(run, text, options)
    if isinstance(run.sparsifier, bss.L0):
        run.sparsifier.squash_mask()
    bits = bits_per_byte(run.model, options.held_out, options)
    if arm.method == "dense":
        beside = checkpoint(options).with_suffix(".part")
        torch.save(run.model.state_dict(), beside)
        beside.replace(checkpoint(options))
    live = sum(
        int(torch.count_nonzero(p))
        for n, p in run.model.named_parameters()
        if n.split(".")[-2] in ("gate", "up", "down")
    )
    return result | {"bits_per_byte": round(bits, 4), "ffn_weights": live, "seconds": round(seconds, 1)}


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="any text; the last MB is held out")
    parser.add_argument("--out", type=Path, default=Path("out/byte_lm"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no arm is begun that would end later")
    parser.add_argument("--arms", nargs="+", help="only these, such as gmp-distil-0.9-b64")
    parser.add_argument("--steps", type=positive, default=800, help="of arms that begin anew")
    parser.add_argument(
        "--more", type=float, default=0.5, help="steps of arms that go on from the dense one, times --steps"
    )
    parser.add_argument("--more-rate", type=float, default=0.5, help="their learning rate, times --rate")
    parser.add_argument("--rows", type=positive, default=32, help="of a step")
    parser.add_argument("--tokens", type=positive, default=512, help="of a row")
    parser.add_argument("--width", type=positive, default=512)
    parser.add_argument("--hidden", type=positive, default=1536, help="features of the feed-forward parts")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--strength", type=float, default=0.3, help="of the group lasso")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs: slower")
    parser.add_argument("--held-out", dest="held_bytes", type=positive, default=HELD_OUT, help="bytes that are tested")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    options = parse()
    if options.held_bytes <= options.tokens:
        raise ValueError(f"--held-out is {options.held_bytes}, needs more than --tokens, {options.tokens}")
    options.out.mkdir(parents=True, exist_ok=True)
    text, options.held_out, options.text = read_text(options.data, options.held_bytes, options.device)
    settings = {name: getattr(options, name) for name in SETTINGS}
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    file, arms = options.out / "byte_lm.jsonl", {arm.name: arm for arm in ARMS}
    wanted = ({"arm": name, **settings} for name in need_known(options.arms, arms))
    again = () if checkpoint(options).exists() else ("dense",)  # others go on from it
    for each in missing(file, wanted, options.minutes, again):
        arm = arms[each["arm"]]
        line = {**each, "method": arm.method, "sparsity": arm.sparsity, "block": arm.block, **do(arm, text, options)}
        line |= {"torch": torch.__version__, "machine": machine, "date": time.strftime("%Y-%m-%d")}
        add_line(file, line)
        print(f"{arm.name}: {line['bits_per_byte']:.4f} bits per byte, {line['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
