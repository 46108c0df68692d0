"""A sentence-embedding model pruned in every way, distilled on IMDB's text, and judged on six labelled sets.

    python pack.py sentences --data DATA --out packed/sentences
    python sentences.py --packed packed/sentences --out out/sentences --device cuda --minutes 8

A line of results for each arm, written once it is complete; the same command goes on after a stop. The most telling
arms come first, so `--minutes` leaves out the others.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judge import accuracy
from packing import read_arrays
from torch import Tensor, nn
from tqdm import tqdm

import blocksparse.torch.sparsify as bss

TARGETS = r"bert\.encoder"
LENGTHS = (8, 16, 32, 64)  # tokens of a sentence in training, all of a batch alike: no padding
HELD_OUT = 2048  # sentences of 32 tokens for the cosine
CALIBRATION = 65_536  # tokens for Wanda and OBS
RATE, WARM_UP, CLIP = 5e-4, 20, 1.0
STAGES = (0.0, 0.1, 0.25, 0.45)  # of staged OBS: where each begins, as shares of the training
ONE_SHOT = ("magnitude", "wanda", "obs")
METHODS = ("gradual", "obs", "obs-staged", "magnitude", "wanda", "lasso")
GRID = [(s, b) for b in (32, 16) for s in (0.8, 0.9, 0.5, 0.7)]


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

    def batch(self, step: int, tokens: int, seed: int) -> Tensor:
        """The batch of a step; which one depends on step and seed alone."""
        random = np.random.default_rng((seed, step))
        length = LENGTHS[int(random.integers(len(LENGTHS)))]
        rows = torch.from_numpy(random.integers(len(self.starts), size=tokens // length)).to(self.device)
        return self.sentences(self.starts[rows], length)

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
            losses.append(self.step(self.packed.batch(step, self.options.tokens, self.options.seed)))
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
        pruner = _pruner(arm, options.steps)
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


def _pruner(arm: Arm, steps: int) -> bss.Pruner:
    schedule = bss.PolynomialDecay(arm.sparsity, 0, steps * 6 // 10, frequency=max(1, steps // 40))
    kind: Any = bss.GroupLasso if arm.method == "lasso" else bss.MagnitudePruner
    extra: dict[str, Any] = {"rate": 0.0} if arm.method == "lasso" else {}
    made: bss.Pruner = kind(schedule, block_size=arm.block, targets=TARGETS, **extra)
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
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a step")
    parser.add_argument("--rate", type=float, default=RATE, help="of learning")
    parser.add_argument("--strength", type=float, default=1.0, help="of the group lasso")
    parser.add_argument(
        "--similar", type=float, default=0.0, help="similarities within a batch are learned, times this"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="texts of a set with ten folds: for a first look")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs: slower")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    options, began = parse(), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    file, done = options.out / "sentences.jsonl", []
    for text in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):  # half a line, of a run that was killed: it is made again
            done.append(json.loads(text))
    packed = Packed(options.packed, options.device)
    dense = packed.model().requires_grad_(False)
    judge = Judge(packed, dense, options.limit)
    longest = 0.0
    for arm in arms(options.methods):
        settings = {
            name: getattr(options, name) for name in ("steps", "tokens", "rate", "strength", "similar", "seed", "limit")
        }
        wanted = {"arm": arm.name, **settings}
        if any(wanted.items() <= line.items() for line in done) or (options.arms and arm.name not in options.arms):
            continue
        start = time.monotonic()
        if start + longest - began > 60 * options.minutes:
            print(f"{arm.name} and what follows is left for another run: {options.minutes:g} minutes are over")
            break
        line = {**wanted, "method": arm.method, "sparsity": arm.sparsity, "block": arm.block}
        line |= train(arm, packed, dense, judge, options)
        line |= {"torch": torch.__version__, "machine": machine(options.device), "date": time.strftime("%Y-%m-%d")}
        longest = max(longest, time.monotonic() - start)
        with open(file, "a") as results:
            results.write(json.dumps(line) + "\n")
        print(f"{arm.name}: mean {line['mean']:.2f} %, cosine {line['cosine']:.4f}, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command goes on from here.")
