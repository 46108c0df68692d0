"""Training a language model, so that what was stopped goes on as if it had not been."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...torch.recurrent import State
from .. import checkpoint, loop
from ..distributed import ALONE, World, device_of
from ..files import AnyPath, paths_of, read_whole
from ..log import LINE as LINE
from ..trainer import SUMS as SUMS
from ..trainer import Trainer as BaseTrainer
from .captured import CapturedStep
from .config import ModelConfig
from .config import TrainConfig as TrainConfig
from .network import LanguageModel, bits_per_byte, loss_of
from .weights import load_model as load_model


def read_text(paths: AnyPath | Iterable[AnyPath]) -> Tensor:
    """All bytes of a file, or of some files one after the other.

    Raises:
        OSError: one cannot be read.
        ValueError: there is nothing in them.
    """
    files = paths_of(paths)
    data = b"".join(map(read_whole, files))
    if not data:
        raise ValueError(f"[lm] {', '.join(map(str, files))}: no text in there")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Trainer(BaseTrainer):
    """A language model on its way: beside its weights, the place in the text and the state there.

    Several processes (`joined`) share the streams of a batch; gradients are averaged, so all have the same weights.
    """

    kind, data_name = checkpoint.LM, "text"
    model: LanguageModel
    model_config: ModelConfig
    config: TrainConfig

    def __init__(
        self,
        model: ModelConfig,
        config: TrainConfig,
        text: Tensor,
        device: torch.device | str,
        world: World = ALONE,
    ) -> None:
        self.mine = world.part(config.batch, "batch")  # of the streams
        self.length = (text.numel() - 1) // config.batch  # of a stream
        if self.length < config.steps:
            raise ValueError(
                f"[lm] text has {text.numel()} bytes, needs batch * steps + 1 = {config.batch * config.steps + 1}"
            )
        text_hash = hashlib.sha256(text.numpy().tobytes()).hexdigest()
        place = device_of(device)
        self.text = text.to(place)
        torch.manual_seed(config.seed)
        made = LanguageModel(model).to(place)
        adam = torch.optim.Adam(made.parameters(), config.lr, fused=place.type == "cuda")
        super().__init__(model, config, made, adam, text_hash, place, world)
        self.state: State | None = None
        self.captured: CapturedStep | None = None  # on a card, from the first update on

    @property
    def bytes_seen(self) -> int:
        """By all updates until now."""
        return self.update * self.config.batch * self.config.steps

    def seen(self) -> dict[str, int]:
        """See `trainer.Trainer`."""
        return {"bytes": self.bytes_seen}

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
        return self.count(bits)

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
        with self.averaged():
            text, bf16 = text.to(self.device), self.config.bf16
            return bits_per_byte(self.model, text, streams, bf16=bf16, world=self.world, stop=stop)

    def more_tensors(self) -> dict[str, Tensor]:
        """The state, of all processes."""
        if self.state is None:
            return {}
        return {f"state.{x}": self.world.gather(part, 1) for x, part in zip("hc", self.state, strict=True)}

    def more_needed(self, update: int) -> dict[str, tuple[Tensor, set[torch.dtype]]]:
        """The state, from the first update on."""
        state = torch.empty(1, self.config.batch, self.model_config.hidden)
        narrow = {torch.bfloat16} if self.config.bf16 else set()
        return {f"state.{x}": (state, narrow) for x in "hc"} if update > 0 else {}

    def more_restored(self, tensors: dict[str, Tensor]) -> None:
        """This process's streams."""
        if "state.h" in tensors:
            h, c = (tensors[f"state.{x}"][:, self.mine] for x in "hc")
            self.state = (h.to(self.device), c.to(self.device))


def train(
    trainer: Trainer,
    folder: AnyPath,
    valid: Tensor | None,
    *,
    save_every: int = 200,
    evaluate_every: int | None = None,
    until: int | None = None,
    streams: int = 16,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """`loop.train`, with evaluations of the bits per byte of `valid`, read as so many `streams`."""
    evaluate = None if valid is None else evaluation(trainer, valid, streams)
    how: dict[str, Any] = {"save_every": save_every, "evaluate_every": evaluate_every, "until": until}
    return loop.train(trainer, folder, evaluate, **how, report=report, stop=stop)


def evaluation(trainer: Trainer, valid: Tensor, streams: int = 16) -> loop.Evaluate:
    """What `loop.train` asks for the bits per byte of a text."""
    return lambda stop: {"valid": round(trainer.evaluate(valid, streams, stop), 4)}
