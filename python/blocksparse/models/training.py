"""Training a language model, so that what was stopped goes on as if it had not been."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..torch.modules.digits import same_integers
from ..torch.recurrent import State
from . import checkpoint
from .captured import CapturedStep
from .config import ModelConfig
from .config import TrainConfig as TrainConfig
from .distributed import ALONE, World, device_of
from .folder import locked
from .language import LanguageModel, Stopped, bits_per_byte, loss_of
from .log import LINE as LINE
from .log import Log
from .weights import load_model as load_model
from .weights import load_weights as load_weights

SUMS = 100  # bits per byte of training are averaged over so many updates


def read_text(paths: list[Path]) -> Tensor:
    """All bytes of some files, one after the other.

    Raises:
        OSError: one cannot be read.
        ValueError: there is nothing in them.
    """
    data = b"".join(path.read_bytes() for path in paths)
    if not data:
        raise ValueError(f"[lm] {', '.join(map(str, paths))}: no text in there")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Trainer:
    """A model on its way: weights, their average, Adam's moments, the place in the text and the state there.

    Several processes (`joined`) share the streams of a batch; gradients are averaged, so all have the same weights.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TrainConfig,
        text: Tensor,
        device: torch.device | str,
        world: World = ALONE,
    ) -> None:
        self.model_config, self.config, self.device, self.world = model, config, device_of(device), world
        self.mine = world.part(config.batch, "batch")  # of the streams
        self.length = (text.numel() - 1) // config.batch  # of a stream
        if self.length < config.steps:
            raise ValueError(
                f"[lm] text has {text.numel()} bytes, needs batch * steps + 1 = {config.batch * config.steps + 1}"
            )
        self.text_hash = hashlib.sha256(text.numpy().tobytes()).hexdigest()
        self.text = text.to(self.device)
        torch.manual_seed(config.seed)
        self.model = LanguageModel(model).to(self.device)
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.adam = torch.optim.Adam(self.model.parameters(), config.lr, fused=self.device.type == "cuda")
        self.update = 0
        self.state: State | None = None
        self.captured: CapturedStep | None = None  # on a card, from the first update on
        self.recent: list[float] = []

    @property
    def bytes_seen(self) -> int:
        """By all updates until now."""
        return self.update * self.config.batch * self.config.steps

    def is_finite(self) -> bool:
        """Whether no weight has ever become NaN or infinite."""
        return all(bool(t.isfinite().all()) for t in self.ema.values())

    def rate(self) -> float:
        """The learning rate of the next update."""
        return self.config.rate(self.update)

    def _chunk(self) -> tuple[Tensor, Tensor]:
        """(input, what follows) [steps, streams of this process] of the next update. Streams that end begin again."""
        c = self.config
        per_epoch = self.length // c.steps
        begin = self.update % per_epoch * c.steps
        if begin == 0:
            self.state = None
        streams = self.text[: self.length * c.batch + 1]
        at = torch.arange(c.batch, device=self.device)[self.mine] * self.length + begin
        index = at + torch.arange(c.steps + 1, device=self.device).unsqueeze(1)
        part = streams[index].long()
        return part[:-1], part[1:]

    def step(self) -> float:
        """One update; its bits per byte."""
        c = self.config
        x, y = self._chunk()
        rate = self.rate()
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = self._gradients(x, y)
        self.world.average([p.grad for p in self.model.parameters() if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.clip)
        self.adam.step()
        self.update += 1
        decay = min(c.ema, (1 + self.update) / (10 + self.update))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.model.parameters()), 1 - decay)
        bits = float(self.world.sum(loss.detach().clone())) / self.world.size / math.log(2)
        self.recent = [*self.recent[-(SUMS - 1) :], bits]
        return bits

    def _forward(self, x: Tensor, y: Tensor, state: State | None) -> tuple[Tensor, State]:
        with torch.autocast(self.device.type, torch.bfloat16, self.config.bf16):
            logits, state = self.model(x, state)
        return loss_of(logits, y), state

    def _gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward, as a graph on a card; the loss. The state goes on."""
        if self.device.type == "cuda":
            if self.captured is None:
                parameters = list(self.model.parameters())
                with torch.no_grad():
                    like = self._forward(x[:1], y[:1], None)[1]
                self.captured = CapturedStep(self._forward, parameters, x, like)
            loss, self.state = self.captured(x, y, self.state)
            return loss
        loss, state = self._forward(x, y, self.state)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        self.state = (state[0].detach(), state[1].detach())
        return loss.detach()

    def evaluate(self, text: Tensor, streams: int = 16, stop: Callable[[], bool] = lambda: False) -> float:
        """Bits per byte of another text, by the averaged weights; raises Stopped where `stop` says so."""
        mine = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        try:
            self._set(self.ema)
            text, bf16 = text.to(self.device), self.config.bf16
            return bits_per_byte(self.model, text, streams, bf16=bf16, world=self.world, stop=stop)
        finally:
            self._set(mine)

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])

    def save(self, path: Path) -> None:
        """Everything that `resume` needs; the first process writes it."""
        state = None if self.state is None else tuple(self.world.gather(part, 1) for part in self.state)
        if not self.world.first:
            return
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"ema.{k}": v for k, v in self.ema.items()}
        for (name, p), entry in zip(self.model.named_parameters(), self._moments(), strict=True):
            assert entry is not None or p.grad is None
            tensors |= {f"adam.{name}.{k}": v for k, v in (entry or {}).items()}
        if state is not None:
            tensors |= {"state.h": state[0], "state.c": state[1]}
        tensors["recent"] = torch.tensor(self.recent, dtype=torch.float64)
        tensors["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        header = {
            "model": asdict(self.model_config),
            "training": asdict(self.config),
            "update": self.update,
            "text": self.text_hash,
        }
        checkpoint.save(path, tensors, header)

    def _moments(self) -> list[dict[str, Tensor] | None]:
        return [self.adam.state.get(p) for p in self.model.parameters()]

    def resume(self, path: Path, *, other_updates: bool = False) -> int:
        """Goes on from a checkpoint. All of it is checked before anything is replaced.

        Args:
            path: of the checkpoint.
            other_updates: whether it may be of a training of another number of updates, which changes the learning
                rates from here on.

        Returns:
            The number of updates that its training was to have.

        Raises:
            ValueError: it is damaged, not whole, or of another model, training or text.
        """
        tensors, header = checkpoint.load(path)
        mine = {"model": asdict(self.model_config), "training": asdict(self.config), "text": self.text_hash}
        updates = updates_of(header)
        if updates is None:
            raise ValueError(f"[lm] {path} describes no training")
        for what, value in mine.items():
            found = header.get(what)
            if what == "training" and other_updates:
                found = {**header["training"], "updates": self.config.updates}
            if found != value:
                raise ValueError(f"[lm] {path} is of another {what}: {_difference(found, value)}")
        if "update" not in header:
            raise ValueError(f"[lm] {path} lacks 'update'")
        update = header["update"]
        if type(update) is not int or not 0 <= update <= updates:
            raise ValueError(f"[lm] {path} is at update {update}, needs 0 to {updates}")
        if update > self.config.updates:
            raise ValueError(f"[lm] {path} has done {update} updates, needs --updates {update} or more")
        self._check(tensors, update, path)
        self._restore(tensors, update, path)
        return updates

    def _needed(self, update: int) -> dict[str, Tensor]:
        """Tensors like those of a checkpoint at this update, by their names; those of the model have their values."""
        needed = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        needed |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        needed |= {"recent": torch.empty(min(update, SUMS), dtype=torch.float64), "random": torch.get_rng_state()}
        if update > 0:
            for name, p in self.model.named_parameters():
                like = {"exp_avg": p, "exp_avg_sq": p, "step": torch.empty(())}
                needed |= {f"adam.{name}.{moment}": tensor for moment, tensor in like.items()}
            state = torch.empty(1, self.config.batch, self.model_config.hidden)
            needed |= {"state.h": state, "state.c": state}
        if self.device.type == "cuda":
            needed["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return needed

    def _check(self, tensors: dict[str, Tensor], update: int, path: Path) -> None:
        """Raises ValueError unless a checkpoint has all that `_restore` takes, and nothing else."""
        needed = self._needed(update)
        narrow = {torch.bfloat16} if self.config.bf16 else set()
        graphs = {f"model.{name}" for name, _ in self.model.named_buffers()}
        for name, like in needed.items():
            dtypes = {like.dtype} | (narrow if name.startswith("state.") else set())
            found, wrong = tensors.get(name), ""
            if found is None:
                wrong = "" if name == "random.cuda" else f"lacks {name!r}"  # it may come from a CPU
            elif name in graphs:
                wrong = "" if same_integers(found, like) else f"{name} is of another graph"
            elif found.shape != like.shape:
                wrong = f"{name} is {list(found.shape)}, needs {list(like.shape)}"
            elif found.dtype not in dtypes:
                wrong = f"{name} is {found.dtype}, needs {like.dtype}"
            elif name == "random" and not _is_random_state(found):
                wrong = f"{name} is no state of a generator"
            if wrong:
                what = "model" if name.startswith("model.") else "training"
                raise ValueError(f"[lm] {path} does not fit the {what}: {wrong}")
        unknown = tensors.keys() - needed.keys() - {"random.cuda"}
        if unknown:
            raise ValueError(f"[lm] {path} holds {min(unknown)!r}, which is of no such training")

    def _restore(self, tensors: dict[str, Tensor], update: int, path: Path) -> None:
        """Takes over what `_check` found right."""
        load_weights(self.model, tensors, "model.", path)
        fused = bool(self.adam.defaults["fused"])  # then Adam's counts of updates are on the card, too
        for name, p in self.model.named_parameters():
            self.ema[name].copy_(tensors[f"ema.{name}"])
            prefix = f"adam.{name}."
            entry = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            moved = {k: v if k == "step" and not fused else v.to(self.device) for k, v in entry.items()}
            if moved:
                self.adam.state[p] = moved
        if "state.h" in tensors:
            h, c = (tensors[f"state.{x}"][:, self.mine] for x in "hc")
            self.state = (h.to(self.device), c.to(self.device))
        self.recent = tensors["recent"].tolist()
        torch.set_rng_state(tensors["random"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        self.update = update


def updates_of(header: dict[str, Any]) -> int | None:
    """The number of updates that a checkpoint's training was to have, if its header says it."""
    training = header.get("training")
    updates = training.get("updates") if isinstance(training, dict) else None
    return updates if type(updates) is int else None


def _difference(found: Any, needed: Any) -> str:
    if not isinstance(found, dict) or not isinstance(needed, dict):
        return f"{found}, needs {needed}"
    keys = [key for key in {**needed, **found} if found.get(key, ...) != needed.get(key, ...)]
    return "; ".join(f"{key} is {found.get(key)}, needs {needed.get(key)}" for key in keys)


def _is_random_state(state: Tensor) -> bool:
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        return False
    return True


def train(
    trainer: Trainer,
    folder: Path,
    valid: Tensor | None,
    *,
    save_every: int = 200,
    evaluate_every: int | None = None,
    until: int | None = None,
    streams: int = 16,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Trains to the end, or `until` an update; writes folder/last.safetensors and folder/log.jsonl.

    Returns:
        Whether it got there: not where `stop` said so before.

    Raises:
        OSError: one of them cannot be written.
        ValueError: a number of updates is not positive, another process trains into the folder, or loss or weights are
            no numbers any more; the last checkpoint is kept.

    `report` gets a line for each update; those at checkpoints, or `evaluate_every` so many, have the bits per byte of
    `valid`, read as so many `streams`, and are logged. Their seconds are of updates alone.

    `stop` is asked before each update and during evaluations. Where it says so in one of the processes, all write what
    they have and return. Whoever goes on makes the log what it would be without that: see `Log`.
    """
    check_updates(save_every=save_every, evaluate_every=evaluate_every, until=until)
    world = trainer.world
    last = min(trainer.config.updates, until or trainer.config.updates)

    def saves() -> bool:
        return trainer.update % save_every == 0 or trainer.update == last

    def is_due() -> bool:  # a line of the log
        return saves() or trainer.update % (evaluate_every or save_every) == 0

    def evaluate(line: dict[str, Any]) -> bool:  # into the line; False: stopped
        if valid is not None:
            with suppress(Stopped):
                line["valid"] = round(trainer.evaluate(valid, streams, stop), 4)
            return "valid" in line
        return True

    with locked(folder) if world.first else nullcontext():
        log = Log(folder / "log.jsonl", trainer.update) if world.first else None
        line = (log.unfinished if log else None) or {}
        spent = log.seconds if log else 0.0
        saved = trainer.update
        finished = True
        if world.any(bool(line) and is_due(), trainer.device):
            finished = evaluate(line)
            if log and finished:
                log.add(line)
                report(line)
        while finished and trainer.update < last and not world.any(stop(), trainer.device):
            rate, begin = trainer.rate(), time.perf_counter()
            bits = trainer.step()
            spent += time.perf_counter() - begin
            line = {
                "update": trainer.update,
                "bytes": trainer.bytes_seen,
                "seconds": round(spent, 3),
                "train": round(sum(trainer.recent) / len(trainer.recent), 4),
                "lr": rate,
            }
            if not math.isfinite(bits) or (saves() and not trainer.is_finite()):
                raise _failure(trainer, rate)
            if is_due():
                finished = evaluate(line)
                if log:  # before the checkpoint: a line too many is cut when training goes on
                    log.add(line, finished=finished)
                if finished and saves():
                    trainer.save(folder / "last.safetensors")
                    saved = trainer.update
            if log:
                report(line)
        if trainer.update > saved:  # an end was asked for
            if not trainer.is_finite():
                raise _failure(trainer, rate)
            if log and not is_due():
                log.add(line, finished=False)
            trainer.save(folder / "last.safetensors")
        return finished and trainer.update >= last


def check_updates(**numbers: int | None) -> None:
    """Raises ValueError where a number of updates is given, and not positive."""
    for name, updates in numbers.items():
        if updates is not None and updates < 1:
            raise ValueError(f"[lm] {name} is {updates}, needs 1 or more")


def _failure(trainer: Trainer, rate: float) -> ValueError:
    return ValueError(f"[lm] training has failed by update {trainer.update}: lr {rate:g} may be too high")
