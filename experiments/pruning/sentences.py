"""A sentence-embedding model pruned in every way, distilled on IMDB's text, and judged on six labelled sets.

    python pack.py sentences --data DATA --out packed/sentences
    python sentences.py --packed packed/sentences --out out/sentences --device cuda --minutes 8

A line of results for each arm, written once it is complete; the same command goes on after a stop. The most telling
arms come first, so `--minutes` leaves out the others.
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

import numpy as np
import torch
from embedder import Judge, Packed, Words, similarities
from torch import Tensor, nn
from tqdm import tqdm

import blocksparse.torch.sparsify as bss
from blocksparse.models.lines import add_line, missing, need_known
from blocksparse.program import finish, positive

TARGETS = r"bert\.encoder"
CALIBRATION = 65_536  # tokens for Wanda and OBS
RATE, WARM_UP, CLIP = 5e-4, 20, 1.0
STAGES = (0.0, 0.1, 0.25, 0.45)  # of staged OBS: where each begins, as shares of the training
ONE_SHOT = ("magnitude", "wanda", "obs")
METHODS = ("gradual", "obs", "obs-staged", "magnitude", "wanda", "lasso")
SETTINGS = ("steps", "tokens", "rate", "strength", "similar", "swapped", "scope", "seed", "limit")
GRID = [(s, b) for b in (32, 16) for s in (0.8, 0.9, 0.5, 0.7)]


# ---- The training --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A way to a sparse model."""

    method: str
    sparsity: float
    block: int

    @property
    def name(self) -> str:
        """Of its line."""
        return f"{self.method}-{self.sparsity:g}-b{self.block}" if self.block else self.method


class Training:
    """A student beside its teacher. On a card a step is the replay of a CUDA graph, one for each length."""

    def __init__(self, packed: Packed, teacher: nn.Module, student: nn.Module, options: argparse.Namespace) -> None:
        self.packed, self.student, self.options = packed, student, options
        self.cuda = options.device.startswith("cuda")
        student.requires_grad_(True)
        student.get_submodule("bert.embeddings").requires_grad_(False)  # is half of the model, and not pruned
        layers = [f"bert.encoder.layer.{i}" for i in range(len(student.bert.encoder.layer))]  # type: ignore[union-attr, arg-type]
        self.distiller = bss.Distiller(
            teacher,
            student,
            layers=[*layers, "pool"],
            temperature=1.0 if options.similar else None,
            logits=lambda embeddings: options.similar * similarities(embeddings),
        )
        self.parameters = [p for p in student.parameters() if p.requires_grad]
        self.rate = torch.tensor(options.rate, device=options.device) if self.cuda else torch.tensor(options.rate)
        fused = {"fused": True, "capturable": True} if self.cuda else {}
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.rate if self.cuda else options.rate, betas=(0.9, 0.98), weight_decay=0.0, **fused
        )
        self.graphs: dict[int, tuple[Any, Tensor, Tensor]] = {}

    def forget_graphs(self) -> None:
        """Needed where a mask has become another tensor."""
        self.graphs.clear()

    def run(self, after: Callable[[int], None], before: Callable[[int], None] = lambda step: None) -> float:
        """All steps, with `before` and `after` around each; returns the loss of the last ones, a mean."""
        losses = []
        for step in tqdm(range(self.options.steps), unit="step", disable=None, leave=False):
            before(step)
            self.set_rate(step)
            given = (self.options.tokens, self.options.seed, self.options.swapped)
            losses.append(self.step(self.packed.batch(step, *given)))
            after(step)
        return float(torch.stack(losses[-50:]).mean())

    def set_rate(self, step: int) -> None:
        """Up for the first steps, then down a cosine to 5 %."""
        share = 0.05 + 0.95 * (1 + math.cos(math.pi * step / self.options.steps)) / 2
        self.rate.fill_(self.options.rate * min(1.0, (step + 1) / WARM_UP) * share)
        if not self.cuda:
            self.optimizer.param_groups[0]["lr"] = float(self.rate)

    def step(self, ids: Tensor) -> Tensor:
        """One update; returns its loss."""
        if not self.cuda or self.options.no_graphs:
            return self._step(ids)
        length = ids.size(1)
        if length not in self.graphs:
            if len(self.optimizer.state) == 0:  # the optimizer makes its moments outside of a graph
                return self._step(ids)
            self.graphs[length] = self._captured(ids)
        graph, place, loss = self.graphs[length]
        place.copy_(ids)
        graph.replay()
        return loss.clone()

    def _step(self, ids: Tensor) -> Tensor:
        for parameter in self.parameters:  # zeroed in place, for graphs write into it
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.cuda, cache_enabled=False):
            loss = self.distiller((ids,)).loss
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        return loss.detach()

    def _captured(self, ids: Tensor) -> tuple[Any, Tensor, Tensor]:
        place = ids.clone()
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        kept = [t.clone() for t in self._state()]
        with torch.cuda.stream(side):  # libraries make their workspaces
            self._step(place)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(self._state(), kept, strict=True):
            tensor.data.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step(place)
        return graph, place, loss

    def _state(self) -> list[Tensor]:
        moments = [t for p in self.parameters for t in self.optimizer.state[p].values()]
        return [p.detach() for p in self.parameters] + moments


def train(arm: Arm, packed: Packed, dense: nn.Module, judge: Judge, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: its line of results."""
    student, result = copy.deepcopy(dense), {}
    if arm.method in ("dense", "words"):
        return judge(student if arm.method == "dense" else Words(student.bert))
    if arm.method in ONE_SHOT:
        began = time.perf_counter()
        masks: Any = _one_shot(student, arm.method, arm.sparsity, arm.block, packed)
        result = {"seconds_of_one_shot": round(time.perf_counter() - began, 1), "before": judge(student)}
        pruner = _fixed(arm.block, arm.sparsity)
    else:
        masks = None
        pruner = _pruner(arm, options.steps, options.scope)
    if arm.method == "obs-staged":
        return _staged(arm, student, packed, dense, judge, options)
    pruner.prepare(student, masks)
    training = Training(packed, dense, student, options)

    def after(step: int) -> None:
        if isinstance(pruner, bss.GroupLasso):
            pruner.rate = options.strength * float(training.rate)
        pruner.step()

    began = time.perf_counter()
    loss = training.run(after)
    result |= {"seconds": round(time.perf_counter() - began, 1), "loss": round(loss, 5)}
    masks = pruner.masks()
    pruner.squash_mask()
    save_masks(options.out, arm, masks)
    return result | judge(student) | {"density": _density(masks)}


def _pruner(arm: Arm, steps: int, scope: str) -> bss.Pruner:
    schedule = bss.PolynomialDecay(arm.sparsity, 0, steps * 6 // 10, frequency=max(1, steps // 40))
    kind: Any = bss.GroupLasso if arm.method == "lasso" else bss.MagnitudePruner
    extra: dict[str, Any] = {"rate": 0.0} if arm.method == "lasso" else {}
    made: bss.Pruner = kind(schedule, block_size=arm.block, targets=TARGETS, scope=scope, **extra)
    return made


def _fixed(block: int, sparsity: float) -> bss.Pruner:
    """Keeps the blocks that it is given."""
    return bss.MagnitudePruner(bss.Constant(sparsity), regrow=False, block_size=block, targets=TARGETS)


def _one_shot(student: nn.Module, method: str, sparsity: float, block: int, packed: Packed) -> Any:
    rows = packed.starts[:: max(1, len(packed.starts) // (CALIBRATION // 32))]
    batches = [(packed.sentences(part, 32),) for part in torch.split(rows, 512)]
    options: Any = {"targets": TARGETS, "calibration": batches, "progress": False}
    return bss.sparsify_(student, method, sparsity=sparsity, block_size=block, **options)


def _staged(
    arm: Arm, student: nn.Module, packed: Packed, dense: nn.Module, judge: Judge, options: argparse.Namespace
) -> dict[str, Any]:
    """Block OBS in stages, the density falling by the same factor at each: as `make prune` does it."""
    training, count = Training(packed, dense, student, options), len(STAGES)
    sparsities = {int(s * options.steps): 1 - (1 - arm.sparsity) ** ((i + 1) / count) for i, s in enumerate(STAGES)}
    now: list[bss.Pruner] = []

    def before(step: int) -> None:
        if step not in sparsities:
            return
        if now:
            now.pop().squash_mask()
        masks = _one_shot(student, "obs", sparsities[step], arm.block, packed)
        now.append(_fixed(arm.block, sparsities[step]))
        now[0].prepare(student, masks)
        training.forget_graphs()

    began = time.perf_counter()
    loss = training.run(lambda step: now[0].step(), before)
    seconds, masks = time.perf_counter() - began, now[0].masks()
    now[0].squash_mask()
    save_masks(options.out, arm, masks)
    return {"seconds": round(seconds, 1), "loss": round(loss, 5), **judge(student), "density": _density(masks)}


def _density(masks: dict[str, Tensor]) -> float:
    """Of the live blocks, over all layers."""
    return round(float(sum(m.sum() for m in masks.values()) / sum(m.numel() for m in masks.values())), 5)


def save_masks(out: Path, arm: Arm, masks: dict[str, Tensor]) -> None:
    """For speed.py, which times a model with these blocks."""
    np.savez_compressed(out / f"masks-{arm.name}.npz", **{n: m.cpu().numpy() for n, m in masks.items()})  # type: ignore[arg-type]


# ---- All of it -----------------------------------------------------------------------------------------------------


def arms(methods: list[str]) -> list[Arm]:
    """The most telling ones first."""
    return [
        Arm("dense", 0.0, 0),
        Arm("words", 0.0, 0),
        *(Arm(m, s, b) for s, b in GRID for m in METHODS if m in methods),
    ]


def machine(device: str) -> str:
    """What it runs on."""
    return str(torch.cuda.get_device_name()) if device.startswith("cuda") else platform.machine()


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--packed", type=Path, required=True, help="folder that pack.py has made")
    parser.add_argument("--out", type=Path, default=Path("out/sentences"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no arm is begun that would end later")
    parser.add_argument("--arms", nargs="+", help="only these, such as gradual-0.8-b32")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--tokens", type=positive, default=16_384, help="of a step")
    parser.add_argument("--rate", type=float, default=RATE, help="of learning")
    parser.add_argument("--strength", type=float, default=1.0, help="of the group lasso")
    parser.add_argument(
        "--similar", type=float, default=0.0, help="similarities within a batch are learned, times this"
    )
    parser.add_argument("--swapped", type=float, default=0.0, help="share of random tokens in every other sentence")
    parser.add_argument("--scope", choices=("layer", "global"), default="layer", help="of gradual and lasso")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=positive, help="texts of a set with ten folds: for a first look")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs: slower")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    options, began = parse(), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    packed = Packed(options.packed, options.device)
    dense = packed.model().requires_grad_(False)
    judge = Judge(packed, dense, options.limit)
    settings = {name: getattr(options, name) for name in SETTINGS}
    file, chosen = options.out / "sentences.jsonl", {arm.name: arm for arm in arms(options.methods)}
    wanted = ({"arm": name, **settings} for name in need_known(options.arms, chosen))
    for each in missing(file, wanted, options.minutes):
        arm = chosen[each["arm"]]
        line = {**each, "method": arm.method, "sparsity": arm.sparsity, "block": arm.block}
        line |= train(arm, packed, dense, judge, options)
        line |= {"torch": torch.__version__, "machine": machine(options.device), "date": time.strftime("%Y-%m-%d")}
        add_line(file, line)
        print(
            f"{arm.name}: mean {line['mean']:.2f} %, cosine {line['cosine']:.4f}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    finish(main, goes_on=True)
